"""Verifiers on arbitrary text: linear halves never raise, and verdicts are what they claim to be."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npr_reward.answer import final_answer
from npr_reward.numerals import parse_numeral
from npr_reward.symbolic.expression import NotAnExpressionError, parse_expression
from npr_reward.symbolic.latex import parse_latex
from npr_reward.symbolic.magnitude import too_large
from npr_reward.verdict import VerdictKind
from npr_reward.verifiers import load_verifiers
from npr_reward.verifiers.reasoning_gym import ReasoningGymVerifier

VERIFIERS = load_verifiers()
MATHS_SOUP = st.lists(
    st.sampled_from(
        [
            "\\boxed{",
            "}",
            "{",
            "$",
            "\\$",
            "answer is ",
            "Answer: ",
            "\n",
            "42",
            "x",
            "\\frac",
            "/",
            ".",
            ",",
            "A",
            '"',
            ":",
        ]
    )
).map("".join)
INTEGERS = st.integers(-(10**30), 10**30)


@given(MATHS_SOUP, MATHS_SOUP, st.sampled_from(sorted(VERIFIERS)))
def test_extract_and_glance_never_raise(response: str, gold: str, name: str) -> None:
    verifier = VERIFIERS[name]
    answer = verifier.extract(response)
    assert answer is None or answer.strip() == answer != ""
    if answer is not None:
        verdict = verifier.glance(answer, gold, {})
        assert verdict is None or verdict.reason


@given(
    st.text(alphabet="abc123{}\\$ \n", max_size=30), st.text(alphabet="abc123 ", min_size=1).map(str.strip).filter(bool)
)
def test_the_final_box_wins(before: str, answer: str) -> None:
    assert final_answer(f"{before} \\boxed{{{answer}}} and that is all") == answer


@given(MATHS_SOUP)
def test_a_box_that_never_closes_is_no_answer(before: str) -> None:
    assert final_answer(before + " \\boxed{42") is None


@given(INTEGERS, INTEGERS)
def test_integers_are_judged_at_a_glance(left: int, right: int) -> None:
    verdict = VERIFIERS["math"].glance(f"{left:,}", f"${right}$", {})
    assert verdict is not None
    assert (verdict.kind is VerdictKind.CORRECT) == (left == right)


@given(INTEGERS, INTEGERS.filter(bool))
def test_fractions_keep_their_value(numerator: int, denominator: int) -> None:
    sign = "-" if numerator * denominator < 0 else ""
    numeral = parse_numeral(f"{sign}\\frac{{{abs(numerator)}}}{{{abs(denominator)}}}")
    assert numeral is not None
    assert numeral.value == Fraction(numerator, denominator)


@pytest.mark.parametrize(
    ("text", "huge"),
    [
        ("10^{9999}", False),
        ("10^{10001}", True),
        ("10^{-10001}", True),
        ("1^{10^{100}}", False),
        ("x^{10^{5}}", True),
        ("3000!", False),
        ("5000!", True),
        (r"\binom{100}{50}", False),
        (r"\binom{10^9}{5\cdot 10^8}", True),
        (r"\sum_{i=1}^{10^9} i", True),
        (r"\sum_{i=1}^{n} i", False),
        (r"\begin{pmatrix} 1 & 10^{10^{10}} \end{pmatrix}", True),
        (r"\{1, 10^{10^{10}}\}", True),
        (r"x < 10^{10^{10}}", True),
        (r"\sin(10^{10^{10}})", True),
        (r"\pi^{\pi^{\pi^{\pi}}}", True),
    ],
)
def test_the_magnitude_guard_knows_its_limits(text: str, huge: bool) -> None:
    value = parse_latex(text)
    assert value is not None
    assert too_large(value) is huge


@pytest.mark.parametrize(
    "text", ["__import__('os')", "x.y", "[1]", "lambda: 1", "f(x)", "sin(x, y)", "True", "'a'", "2x", "(" * 500, ""]
)
def test_program_notation_is_a_closed_set(text: str) -> None:
    with pytest.raises(NotAnExpressionError):
        parse_expression(text)


@pytest.mark.parametrize(
    ("answer", "gold", "kind"),
    [
        ("b", "B", VerdictKind.CORRECT),
        ("mars", "B", VerdictKind.CORRECT),
        ("Venus", "B", VerdictKind.INCORRECT),
        ("B", "Mars", VerdictKind.CORRECT),
        ("D", "B", VerdictKind.INCORRECT),
        ("B", "D", VerdictKind.UNSCORABLE),
    ],
)
def test_a_choice_is_its_letter_or_its_text(answer: str, gold: str, kind: VerdictKind) -> None:
    verdict = VERIFIERS["multiple_choice"].judge(answer, gold, {"choices": '["Venus", "Mars", "Io"]'})
    assert verdict.kind is kind


def test_unreadable_choices_are_unscorable() -> None:
    assert VERIFIERS["multiple_choice"].judge("A", "A", {"choices": "["}).kind is VerdictKind.UNSCORABLE


def test_reasoning_gym_asks_the_family() -> None:
    pytest.importorskip("reasoning_gym")
    verifier = ReasoningGymVerifier()
    assert verifier.judge("7", "7", {"family": "basic_arithmetic"}).kind is VerdictKind.CORRECT
    assert verifier.judge("8", "7", {"family": "basic_arithmetic"}).kind is VerdictKind.INCORRECT
    assert verifier.judge("7", "7", {"family": "no_such_family"}).kind is VerdictKind.UNSCORABLE


def test_verifiers_are_loaded_by_path_and_names_are_unique() -> None:
    with pytest.raises(ValueError, match=r"package\.module:ClassName"):
        load_verifiers(["npr_reward.verifiers.math"])
    with pytest.raises(ValueError, match="two verifiers"):
        load_verifiers(["npr_reward.verifiers.math:MathVerifier"] * 2)
