r"""Mathematical equality of LaTeX answers.

The order of the checks is what makes it safe and exact:
1. The same text is the same answer, whether or not it parses.
2. A sequence with an ellipsis is compared item by item: the parser would drop the ellipsis.
3. A gold that is no mathematics is unscorable; one that is a division by zero is a text (a clock time).
4. Numbers too large to evaluate are never evaluated.
5. Everything else is `symbolic.equality`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from npr_reward.answer import unwrap
from npr_reward.numerals import parse_numeral
from npr_reward.symbolic.equality import equal
from npr_reward.symbolic.latex import Value, is_finite, parse_latex
from npr_reward.symbolic.magnitude import too_large
from npr_reward.verdict import Verdict, VerdictKind
from npr_reward.verifiers.base import Verifier, equality, shorten
from npr_reward.verifiers.exact import TEXT_COMMAND

_ELLIPSIS = re.compile(r"\\[lcd]?dots[cb]?\b|\.\.\.|\u2026")
_COMMA = re.compile(r",(?![^({\[]*[)}\]])")


class MathVerifier(Verifier):
    """The final answer is mathematically equal to the gold."""

    name = "math"
    description = "Compares LaTeX mathematics: numbers, expressions, equations, sets, intervals, tuples, matrices."

    def glance(self, answer: str, gold: str, metadata: Mapping[str, str]) -> Verdict | None:
        """Numbers that are written out need no parser; a decimal that differs may still be a rounding of the gold."""
        left, right = parse_numeral(answer), parse_numeral(gold)
        if left is None or right is None:
            return None
        same = left.value == right.value
        return equality(same, answer, gold) if same or (left.exact and right.exact) else None

    def judge(self, answer: str, gold: str, metadata: Mapping[str, str]) -> Verdict:
        """Unscorable when the gold is not mathematics, or too large to evaluate and not matched literally."""
        gold = unwrap(gold)
        if _literal(answer) == _literal(gold) != "":
            return Verdict.correct(f"{shorten(answer)} is the gold literally")
        if _ELLIPSIS.search(gold) or _ELLIPSIS.search(answer):
            return _judge_sequences(answer, gold)
        return judge_latex(answer, gold)


def _judge_sequences(answer: str, gold: str) -> Verdict:
    """The verdict on comma-separated items, of which at least one holds an ellipsis: item by item, in order."""
    items, expected = _items(answer), _items(gold)
    if len(items) != len(expected):
        return Verdict.incorrect(f"{len(items)} items where the gold has {len(expected)}")
    for item, wanted in zip(items, expected, strict=True):
        verdict = _judge_item(item, wanted)
        if verdict.kind is not VerdictKind.CORRECT:
            return verdict
    return equality(True, answer, gold)


def _judge_item(item: str, wanted: str) -> Verdict:
    """An item with an ellipsis is compared as text, any other by its value."""
    if _literal(item) == _literal(wanted):
        return equality(True, item, wanted)
    return equality(False, item, wanted) if "..." in item + wanted else judge_latex(item, wanted)


def judge_latex(answer: str, gold: str) -> Verdict:
    """The verdict on two texts that differ, by parsing both as LaTeX."""
    expected = parse_latex(gold)
    if expected is None:
        return Verdict.unscorable(f"the gold {shorten(gold)} does not parse")
    if not is_finite(expected):
        return Verdict.incorrect(f"{shorten(answer)} is not {shorten(gold)}, which is compared as text")
    found = parse_latex(answer)
    if found is None:
        return Verdict.incorrect(f"the answer {shorten(answer)} does not parse")
    return judge_values(expected, found, answer, gold)


def judge_values(expected: Value, found: Value, answer: str, gold: str) -> Verdict:
    """The verdict on two values, which nothing evaluates if either is too large; the texts are for its reason."""
    huge = too_large(found), too_large(expected)
    if not any(huge):
        return equality(equal(expected, found), answer, gold)
    if found == expected:
        return equality(True, answer, gold)
    if all(huge):
        return Verdict.unscorable("answer and gold are both too large to evaluate")
    return Verdict.incorrect(f"{shorten(answer if huge[0] else gold)} is too large to evaluate, the other is not")


def _items(sequence: str) -> list[str]:
    """The comma-separated items, ellipses as `...`."""
    return [_ELLIPSIS.sub("...", item).strip() for item in _COMMA.split(sequence)]


def _literal(text: str) -> str:
    """`text` without spaces and text commands."""
    return "".join(TEXT_COMMAND.sub(r"\1", text).split())
