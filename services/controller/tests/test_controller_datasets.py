"""Sources: the public files' forms, generated families, and the order in which problems are met."""

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from npr_common.rpc import InvalidArgumentError, NotFoundError
from npr_controller.datasets import ProblemStream, open_source
from npr_controller.recipe import Source

GRID = {"header": ["House", "Name"], "rows": [["1", "Ann"], ["2", "Bob"]]}

# Records in the public files' own forms, and what must be read from them: question, gold, verifier.
FORMS = {
    "aime, upper case": ({"ID": "2024-I-1", "Problem": "p", "Answer": 33}, ("p", "33", "math")),
    "aime, nemo": ({"problem": "p", "expected_answer": "204", "reference_solution": "s"}, ("p", "204", "math")),
    "math500": ({"problem": "p", "solution": "s", "answer": "\\frac{1}{2}"}, ("p", "\\frac{1}{2}", "math")),
    "amc23": ({"question": "p", "answer": 27.0}, ("p", "27", "math")),
    "olympiadbench": ({"question": "p", "final_answer": ["2", "3"], "solution": ["s"]}, ("p", "2, 3", "math")),
    "minerva": ({"problem": "p", "solution": "so \\boxed{\\frac{a}{b}}, done"}, ("p", "\\frac{a}{b}", "math")),
    "zebra grid": ({"puzzle": "z", "solution": GRID}, ("z", json.dumps(GRID), "logic_grid")),
    "zebra choice": (
        {"puzzle": "z", "question": "who?", "choices": ["Ann", "Bob"], "answer": "Bob"},
        ("z\n\nwho?\n\nA. Ann\nB. Bob", "B", "multiple_choice"),
    ),
    "dapo 17k": (
        {"prompt": [{"role": "user", "content": "p"}], "reward_model": {"ground_truth": "34"}},
        ("p", "34", "math"),
    ),
    "orz": (
        {
            "conversations": [
                {"from": "human", "value": "p"},
                {"from": "assistant", "ground_truth": {"value": "5"}},
            ]
        },
        ("p", "5", "math"),
    ),
}


def source(**fields: object) -> Source:
    """A source from a recipe's words."""
    adapter: TypeAdapter[Source] = TypeAdapter(Source)
    return adapter.validate_python(fields)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_every_public_form_is_read_from_every_kind_of_file(form: str, kind: str, tmp_path: Path) -> None:
    record, expected = FORMS[form]
    path = tmp_path / f"test.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([record]), path)
    else:
        path.write_text(json.dumps(record) + "\n" if kind == "jsonl" else json.dumps([record]))
    problem = open_source(source(kind="file", url=str(path)))[0]
    assert (problem.text, problem.gold, problem.verifier) == expected


def test_named_fields_win_and_the_limit_holds(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(json.dumps({"q": f"p{place}", "a": place, "problem": "no"}) + "\n" for place in range(5)))
    problems = open_source(
        source(kind="file", url=str(path), question_field="q", answer_field="a", verifier="exact", limit=2)
    )
    assert [(problem.text, problem.gold, problem.verifier) for problem in (problems[0], problems[1])] == [
        ("p0", "0", "exact"),
        ("p1", "1", "exact"),
    ]
    assert len(problems) == 2


@pytest.mark.parametrize(
    ("content", "error", "told"),
    [
        ('{"title": "x"}', InvalidArgumentError, "record 0: can't find question and answer among the fields title"),
        ("not json", InvalidArgumentError, "neither Parquet nor JSON lines"),
        ("", InvalidArgumentError, "holds no problem"),
        (None, NotFoundError, "is not there: correct the path$"),
    ],
)
def test_bad_files_are_one_line_errors(content: str | None, error: type[Exception], told: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(error, match=told) as caught:
        open_source(source(kind="file", url=str(path)))
    assert "\n" not in str(caught.value)


def test_a_packages_own_file_is_found_and_an_absent_package_is_named() -> None:
    pytest.importorskip("sgl_eval")
    aime = open_source(source(kind="file", url="package:sgl_eval/_vendored/nemo_skills/dataset/aime24/test.txt"))
    assert len(aime) == 30
    assert all(aime[place].gold.isdigit() for place in range(30))
    with pytest.raises(NotFoundError, match="no_such_package is not installed"):
        open_source(source(kind="file", url="package:no_such_package/test.txt"))


def test_the_bundled_task_keeps_its_splits_apart() -> None:
    texts = {
        split: {problem.text for problem in _all(open_source(source(kind="multipart", split=split, count=200)))}
        for split in ("train", "validation", "test")
    }
    assert not texts["train"] & texts["test"]
    assert not texts["train"] & texts["validation"]


def test_reasoning_gym_families_are_repeatable_and_checked() -> None:
    first, again = (source(kind="reasoning_gym", family="chain_sum", count=5, seed=1) for _ in range(2))
    assert _all(open_source(first)) == _all(open_source(again))
    with pytest.raises(NotFoundError, match="no family 'chain_sums'"):
        open_source(source(kind="reasoning_gym", family="chain_sums", count=5))
    with pytest.raises(InvalidArgumentError, match="chain_sum"):
        open_source(source(kind="reasoning_gym", family="chain_sum", count=5, options={"no_such_option": 1}))


def test_a_stream_meets_every_problem_once_an_epoch_and_shuffles_each_anew() -> None:
    problems = open_source(source(kind="multipart", split="train", count=20))
    stream = ProblemStream(problems, 0, "zero")
    epochs = [[problem.problem_id for problem in stream.take(epoch * 20, 20)] for epoch in range(3)]
    for ids in epochs:
        assert set(Counter(ids).values()) == {1}
    assert epochs[0] != epochs[1] != epochs[2]
    assert [problem.problem_id for problem in stream.take(15, 10)] == epochs[0][15:] + epochs[1][:5]
    assert stream.take(7, 30) == ProblemStream(problems, 0, "zero").take(7, 30)
    assert stream.take(0, 20) != ProblemStream(problems, 0, "npr").take(0, 20)
    assert stream.take(0, 20) != ProblemStream(problems, 1, "zero").take(0, 20)


def _all(problems):
    return [problems[place] for place in range(len(problems))]
