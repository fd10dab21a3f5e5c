"""Attention over a forest as plain attention over rectangles and squares.

Invariants:
- Every visible pair of tokens is in exactly one piece, and no other pair is in any.
- A rectangle has nothing to mask. A square is the attention of a stretch of tokens among themselves: causal, or, where
  it is short, under a mask of its own. So no mask grows faster than the row.
- The squares tile the row: every token is a query of exactly one.

Softmax is over all keys of a query; what the pieces say is merged by the log of their sums (`lean.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from npr_learner.attention.forest import Chain, Fork, Run

MASKED_SQUARE = 256
"""Longest square that has a mask of its own. Many short pieces cost more than the pairs that they leave out."""


class Rectangle(NamedTuple):
    """All of the queries `query_start <= q < query_end` see all of the keys `key_start <= k < key_end`."""

    query_start: int
    query_end: int
    key_start: int
    key_end: int


class Square(NamedTuple):
    """The tokens `start <= i < end` among themselves; `causal` if each sees all that are before it."""

    start: int
    end: int
    causal: bool

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Pieces:
    """What attention over a forest comes down to."""

    rectangles: tuple[Rectangle, ...]
    squares: tuple[Square, ...]


def pieces_of(forest: Fork, masked_square: int = MASKED_SQUARE) -> Pieces:
    """The pieces of a forest; squares of up to `masked_square` tokens may have a mask."""
    found = list(_of_fork(forest, masked_square))
    return Pieces(
        tuple(piece for piece in found if isinstance(piece, Rectangle)),
        tuple(piece for piece in found if isinstance(piece, Square)),
    )


def _of_fork(fork: Fork, limit: int) -> Iterator[Rectangle | Square]:
    for chain in fork.chains:
        for stretch in _stretches(chain, limit):
            if stretch.start > chain.start:
                yield Rectangle(stretch.start, stretch.end, chain.start, stretch.start)
            yield from _of_stretch(stretch, limit)


def _of_stretch(stretch: Chain, limit: int) -> Iterator[Rectangle | Square]:
    first = stretch.items[0]
    if len(stretch.items) == 1 and isinstance(first, Fork) and len(stretch) > limit:
        yield from _of_fork(first, limit)
    else:
        yield Square(stretch.start, stretch.end, causal=all(isinstance(item, Run) for item in stretch.items))


def _stretches(chain: Chain, limit: int) -> Iterator[Chain]:
    """The chain cut so that each part is an item, or several that are short together."""
    part: list[Run | Fork] = []
    for item in chain.items:
        if part and item.end - part[0].start > limit:
            yield Chain(tuple(part))
            part = []
        part.append(item)
    yield Chain(tuple(part))


def batched(squares: Sequence[Square], most_tokens: int, waste: float = 0.15) -> list[list[Square]]:
    """Squares of one kind and of like lengths together, to be computed as one: each once.

    A batch has at most `most_tokens` tokens with its padding, unless it is one square; at most the share `waste` of a
    padded square is padding.
    """
    batches: list[list[Square]] = []
    for square in sorted(squares, key=lambda s: (s.causal, -len(s), s.start)):
        if not batches or not _fits(square, batches[-1], most_tokens, waste):
            batches.append([])
        batches[-1].append(square)
    return batches


def _fits(square: Square, batch: Sequence[Square], most_tokens: int, waste: float) -> bool:
    width = len(batch[0])
    alike = square.causal == batch[0].causal and len(square) >= (1 - waste) * width
    return alike and (len(batch) + 1) * width <= most_tokens
