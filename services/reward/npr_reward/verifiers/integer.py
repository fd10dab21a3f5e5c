"""Equality of integers, as competitions such as AIME ask for."""

from __future__ import annotations

from collections.abc import Mapping

from npr_reward.numerals import parse_integer
from npr_reward.verdict import Verdict
from npr_reward.verifiers.base import TextVerifier, equality, shorten


class IntegerVerifier(TextVerifier):
    """The final answer is the gold integer; nothing is evaluated."""

    name = "integer"
    description = "Compares integers written in digits, such as AIME answers; leading zeros don't matter."
    max_answer_chars = 200

    def judge(self, answer: str, gold: str, metadata: Mapping[str, str]) -> Verdict:
        """Unscorable when the gold is no integer."""
        expected = parse_integer(gold)
        if expected is None:
            return Verdict.unscorable(f"the gold {shorten(gold)} is no integer")
        return equality(parse_integer(answer) == expected, answer, gold)
