r"""Cues: what the engine feeds, instead of sampling, where a step or a takeaway starts.

Invariants:
- `\n<step>i:` opens step i, and `\n<takeaway>` the takeaway, in the dialect's spelling of tags and labels.
- The separator, the tag and the label are encoded each on its own, so the tag is its one token whatever stands beside
  it. The engine feeds these ids and the learner puts the same ones where a text has its steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from npr_common.dialects import Dialect
from npr_common.tags import Role

_SEPARATOR = "\n"


class Cue(NamedTuple):
    """A cue's text, in the parts that are encoded on their own."""

    parts: tuple[str, ...]

    @property
    def text(self) -> str:
        """The cue as it is spelled."""
        return "".join(self.parts)

    def encode(self, tokenizer: Any) -> list[int]:
        """The cue's ids in a `transformers` tokenizer that has the dialect's tags as tokens."""
        return [token for part in self.parts for token in tokenizer.encode(part, add_special_tokens=False)]


def step_cue(dialect: Dialect, number: int) -> Cue:
    """What opens the step with this number, counted from 1."""
    return Cue((_SEPARATOR, dialect.open(Role.STEP), dialect.label_of(number)))


def takeaway_cue(dialect: Dialect) -> Cue:
    """What opens the takeaway."""
    return Cue((_SEPARATOR, dialect.open(Role.TAKEAWAY)))
