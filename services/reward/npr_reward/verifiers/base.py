"""What a verifier is.

A verifier has two halves. `extract` finds the answer in a response; it runs in the service's own process and must be
linear in the response. `judge` compares the answer with the gold; it may evaluate, loop or exhaust memory, because it
runs in the sandbox, and it must be pure. `glance` is the shortcut for verdicts that need no evaluation at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from npr_reward.answer import final_answer
from npr_reward.verdict import Verdict


class Verifier(ABC):
    """Compares answers with golds of one form."""

    name: ClassVar[str]
    """The name in `ScoreItem.verifier`."""
    description: ClassVar[str]
    """What it compares, in one sentence."""
    max_answer_chars: ClassVar[int] = 2000
    """Longer answers are incorrect unread: none of this form is that long."""

    def extract(self, response_text: str) -> str | None:
        """The answer that the response commits to, or None. Linear in the response."""
        return final_answer(response_text)

    def glance(self, answer: str, gold: str, metadata: Mapping[str, str]) -> Verdict | None:
        """A verdict by linear string work alone, or None to have it judged in the sandbox."""
        return None

    @abstractmethod
    def judge(self, answer: str, gold: str, metadata: Mapping[str, str]) -> Verdict:
        """The verdict. Pure; an exception means that the verifier failed, not that the answer is wrong."""


class TextVerifier(Verifier):
    """A verifier that evaluates nothing: its verdicts need no sandbox."""

    def glance(self, answer: str, gold: str, metadata: Mapping[str, str]) -> Verdict | None:
        """The verdict itself."""
        return self.judge(answer, gold, metadata)


def equality(equal: bool, answer: str, gold: str) -> Verdict:
    """Correct or incorrect, with a reason that shows both sides, shortened."""
    if equal:
        return Verdict.correct(f"{shorten(answer)} equals {shorten(gold)}")
    return Verdict.incorrect(f"{shorten(answer)} differs from {shorten(gold)}")


def shorten(text: str, limit: int = 80) -> str:
    """`text` in quotes, cut to `limit` characters."""
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")
