r"""The final answer: braces matched, the last outermost `\boxed{}` counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npr_common.schema import boxed, final_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{4}", "4"),
        (r"first \boxed{3}, no: \boxed{ 4 }.", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
        (r"\boxed {5}", "5"),
        (r"\boxed{\boxed{6}}", r"\boxed{6}"),
        (r"\boxed{a \boxed{7}", "7"),
        (r"\boxed{8} \boxed{9", "8"),
        (r"} { \boxed{1}", "1"),
        (r"\boxed{}", ""),
        (r"\boxed{", None),
        (r"\boxed 5", None),
        (r"\\boxed{5}", None),
        ("", None),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", "\\", "x", "\\}"]), max_size=30).map("".join))
def test_any_text_has_boxes_that_stand_in_it(text):
    for content in boxed(text):
        assert f"\\boxed{{{content}}}" in text


def test_many_open_boxes_take_linear_time():
    assert final_answer("\\boxed{" * 200_000) is None
    assert len(boxed("\\boxed{" * 50_000 + "}" * 50_000)) == 1
