"""Where a command's words go."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console, RenderableType
from rich.text import Text

PIPED_WIDTH = 240


@dataclass(frozen=True)
class Output:
    """Results on standard output, as JSON lines or for a person; talk on standard error."""

    as_json: bool
    results: Console = field(default_factory=lambda: Console(width=_results_width()))
    talk: Console = field(default_factory=lambda: Console(stderr=True))

    def result(self, data: Any, drawn: RenderableType) -> None:
        """One result: `data` as one line of JSON, or what is drawn of it."""
        if self.as_json:
            self.json_line(data)
        else:
            self.results.print(drawn, soft_wrap=isinstance(drawn, Text))

    def json_line(self, data: Any) -> None:
        """One line of JSON."""
        typer.echo(json.dumps(plain(data), ensure_ascii=False))

    def line(self, text: str) -> None:
        """One plain line on standard output, never wrapped, never read as markup."""
        typer.echo(text)

    def say(self, text: str) -> None:
        """Something for the person who waits."""
        self.talk.print(text, markup=False, highlight=False, soft_wrap=True)


def _results_width() -> int | None:
    """The terminal's own width; ample where a file or another command reads."""
    return None if sys.stdout.isatty() else PIPED_WIDTH


def plain(data: Any) -> Any:
    """Messages within `data` as plain data, under the names of the protos."""
    if isinstance(data, Message):
        return MessageToDict(data, preserving_proto_field_name=True)
    if isinstance(data, dict):
        return {key: plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    return data
