"""Public trajectories: JSON lines with `prompt` and `response`, behind a path, a package reference or an fsspec URL."""

import json
from typing import Any, NamedTuple

import fsspec

from npr_common.errors import InvalidArgumentError, NotFoundError
from npr_common.references import resolve_reference


class Example(NamedTuple):
    """One problem and its written solution."""

    prompt: str
    response: str


def read_examples(dataset_url: str) -> list[Example]:
    """All examples, in order.

    Raises:
        NotFoundError: nothing is there.
        InvalidArgumentError: a line is no JSON object with both fields; it is named by its number.
    """
    location = resolve_reference(dataset_url)
    try:
        with fsspec.open(location, "rt", encoding="utf-8") as file:
            return [_example(line, number, dataset_url) for number, line in enumerate(file, start=1) if line.strip()]
    except FileNotFoundError as error:
        raise NotFoundError(f"no data set at {dataset_url}: correct dataset_url in the recipe") from error


def _example(line: str, number: int, dataset_url: str) -> Example:
    try:
        item: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidArgumentError(f"{dataset_url} line {number} is not JSON: {error.msg}") from error
    if not isinstance(item, dict) or not all(isinstance(item.get(key), str) for key in Example._fields):
        raise InvalidArgumentError(f"{dataset_url} line {number} needs the strings `prompt` and `response`")
    return Example(item["prompt"], item["response"])
