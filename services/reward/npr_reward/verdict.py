"""The three-valued verdict.

`UNSCORABLE` says that nobody can tell (the gold does not parse, the verifier failed twice); it never stands for a
wrong answer, because unscorable responses leave the advantage altogether.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class VerdictKind(StrEnum):
    """What a verifier says of an answer."""

    CORRECT = "correct"
    INCORRECT = "incorrect"
    UNSCORABLE = "unscorable"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict and, in one sentence, why."""

    kind: VerdictKind
    reason: str

    @classmethod
    def correct(cls, reason: str) -> Verdict:
        """The answer equals the gold."""
        return cls(VerdictKind.CORRECT, reason)

    @classmethod
    def incorrect(cls, reason: str) -> Verdict:
        """The answer differs from the gold, or there is none."""
        return cls(VerdictKind.INCORRECT, reason)

    @classmethod
    def unscorable(cls, reason: str) -> Verdict:
        """Nobody can tell."""
        return cls(VerdictKind.UNSCORABLE, reason)
