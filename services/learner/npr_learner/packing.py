"""Rows one after the other in one long row, and such rows as the micro-batches of a step.

Invariants:
- Rows don't see each other: how they are packed changes no number but rounding.
- The rows of a family have one prompt, which is in the packed row once; each response goes on from it.
- A prompt has no trained tokens, so a shared one has no gradient of its own but what its responses give it.
- Every row is in exactly one micro-batch, and the cut is a pure function of the rows and the budget.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from npr_learner.attention.forest import Chain, Fork, Run, items_of
from npr_learner.row import IntArray, Row


@dataclass(frozen=True)
class Family:
    """Rows that are packed together: one, or several with the same prompt and something after it."""

    rows: tuple[Row, ...]

    @property
    def prompt_length(self) -> int:
        """Tokens that are computed once for all rows; 0 for a single row."""
        return self.rows[0].topology.prompt_length if len(self.rows) > 1 else 0

    def __len__(self) -> int:
        """Tokens that are computed."""
        return sum(map(len, self.rows)) - self.prompt_length * (len(self.rows) - 1)


class Packed(NamedTuple):
    """A packed row of S tokens.

    Attributes:
        rows: the rows in it, in order.
        token_ids: int64 [S].
        positions: int64 [S], RoPE position of each token.
        forest: which of them see each other.
        sources: int64 [N], for each row's trained tokens the index of the token before it, row by row.
    """

    rows: tuple[Row, ...]
    token_ids: IntArray
    positions: IntArray
    forest: Fork
    sources: IntArray


def families_of(rows: Sequence[Row], *, share_prompts: bool) -> list[Family]:
    """The rows by their prompts, in the order of each prompt's first row; without sharing, each by itself."""
    if not share_prompts:
        return [Family((row,)) for row in rows]
    found: dict[bytes | int, list[Row]] = {}
    for index, row in enumerate(rows):
        prompt = row.token_ids[: row.topology.prompt_length]
        key = prompt.tobytes() if 0 < len(prompt) < len(row) else index
        found.setdefault(key, []).append(row)
    return [Family(tuple(members)) for members in found.values()]


def pack(families: Sequence[Family]) -> Packed:
    """Families one after the other."""
    pieces = _Pieces()
    for family in families:
        pieces.add(family)
    return pieces.packed()


class _Pieces:
    """A packed row as it grows; `length` is how long it is."""

    def __init__(self) -> None:
        self.length = 0
        self.chains: list[Chain] = []
        self.rows: list[Row] = []
        self.token_ids: list[IntArray] = []
        self.positions: list[IntArray] = []
        self.sources: list[IntArray] = []

    def add(self, family: Family) -> None:
        shared = family.prompt_length
        prompt_at = self._copy(family.rows[0], 0, shared)
        chains = [self._add_row(row, shared, prompt_at) for row in family.rows]
        if shared:
            chains = [Chain((Run(prompt_at, prompt_at + shared), Fork(tuple(chains))))]
        self.chains += chains

    def packed(self) -> Packed:
        return Packed(
            tuple(self.rows),
            np.concatenate(self.token_ids),
            np.concatenate(self.positions),
            Fork(tuple(self.chains)),
            np.concatenate(self.sources),
        )

    def _add_row(self, row: Row, first: int, prompt_at: int) -> Chain:
        """Adds what comes after the first `first` tokens, which lie at `prompt_at`."""
        at = self._copy(row, first, len(row))
        before = row.topology.predecessors[row.trained]
        self.sources.append(np.where(before < first, before + prompt_at, before - first + at))
        self.rows.append(row)
        return Chain.of(items_of(row.topology, at, first))

    def _copy(self, row: Row, start: int, end: int) -> int:
        """Copies tokens `start <= i < end` to where they are told to lie."""
        at = self.length
        self.token_ids.append(row.token_ids[start:end])
        self.positions.append(row.topology.positions[start:end])
        self.length += end - start
        return at


def micro_batches(families: Sequence[Family], budget_tokens: int) -> list[list[Family]]:
    """Packs families into micro-batches of at most `budget_tokens` computed tokens each, largest first.

    A family that is larger is cut into several, each with the prompt again. A row longer than the budget gets a
    micro-batch of its own. Largest first: memory runs out at once or never.
    """
    parts = [part for family in families for part in _cut(family, budget_tokens)]
    batches: list[list[Family]] = []
    rooms: list[int] = []
    for part in sorted(parts, key=len, reverse=True):
        index = next((i for i, room in enumerate(rooms) if len(part) <= room), len(batches))
        if index == len(batches):
            batches.append([])
            rooms.append(budget_tokens)
        batches[index].append(part)
        rooms[index] -= len(part)
    return [batch for _, batch in sorted(zip(rooms, batches, strict=True), key=lambda pair: pair[0])]


def _cut(family: Family, budget_tokens: int) -> Iterator[Family]:
    shared = family.prompt_length
    part: list[Row] = []
    tokens = shared
    for row in family.rows:
        if part and tokens + len(row) - shared > budget_tokens:
            yield Family(tuple(part))
            part, tokens = [], shared
        part.append(row)
        tokens += len(row) - shared
    yield Family(tuple(part))
