"""JSON Lines files that a user hands in: each fault is one line that names the file, the line and the cure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npr_common.errors import InvalidArgumentError, NotFoundError


@dataclass(frozen=True)
class Record:
    """One object of a file."""

    path: Path
    line: int
    fields: Mapping[str, Any]

    def text(self, *names: str, default: str | None = None) -> str:
        """The first of these fields that is there, as text; numbers are taken as they are written.

        Raises:
            InvalidArgumentError: none is there and there is no default, or it is not text.
        """
        for name in names:
            value = self.fields.get(name)
            if isinstance(value, str | int | float) and not isinstance(value, bool):
                return str(value)
            if value is not None:
                raise self.fault(f"field {name!r} must be text")
        if default is None:
            raise self.fault(f"no field {_either(names)}")
        return default

    def fault(self, what: str) -> InvalidArgumentError:
        """An error about this record."""
        return InvalidArgumentError(f"{self.path}:{self.line}: {what}", reason="BAD_RECORD")


def read_records(path: Path) -> Iterator[Record]:
    """The objects of a JSON Lines file; empty lines are skipped.

    Raises:
        NotFoundError: there is no such file.
        InvalidArgumentError: a line is no JSON object, or the file is no text.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield Record(path, number, _parse(path, number, line))
    except (FileNotFoundError, IsADirectoryError) as error:
        raise NotFoundError(f"no file {path}: give the path of a JSON Lines file") from error
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{path} is not UTF-8 text: give a JSON Lines file") from error


def _parse(path: Path, number: int, line: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        message = f"{path}:{number}: not JSON ({error.msg}); one object a line"
        raise InvalidArgumentError(message, reason="BAD_RECORD") from error
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{path}:{number}: not a JSON object; one object a line", reason="BAD_RECORD")
    return value


def _either(names: Sequence[str]) -> str:
    return " or ".join(repr(name) for name in names)
