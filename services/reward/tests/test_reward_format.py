"""The graded format reward: its range, where it is 0, and that more faults never score higher."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npr_common.dialects import load_dialect
from npr_common.schema import ViolationCode, has_final_box, parse_text
from npr_reward.format import FINAL_BOX, WEIGHTS, WORST, grade_format, penalty

NPR = load_dialect("npr")
CODES = st.lists(st.sampled_from(sorted(WEIGHTS)))
TAG_SOUP = st.lists(
    st.sampled_from(
        [
            *map(NPR.text_of, NPR.tags),
            "1: a",
            "2: b",
            " ",
            "\n",
            "\\boxed{7}",
            "\\boxed{",
            "}",
            "prose",
            "<",
            "</plan",
        ]
    )
).map("".join)


def block(branches: int) -> str:
    plans = "".join(f"<plan>{n}: part {n}</plan>" for n in range(1, branches + 1))
    steps = "".join(f"<step>{n}: done {n}</step>" for n in range(1, branches + 1))
    return f"<guideline>{plans}</guideline>\n{steps}\n<takeaway>joined</takeaway>"


WELL_FORMED = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(
    lambda sizes: "Think. ".join(map(block, sizes)) + " So \\boxed{7}."
)


def test_every_violation_has_a_weight() -> None:
    assert set(WEIGHTS) == {code.value for code in ViolationCode} | {FINAL_BOX}
    assert all(WORST <= weight < 0 for weight in WEIGHTS.values())


@given(CODES, st.sampled_from(sorted(WEIGHTS)))
def test_one_more_fault_never_scores_higher(codes: list[str], another: str) -> None:
    assert WORST <= penalty([*codes, another]) <= penalty(codes) <= 0


@given(TAG_SOUP)
def test_the_penalty_is_in_range_and_zero_only_without_faults(text: str) -> None:
    grade = grade_format(text, NPR)
    result = parse_text(text, NPR)
    perfect = result.well_formed and result.holds_block and has_final_box(result.tree)
    assert WORST <= grade.penalty <= 0
    assert (grade.penalty == 0) == grade.passed == perfect
    assert result.holds_block or grade.penalty == WORST


@given(WELL_FORMED)
def test_a_well_formed_response_with_its_box_has_no_penalty(text: str) -> None:
    assert grade_format(text, NPR).penalty == 0


@given(WELL_FORMED, st.data())
def test_a_response_that_lost_a_tag_is_penalised(text: str, data: st.DataObject) -> None:
    tag = data.draw(st.sampled_from([NPR.text_of(tag) for tag in NPR.tags]))
    start = data.draw(st.sampled_from([i for i in range(len(text)) if text.startswith(tag, i)]))
    assert WORST <= grade_format(text[:start] + text[start + len(tag) :], NPR).penalty < 0


@pytest.mark.parametrize("ending", ["", "\\boxed{7", "\\boxed{7} or \\boxed{8}", "the answer is 7"])
def test_the_box_must_be_one_and_complete(ending: str) -> None:
    grade = grade_format(block(2) + ending, NPR)
    assert [fault.code for fault in grade.faults] == [FINAL_BOX]
    assert grade.penalty == WEIGHTS[FINAL_BOX]


def test_a_box_before_the_last_takeaway_is_not_the_final_one() -> None:
    text = block(2).replace("joined", "\\boxed{7}")
    assert [fault.code for fault in grade_format(text, NPR).faults] == [FINAL_BOX]
