"""Compares the page allocator with the live page tables.

Invariant: an audit changes nothing; every problem it finds is a bug, told in one sentence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from npr_rollout.engine.page_table import PageTables
from npr_rollout.engine.prompts import SharedPrompts
from npr_rollout.engine.trajectory import Trajectory


def audit(tables: PageTables, prompts: SharedPrompts, trajectories: Iterable[Trajectory]) -> tuple[str, ...]:
    """All problems; none when allocator, tables and trajectories agree."""
    return (*_pages(tables), *_slots(tables), *_rows(tables, prompts, list(trajectories)))


def _pages(tables: PageTables) -> Iterator[str]:
    pool = tables.pool
    held = Counter(page for row in tables.live_rows for page in tables.pages_of(row))
    free = Counter(pool.free_list())
    for page in range(pool.pages):
        if held[page] != pool.holders(page):
            yield f"Page {page} is counted {pool.holders(page)} times, but {held[page]} rows hold it."
        if free[page] != (pool.holders(page) == 0):
            yield f"Page {page} is {free[page]} times in the free list and held {pool.holders(page)} times."


def _slots(tables: PageTables) -> Iterator[str]:
    for row in sorted(tables.live_rows):
        slots = tables.slots[row, : tables.length[row]].tolist()
        if len(set(slots)) != len(slots):
            yield f"Row {row} holds a slot twice."
        pages = tables.pages_of(row)
        if {slot // tables.pool.page_size for slot in slots} != set(pages) or len(set(pages)) != len(pages):
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
