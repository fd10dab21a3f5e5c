"""The tree of a response.

Invariants:
- Spans are half open and hold an element's own tags. Their unit is that of the parse: characters or token indices.
- Parts stand in the order of the response. The last part is always prose, empty if nothing follows the last block.
- Malformed responses have a tree as well: it holds what could be recovered, and what is missing is None.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Characters or tokens `start <= i < end`."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Prose:
    """Text outside of all blocks, exactly as written."""

    span: Span
    text: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One planned sub-task. `text` is what follows the label, stripped; `label` is None if there is none."""

    span: Span
    label: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Step:
    """One branch's work. `text` is what follows the label, stripped; `label` is None if there is none."""

    span: Span
    label: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Guideline:
    """The plans of a block, in the order in which they are written."""

    span: Span
    plans: tuple[Plan, ...]


@dataclass(frozen=True, slots=True)
class Takeaway:
    """What joins the branches. `text` is stripped."""

    span: Span
    text: str


@dataclass(frozen=True, slots=True)
class Block:
    """Guideline, steps, takeaway: map, process, reduce."""

    span: Span
    guideline: Guideline | None
    steps: tuple[Step, ...]
    takeaway: Takeaway | None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of the guideline; none if it is missing."""
        return self.guideline.plans if self.guideline else ()


@dataclass(frozen=True, slots=True)
class Response:
    """A whole response."""

    span: Span
    parts: tuple[Prose | Block, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks, in order."""
        return tuple(part for part in self.parts if isinstance(part, Block))

    @property
    def final_prose(self) -> str:
        """What follows the last block: the whole response if there is none."""
        last = self.parts[-1]
        return last.text if isinstance(last, Prose) else ""
