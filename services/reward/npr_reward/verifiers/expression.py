"""Equality of expressions in program notation, such as `3*x**2 + sqrt(y)`; LaTeX where either is not."""

from __future__ import annotations

from collections.abc import Mapping

from npr_reward.answer import unwrap
from npr_reward.symbolic.expression import NotAnExpressionError, parse_expression
from npr_reward.verdict import Verdict
from npr_reward.verifiers.base import Verifier
from npr_reward.verifiers.math import judge_latex, judge_values


class ExpressionVerifier(Verifier):
    """The final answer is, as an expression, identical to the gold."""

    name = "expression"
    description = "Compares expressions in program notation (3*x**2 + sqrt(y)) symbolically; falls back on LaTeX."

    def judge(self, answer: str, gold: str, metadata: Mapping[str, str]) -> Verdict:
        """Unscorable when the gold parses neither way, or is too large to evaluate and not matched literally."""
        gold = unwrap(gold)
        try:
            expected, found = parse_expression(gold), parse_expression(answer)
        except NotAnExpressionError:
            return judge_latex(answer, gold)
        return judge_values(expected, found, answer, gold)
