"""Equality of texts after normalisation."""

from __future__ import annotations

import re
from collections.abc import Mapping

from npr_reward.answer import unwrap
from npr_reward.verdict import Verdict
from npr_reward.verifiers.base import TextVerifier, equality

TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")


def normalise(text: str) -> str:
    """Lower case, single spaces, no box, dollars, text commands, quotes or final full stop."""
    plain = TEXT_COMMAND.sub(r"\1", unwrap(text)).strip(" \t\n\"'`.")
    return " ".join(plain.casefold().split())


class ExactVerifier(TextVerifier):
    """The final answer is the gold, letter case and spacing aside."""

    name = "exact"
    description = "Compares the final answer with the gold as text, ignoring case, spacing and wrapping."

    def judge(self, answer: str, gold: str, metadata: Mapping[str, str]) -> Verdict:
        """Unscorable when the gold is blank."""
        if not normalise(gold):
            return Verdict.unscorable("the gold is blank")
        return equality(normalise(answer) == normalise(gold), answer, gold)
