"""What npr_common.tasks promises: exact answers, determinism, disjoint splits, well-formed solutions."""

from __future__ import annotations

import ast
import operator
import re
from itertools import pairwise

import pytest

from npr_common.dialects import load_dialect
from npr_common.tasks import Family, MultipartTask, Problem, Split, solution_text
from npr_common.tasks.multipart import split_of

TASK = MultipartTask()
SAMPLE = [problem for split in Split for problem in TASK.problems(150, split)]


def answer_from_text(prompt_text: str) -> int:
    """An independent reading of the question: nothing of the generator's own arithmetic."""
    family, rest = prompt_text.split(" of ")
    values = []
    for definition in rest.split(", "):
        left, right, addend = map(int, re.split(r"[*+]", definition.split("=")[1]))
        values.append(left * right + addend)
    match family:
        case "max":
            return max(values)
        case "min":
            return min(values)
    return sum(values)


def test_gold_is_the_answer_to_the_prompt() -> None:
    assert all(int(problem.gold) == answer_from_text(problem.prompt_text) for problem in SAMPLE)


def test_a_problem_depends_on_its_split_and_index_alone() -> None:
    later = MultipartTask().problem(7, "test")
    assert later == TASK.problem(7, Split.TEST)
    assert later.prompt_text != TASK.problem(8, Split.TEST).prompt_text


def test_splits_are_disjoint() -> None:
    texts = {split: {problem.prompt_text for problem in TASK.problems(1500, split)} for split in Split}
    assert all(len(found) > 1400 for found in texts.values())
    for one, other in pairwise([*Split, Split.TRAIN]):
        assert not texts[one] & texts[other]


def test_splits_are_disjoint_across_settings() -> None:
    narrow = MultipartTask(families=(Family.SUM,), parts=(2, 2), factor=(2, 4), addend=(1, 3))
    assert {split_of(problem.prompt_text) for problem in narrow.problems(200, Split.TRAIN)} == {Split.TRAIN}


def test_settings_bound_what_is_drawn() -> None:
    task = MultipartTask(families=(Family.MIN,), parts=(3, 3), factor=(5, 6), addend=(2, 2))
    for problem in task.problems(50, Split.TRAIN):
        assert problem.family is Family.MIN
        assert len(problem.parts) == 3
        assert all({part.left, part.right} <= {5, 6} and part.addend == 2 for part in problem.parts)


def test_every_family_and_size_is_drawn() -> None:
    assert {(problem.family, len(problem.parts)) for problem in SAMPLE} == {(f, n) for f in Family for n in (2, 3, 4)}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"families": ()}, "families"),
        ({"parts": (3, 2)}, "parts"),
        ({"parts": (2, 9)}, "parts"),
        ({"factor": (0, 4)}, "factor"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, tuple[int, int]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MultipartTask(**settings)  # type: ignore[arg-type]


def equations(text: str) -> list[tuple[str, int]]:
    return [(left, int(right)) for left, right in re.findall(r"(\d+[*+]\d+)=(\d+)", text)]


def holds(expression: str, value: int) -> bool:
    node = ast.parse(expression, mode="eval").body
    assert isinstance(node, ast.BinOp)
    apply = {ast.Mult: operator.mul, ast.Add: operator.add}[type(node.op)]
    return bool(apply(ast.literal_eval(node.left), ast.literal_eval(node.right)) == value)


@pytest.mark.parametrize("dialect_name", ["npr", "multiverse"])
@pytest.mark.parametrize("problem", SAMPLE[::30], ids=lambda problem: str(problem.problem_id))
def test_canonical_solution_is_well_formed_and_right(problem: Problem, dialect_name: str) -> None:
    from npr_common.schema import parse_text

    dialect = load_dialect(dialect_name)
    solution = solution_text(problem, dialect)
    parsed = parse_text(solution, dialect)
    assert parsed.well_formed, parsed.violations
    assert solution.endswith(f"\\boxed{{{problem.gold}}}")
    found = equations(solution)
    assert len(found) >= 2 * len(problem.parts)
    assert all(holds(*equation) for equation in found)
