"""From records to the KV pool: which tokens the coming forward pass feeds, and through which tables.

Invariants:
- Feeding follows the record. The same code decodes a new token, feeds forced headers, and recomputes a preempted
  trajectory with all its blocks, whose forks and joins are then made again at the same places.
- Within one forward pass every layer writes all new keys and values before it reads any, so a branch may follow its
  `</guideline>`, and a takeaway its branches, in the same pass.
- `pages_needed` says before `feed` what it will allocate, to the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from npr_rollout.engine.page_table import PageTables
from npr_rollout.engine.prompts import SharedPrompts
from npr_rollout.engine.trajectory import Block, Span, Trajectory


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one row.

    Attributes:
        kv_length: tokens that the last one of them attends to, itself included.
        position: RoPE position of the first one.
        span: the span that samples after them; None if nothing does.
    """

    row: int
    kv_length: int
    tokens: Sequence[int]
    position: int
    span: Span | None


class Feeder:
    """Opens, extends, forks, joins and closes the rows of trajectories."""

    def __init__(self, tables: PageTables, prompts: SharedPrompts) -> None:
        self._tables = tables
        self._prompts = prompts
        self._page_size = tables.pool.page_size

    def pages_needed(self, trajectory: Trajectory) -> int:
        """The pages that `feed` will allocate for it; more only if its prompt is decoded meanwhile for another."""
        needed, room = 0, 0
        if trajectory.row is not None:
            room = self._tables.room(trajectory.row)
        elif not self._prompts.holds(trajectory.request.prompt_ids):
            needed = self._pages(trajectory.prompt_length - 1)
        for segment in trajectory.segments[trajectory.frontier :]:
            spans = [segment] if isinstance(segment, Span) else segment.branches
            for span in spans:
                if span.is_branch:
                    room = self._tables.room(span.row) if span.row is not None else 0
                tokens = self._unfed(span)
                needed += self._pages(max(0, tokens - room))
                room = (room - tokens) % self._page_size  # a takeaway goes on in the last branch's page
        return needed

    def feed(self, trajectory: Trajectory, chunks: list[Chunk]) -> None:
        """Plan all unfed tokens of a trajectory, in the order in which they depend on each other."""
        if trajectory.row is None:
            self._open(trajectory, chunks)
        while True:
            segment = trajectory.segments[trajectory.frontier]
            last = trajectory.frontier == len(trajectory.segments) - 1
            trajectory.active = self._feed_segment(trajectory, segment, chunks, last)
            if last:
                break
            if isinstance(segment, Block):
                self._join(trajectory, segment)
            trajectory.frontier += 1
        trajectory.settled = True
        trajectory.peak_pages = max(trajectory.peak_pages, trajectory.pages)

    def feed_one_each(self, spans: Sequence[Span]) -> None:
        """Plan the last token of each span: the common case of a settled trajectory, for a whole batch at once."""
        rows = np.fromiter((span.row for span in spans), np.int64, len(spans))
        for index in np.flatnonzero(self._tables.at_page_end(rows)).tolist():
            owner = spans[index].owner
            owner.pages += 1
            owner.peak_pages = max(owner.peak_pages, owner.pages)
        self._tables.extend_each(rows)
        for span in spans:
            span.fed += 1

    def pages_needed_by(self, spans: Sequence[Span]) -> int:
        """Pages that `feed_one_each` will allocate."""
        rows = np.fromiter((span.row for span in spans), np.int64, len(spans))
        return int(np.count_nonzero(self._tables.at_page_end(rows)))

    def release(self, trajectory: Trajectory) -> None:
        """Give back every page of a trajectory and mark all of it as not fed."""
        if trajectory.row is None:
            return
        for row in trajectory.rows():
            self._tables.close(row)
        self._prompts.release(trajectory.request.prompt_ids)
        trajectory.forget_cache()

    def _open(self, trajectory: Trajectory, chunks: list[Chunk]) -> None:
        prompt = trajectory.request.prompt_ids
        prompt_row, new = self._prompts.acquire(prompt)
        shared = len(prompt) - 1
        if new and shared:
            self._tables.extend(prompt_row, shared)
            chunks.append(Chunk(prompt_row, shared, prompt[:shared], 0, None))
        trajectory.row = self._tables.fork(prompt_row)
        trajectory.pages = len(self._tables.pages_of(trajectory.row))
        first = trajectory.segments[0]
        assert isinstance(first, Span)
        first.fed = shared

    def _feed_segment(
        self, trajectory: Trajectory, segment: Span | Block, chunks: list[Chunk], last: bool
    ) -> list[Span]:
        """Feed what a segment lacks; the spans of it that sample then."""
        if isinstance(segment, Span):
            segment.row = trajectory.row
            self._feed_span(segment, chunks, sample=last)
            return [segment]
        assert trajectory.row is not None
        for branch in segment.branches:
            if branch.row is None:
                branch.row = self._tables.fork(trajectory.row)
            self._feed_span(branch, chunks, sample=branch.open)
        return [branch for branch in segment.branches if branch.open]

    def _feed_span(self, span: Span, chunks: list[Chunk], *, sample: bool) -> None:
        if span.unfed == 0:
            return
        assert span.row is not None
        span.owner.pages += self._tables.extend(span.row, span.unfed)
        kv_length = int(self._tables.length[span.row])
        tokens = span.tokens[span.fed :]
        chunks.append(Chunk(span.row, kv_length, tokens, span.start + span.fed, span if sample else None))
        span.fed = len(span.tokens)

    def _join(self, trajectory: Trajectory, block: Block) -> None:
        assert trajectory.row is not None
        rows = [branch.row for branch in block.branches if branch.row is not None]
        self._tables.join(trajectory.row, rows)
        for branch in block.branches:
            branch.row = None

    def _unfed(self, span: Span) -> int:
        """Tokens that the span's own row lacks; all of the prompt but its last token comes with the shared row."""
        return span.unfed if span.fed else span.unfed - max(0, span.prompt_length - 1)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size)
