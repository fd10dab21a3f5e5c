"""Compares the page allocator with the live page tables.

Invariant: an audit changes nothing; every problem it finds is a bug, told in one sentence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from npr_rollout.engine.page_table import IntArray, PageTables
from npr_rollout.engine.prompts import SharedPrompts
from npr_rollout.record.trajectory import Trajectory


def audit(tables: PageTables, prompts: SharedPrompts, trajectories: Iterable[Trajectory]) -> tuple[str, ...]:
    """All problems; none when allocator, tables and trajectories agree."""
    return (*_pages(tables), *_slots(tables), *_rows(tables, prompts, list(trajectories)))


def _pages(tables: PageTables) -> Iterator[str]:
    pool = tables.pool
    held = _counts((page for row in tables.live_rows for page in tables.pages_of(row)), pool.pages)
    free = _counts(pool.free_list(), pool.pages)
    counted = np.fromiter(map(pool.holders, range(pool.pages)), np.int64, pool.pages)
    for page in np.flatnonzero(held != counted).tolist():
        yield f"Page {page} is counted {counted[page]} times, but {held[page]} rows hold it."
    for page in np.flatnonzero(free != (counted == 0)).tolist():
        yield f"Page {page} is {free[page]} times in the free list and held {counted[page]} times."


def _counts(pages: Iterable[int], size: int) -> IntArray:
    return np.bincount(np.fromiter(pages, np.int64), minlength=size)


def _slots(tables: PageTables) -> Iterator[str]:
    for row in sorted(tables.live_rows):
        slots = tables.slots[row, : tables.length[row]].tolist()
        if len(set(slots)) != len(slots):
            yield f"Row {row} holds a slot twice."
        if {slot // tables.pool.page_size for slot in slots} != set(tables.pages_of(row)):
            yield f"Row {row} reads from pages other than those it holds."


def _rows(tables: PageTables, prompts: SharedPrompts, trajectories: list[Trajectory]) -> Iterator[str]:
    owners = Counter(prompts.rows())
    for trajectory in trajectories:
        owners.update(trajectory.rows())
        yield from _lengths(tables, trajectory)
    for row in sorted(owners.keys() | tables.live_rows):
        if owners[row] != (row in tables.live_rows):
            yield f"Row {row} has {owners[row]} owners and is {'' if row in tables.live_rows else 'not '}open."


def _lengths(tables: PageTables, trajectory: Trajectory) -> Iterator[str]:
    """Each row holds as many tokens as its spans have fed."""
    if trajectory.row is None:
        return
    settled = 0
    for segment in trajectory.segments:
        spans = getattr(segment, "branches", [segment])
        open_rows = [span for span in spans if span.row not in (None, trajectory.row)]
        for span in open_rows:
            if tables.length[span.row] != settled + span.fed:
                yield f"{trajectory.request.request_id}: a branch has fed {span.fed} tokens, but its row disagrees."
        settled += sum(span.fed for span in spans if span not in open_rows)
    if tables.length[trajectory.row] != settled:
        yield f"{trajectory.request.request_id}: {settled} tokens are fed, but the row holds another number."
