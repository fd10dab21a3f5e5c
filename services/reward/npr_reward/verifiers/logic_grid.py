"""Grids of logic puzzles, as ZebraLogic writes them.

Gold and answer are JSON, either `{"House 1": {"Name": "Arnold", ...}, ...}`, possibly under the key `solution`, or
ZebraLogic's table `{"header": ["House", "Name", ...], "rows": [["1", "Arnold", ...], ...]}`. Every cell of the gold
must be right (puzzle accuracy); letter case and spacing don't matter; cells that the gold lacks are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from npr_reward.answer import final_answer
from npr_reward.verdict import Verdict
from npr_reward.verifiers.base import TextVerifier
from npr_reward.verifiers.exact import normalise

Cell = tuple[str, str]
Grid = dict[Cell, str]


class LogicGridVerifier(TextVerifier):
    """Every cell of the gold grid is right in the answer's last JSON object."""

    name = "logic_grid"
    description = "Compares JSON grids cell by cell (ZebraLogic); all of the gold's cells must be right."
    max_answer_chars = 20_000

    def extract(self, response_text: str) -> str | None:
        """The JSON object in the final box, or else the response's last one."""
        boxed = final_answer(response_text)
        return boxed if boxed is not None and boxed.startswith("{") else _last_object(response_text)

    def judge(self, answer: str, gold: str, metadata: Mapping[str, str]) -> Verdict:
        """Unscorable when the gold is no grid."""
        expected = parse_grid(gold)
        if not expected:
            return Verdict.unscorable("the gold is not a JSON grid")
        found = parse_grid(answer)
        if found is None:
            return Verdict.incorrect("the answer is not a JSON grid")
        right = sum(found.get(cell) == value for cell, value in expected.items())
        reason = f"{right} of {len(expected)} cells are right"
        return Verdict.correct(reason) if right == len(expected) else Verdict.incorrect(reason)


def parse_grid(text: str) -> Grid | None:
    """The cells by (house, attribute), normalised; None when `text` is no grid."""
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    if isinstance(value, dict) and isinstance(value.get("solution"), dict):
        value = value["solution"]
    if not isinstance(value, dict):
        return None
    return _from_table(value) if "header" in value and "rows" in value else _from_houses(value)


def _from_table(table: dict[str, Any]) -> Grid | None:
    """Cells of a header and rows whose first column is the house."""
    header, rows = table["header"], table["rows"]
    if not (isinstance(header, list) and isinstance(rows, list) and all(isinstance(row, list) for row in rows)):
        return None
    return {
        (_house(row[0]), normalise(str(attribute))): normalise(str(value))
        for row in rows
        if row
        for attribute, value in zip(header[1:], row[1:], strict=False)
    }


def _from_houses(houses: dict[str, Any]) -> Grid | None:
    """Cells of a mapping from house to attributes."""
    if not all(isinstance(attributes, dict) for attributes in houses.values()):
        return None
    return {
        (_house(house), normalise(attribute)): normalise(str(value))
        for house, attributes in houses.items()
        for attribute, value in attributes.items()
    }


def _house(label: object) -> str:
    """`House 1`, `house 1` and `1` are one house."""
    return normalise(str(label)).removeprefix("house").strip()


def _last_object(text: str) -> str | None:
    """From the last `}` back to the brace that opens its group."""
    end = text.rfind("}")
    depth = 0
    for index in range(end, -1, -1):
        depth += (text[index] == "}") - (text[index] == "{")
        if depth == 0:
            return text[index : end + 1]
    return None
