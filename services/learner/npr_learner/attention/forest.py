"""Which tokens of a packed row see which: runs and forks, nested.

A packed row holds any number of trajectories one after the other. Those of a group may share their prompt.

Invariants:
- A token sees what is before it in its own chain, what its chain branched off from, and itself; nothing of a sibling.
- What follows a fork in a chain sees all of the fork.
- So a token sees every token up to itself but for one hole a fork that it is under: from that fork's start to its own
  branch's. A row nests three deep at most: trajectories or families side by side, responses to one prompt, branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from npr_common.topology import SpanKind, Topology

LEVELS = 3
"""How deep forks nest: trajectories, responses, branches."""

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens `start <= i < end` one after the other."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Chains side by side, without a gap between them."""

    chains: tuple[Chain, ...]

    @property
    def start(self) -> int:
        """Index of its first token."""
        return self.chains[0].start

    @property
    def end(self) -> int:
        """Index after its last token."""
        return self.chains[-1].end


@dataclass(frozen=True, slots=True)
class Chain:
    """Runs and forks one after the other, at least one, without a gap between them."""

    items: tuple[Run | Fork, ...]

    @property
    def start(self) -> int:
        """Index of its first token."""
        return self.items[0].start

    @property
    def end(self) -> int:
        """Index after its last token."""
        return self.items[-1].end

    def __len__(self) -> int:
        return self.end - self.start

    @classmethod
    def of(cls, items: Sequence[Run | Fork]) -> Chain:
        """A chain in which neighbouring runs are one."""
        joined: list[Run | Fork] = []
        for item in items:
            last = joined[-1] if joined else None
            if isinstance(item, Run) and isinstance(last, Run):
                joined[-1] = Run(last.start, item.end)
            else:
                joined.append(item)
        return cls(tuple(joined))


def items_of(topology: Topology, at: int, first: int = 0) -> list[Run | Fork]:
    """The tokens of a trajectory from index `first` on, as they lie in a row in which token `first` has index `at`.

    `first` is 0 or the prompt's length.
    """
    shift = at - first
    items: list[Run | Fork] = []
    branches: list[Chain] = []
    for span in topology.spans:
        if span.end <= first:
            continue
        if span.branch in (None, 0):  # a block may follow another one without a token in between
            items += _forks(branches)
            branches = []
        run = Run(max(span.start, first) + shift, span.end + shift)
        if span.kind is SpanKind.BRANCH:
            branches.append(Chain((run,)))
        else:
            items.append(run)
    return items + _forks(branches)


def _forks(branches: Sequence[Chain]) -> list[Run | Fork]:
    return [Fork(tuple(branches))] if branches else []


@dataclass(frozen=True)
class Holes:
    """What each of S tokens does not see of the tokens before it, int32 [LEVELS, S] each.

    Token q sees k where `k <= q`, and at no level `begin[level, q] <= k < end[level, q]`. Unused levels are [0, 0).
    """

    begin: IntArray
    end: IntArray

    def visible(self, start: int, end: int) -> npt.NDArray[np.bool_]:
        """bool [n, n] of the n tokens `start <= i < end`: true where the query (row) sees the key (column)."""
        index = np.arange(start, end, dtype=np.int32)
        key, query = index[None, :], index[:, None]
        seen: npt.NDArray[np.bool_] = key <= query
        for begin, stop in zip(self.begin[:, start:end], self.end[:, start:end], strict=True):
            if stop.any():
                seen &= (key < begin[:, None]) | (key >= stop[:, None])
        return seen


def holes_of(forest: Fork, length: int) -> Holes:
    """The holes of a row of `length` tokens. Tokens beyond the forest's end are padding, and see themselves alone."""
    begin, end = np.zeros((LEVELS, length), np.int32), np.zeros((LEVELS, length), np.int32)
    _fill(forest, 0, begin, end)
    end[0, forest.end :] = np.arange(forest.end, length)
    return Holes(begin, end)


def _fill(fork: Fork, level: int, begin: IntArray, end: IntArray) -> None:
    for chain in fork.chains:
        tokens = slice(chain.start, chain.end)
        begin[level, tokens], end[level, tokens] = fork.start, chain.start
        for item in chain.items:
            if isinstance(item, Fork):
                _fill(item, level + 1, begin, end)
