r"""Which fields of the public benchmarks' files hold the question, the answer and its kind.

A record's *form* is found from its own keys, so that a file needs no configuration:

| form | benchmarks | question | answer |
| --- | --- | --- | --- |
| logic grid | ZebraLogic grid mode | `puzzle` | `solution` {header, rows}, as JSON |
| multiple choice | ZebraLogic and others | `puzzle` + `question`, or `question` | `answer`, of `choices` |
| conversation | DAPO-17k, ORZ | last user turn | `reward_model.ground_truth`, or the assistant's `ground_truth` |
| plain | AIME, HMMT, AMC23, MATH500, OlympiadBench, Minerva | `problem`, `question` | `answer`, or the solution's box |
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npr_common.rpc import InvalidArgumentError
from npr_common.schema import final_answer

QUESTIONS = ("problem", "question", "Problem", "Question", "puzzle", "input")
ANSWERS = ("expected_answer", "final_answer", "answer", "Answer", "target", "gold", "ground_truth")
SOLUTIONS = ("solution", "Solution", "reference_solution")
IDS = ("id", "unique_id", "problem_idx", "ID")


@dataclass(frozen=True)
class Reading:
    """What a record says."""

    question: str
    gold: str
    verifier: str
    choices: tuple[str, ...] = ()


def read_record(record: Mapping[str, Any], question_field: str | None, answer_field: str | None) -> Reading:
    """The question and answer of one record, by its own form unless the fields are named.

    Raises `InvalidArgumentError` that names the keys there are when none of the forms fits.
    """
    if question_field or answer_field:
        question = record.get(question_field) if question_field else _first(record, QUESTIONS)
        answer = record.get(answer_field) if answer_field else _answer(record)
        return _plain(record, question, answer)
    if isinstance(record.get("solution"), Mapping) and "puzzle" in record:
        return Reading(str(record["puzzle"]), _grid(record["solution"]), "logic_grid")
    if record.get("choices") is not None and len(record["choices"]) > 0:
        return _multiple_choice(record)
    turns = record.get("prompt", record.get("conversations"))
    if turns is not None and not isinstance(turns, str):
        return _conversation(record, list(turns))
    return _plain(record, _first(record, QUESTIONS), _answer(record))


def _plain(record: Mapping[str, Any], question: Any, answer: Any) -> Reading:
    if not isinstance(question, str) or not question.strip() or answer is None:
        raise InvalidArgumentError(
            "can't find question and answer among the fields "
            + ", ".join(sorted(map(str, record)))
            + "; name them by question_field and answer_field",
            reason="UNKNOWN_DATA_FORM",
        )
    return Reading(question, _gold(answer), "math")


def _answer(record: Mapping[str, Any]) -> Any:
    answer = _first(record, ANSWERS)
    if answer is not None:
        return answer
    solution = _first(record, SOLUTIONS)
    return final_answer(solution) if isinstance(solution, str) else None


def _multiple_choice(record: Mapping[str, Any]) -> Reading:
    choices = tuple(str(choice) for choice in record["choices"])
    question = "\n\n".join(str(record[key]) for key in ("puzzle", "question") if record.get(key))
    listed = "\n".join(f"{chr(ord('A') + index)}. {choice}" for index, choice in enumerate(choices))
    return Reading(f"{question}\n\n{listed}", _letter(record.get("answer"), choices), "multiple_choice", choices)


def _letter(answer: Any, choices: tuple[str, ...]) -> str:
    """The letter of the right choice, which files give as the choice itself, its index, or its letter."""
    if isinstance(answer, int) and 0 <= answer < len(choices):
        return chr(ord("A") + answer)
    if str(answer) in choices:
        return chr(ord("A") + choices.index(str(answer)))
    letter = str(answer).strip().upper()
    if len(letter) == 1 and 0 <= ord(letter) - ord("A") < len(choices):
        return letter
    raise InvalidArgumentError(f"the answer {answer!r} is none of the choices", reason="UNKNOWN_DATA_FORM")


def _conversation(record: Mapping[str, Any], turns: list[Mapping[str, Any]]) -> Reading:
    asked = [turn for turn in turns if turn.get("role", turn.get("from")) in {"user", "human"}]
    question = asked[-1].get("content", asked[-1].get("value")) if asked else None
    reward = record.get("reward_model")
    answer = reward.get("ground_truth") if isinstance(reward, Mapping) else _told_answer(turns)
    return _plain(record, question, answer)


def _told_answer(turns: list[Mapping[str, Any]]) -> Any:
    for turn in turns:
        truth = turn.get("ground_truth")
        if isinstance(truth, Mapping):
            return truth.get("value")
        if truth is not None:
            return truth
    return None


def _grid(solution: Mapping[str, Any]) -> str:
    rows = [[str(cell) for cell in row] for row in solution["rows"]]
    return json.dumps({"header": [str(name) for name in solution["header"]], "rows": rows})


def _gold(answer: Any) -> str:
    """One string: a list of one is its element, more are a set, and a float that is whole is written as an integer."""
    if hasattr(answer, "tolist"):
        answer = answer.tolist()
    if isinstance(answer, list | tuple):
        return ", ".join(_gold(element) for element in answer)
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    return str(answer)


def _first(record: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)
