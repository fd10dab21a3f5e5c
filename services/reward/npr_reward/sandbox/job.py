"""What crosses the pipe between service and sandbox: JSON, never pickles, so that the sandbox is not trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from npr_reward.verdict import Verdict, VerdictKind


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to judge. Hashable: equal jobs have equal verdicts."""

    verifier: str
    answer: str
    gold: str
    labels: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, verifier: str, answer: str, gold: str, metadata: Mapping[str, str]) -> Job:
        """The job with `metadata` in a fixed order."""
        return cls(verifier, answer, gold, tuple(sorted(metadata.items())))

    @property
    def metadata(self) -> dict[str, str]:
        """Labels of the prompt."""
        return dict(self.labels)

    def encode(self) -> bytes:
        """The job as JSON."""
        return json.dumps([self.verifier, self.answer, self.gold, self.metadata]).encode()

    @classmethod
    def decode(cls, payload: bytes) -> Job:
        """The inverse of `encode`."""
        verifier, answer, gold, metadata = json.loads(payload)
        return cls.of(verifier, answer, gold, metadata)


def encode_verdict(verdict: Verdict) -> bytes:
    """The verdict as JSON."""
    return json.dumps([verdict.kind, verdict.reason]).encode()


def decode_verdict(payload: bytes) -> Verdict:
    """The inverse of `encode_verdict`."""
    kind, reason = json.loads(payload)
    return Verdict(VerdictKind(kind), reason)
