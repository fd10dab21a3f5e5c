"""From records to the KV pool: which tokens the coming forward pass feeds, and through which tables.

Invariants:
- Feeding follows the record. The same code decodes a new token, feeds forced headers, and recomputes a preempted
  trajectory with all its blocks, whose forks and joins are then made again at the same places.
- Within one forward pass every layer writes all new keys and values before it reads any, so a branch may follow its
  `</guideline>`, and a takeaway its branches, in the same pass.
- Long records are fed in parts. Spans that sample keep their last token until all the rest is fed, so the branches of a
  block sample in the same steps, however much was to be fed: what depends on their pace does not depend on the load.
- `pages_needed` is what feeding all of it will allocate, to the page; parts of it never allocate more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from npr_rollout.engine.page_table import PageTables
from npr_rollout.engine.prompts import SharedPrompt, SharedPrompts
from npr_rollout.record.trajectory import Block, Span, Trajectory


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

    # --- what it will cost ---

    def pages_needed(self, trajectories: Iterable[Trajectory]) -> int:
        """Pages that feeding all unfed tokens of trajectories that hold their prompts will allocate."""
        trajectories = list(trajectories)
        prompts = {id(t.prompt): t.prompt for t in trajectories if t.prompt is not None and t.prompt.unfed}
        return sum(map(self._prompt_pages, prompts.values())) + sum(map(self._own_pages, trajectories))

    def pages_to_admit(self, trajectory: Trajectory) -> tuple[int, int]:
        """Pages that a trajectory will need if it is admitted now, and how many cached ones are its own prompt's."""
        entry = self._prompts.find(trajectory.request.prompt_ids)
        own = self._own_pages(trajectory)
        if entry is None:
            return own + self._pages(trajectory.prompt_length - 1), 0
        return own, 0 if entry.users else len(self._tables.pages_of(entry.row))

    def pages_needed_by(self, spans: Sequence[Span]) -> int:
        """Pages that `feed_one_each` will allocate."""
        rows = np.fromiter((span.row for span in spans), np.int64, len(spans))
        return int(np.count_nonzero(self._tables.at_page_end(rows)))

    # --- feeding ---

    def admit(self, trajectory: Trajectory) -> None:
        """Take hold of its prompt, whose pages can't be evicted from now on."""
        trajectory.prompt = self._prompts.acquire(trajectory.request.prompt_ids)

    def feed(self, trajectory: Trajectory, chunks: list[Chunk], budget: int) -> int:
        """Plan unfed tokens of an admitted trajectory, in the order in which they depend on each other.

        Returns:
            How many were planned: all, after which it is settled, or part of them, at most `budget`. Tokens that spans
            sample after are not counted against it once they are all that is left.
        """
        assert trajectory.prompt is not None
        if trajectory.row is None:
            planned = self._feed_prompt(trajectory.prompt, chunks, budget)
            if trajectory.prompt.unfed:
                return planned
            self._open(trajectory, trajectory.prompt)
            return planned + self._feed_record(trajectory, chunks, budget - planned)
        return self._feed_record(trajectory, chunks, budget)

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

    def release(self, trajectory: Trajectory) -> None:
        """Give back every page of a trajectory and mark all of it as not fed."""
        for row in trajectory.rows():
            self._tables.close(row)
        if trajectory.prompt is not None:
            self._prompts.release(trajectory.prompt)
        trajectory.forget_cache()

    def _feed_prompt(self, prompt: SharedPrompt, chunks: list[Chunk], budget: int) -> int:
        count = min(prompt.unfed, budget)
        if count > 0:
            self._tables.extend(prompt.row, count)
            tokens = prompt.tokens[prompt.fed : prompt.fed + count]
            chunks.append(Chunk(prompt.row, prompt.fed + count, tokens, prompt.fed, None))
            prompt.fed += count
        return count

    def _open(self, trajectory: Trajectory, prompt: SharedPrompt) -> None:
        trajectory.row = self._tables.fork(prompt.row)
        trajectory.pages = len(self._tables.pages_of(trajectory.row))
        first = trajectory.segments[0]
        assert isinstance(first, Span)
        first.fed = prompt.shared

    def _feed_record(self, trajectory: Trajectory, chunks: list[Chunk], budget: int) -> int:
        """Feed segment by segment, as far as the budget goes."""
        samplers = len(trajectory.samplers())
        unfed = trajectory.unfed
        whole = unfed <= budget or unfed == samplers
        left = unfed if whole else max(0, min(budget, unfed - samplers))
        planned = left
        while left or whole:
            segment = trajectory.segments[trajectory.frontier]
            last = trajectory.frontier == len(trajectory.segments) - 1
            left -= self._feed_segment(trajectory, segment, chunks, left, sample=whole)
            if last or (not left and not whole):
                break
            if isinstance(segment, Block):
                self._join(trajectory, segment)
            trajectory.frontier += 1
        trajectory.peak_pages = max(trajectory.peak_pages, trajectory.pages)
        if whole:
            trajectory.settled, trajectory.active = True, trajectory.samplers()
        return planned

    def _feed_segment(
        self, trajectory: Trajectory, segment: Span | Block, chunks: list[Chunk], budget: int, *, sample: bool
    ) -> int:
        """Feed what a segment lacks, its sampling spans' last tokens only with `sample`; how many tokens that is."""
        assert trajectory.row is not None
        planned = 0
        if isinstance(segment, Span):
            segment.row = trajectory.row
        for span in [segment] if isinstance(segment, Span) else segment.branches:
            if span.row is None:
                span.row = self._tables.fork(trajectory.row)
            samples = trajectory.samples(span)
            count = min(span.unfed - (samples and not sample), budget - planned)
            self._feed_span(span, count, chunks, sample=samples and sample)
            planned += count
        return planned

    def _feed_span(self, span: Span, count: int, chunks: list[Chunk], *, sample: bool) -> None:
        if count <= 0:
            return
        assert span.row is not None
        span.owner.pages += self._tables.extend(span.row, count)
        kv_length = int(self._tables.length[span.row])
        tokens = span.tokens[span.fed : span.fed + count]
        chunks.append(Chunk(span.row, kv_length, tokens, span.start + span.fed, span if sample else None))
        span.fed += count

    def _join(self, trajectory: Trajectory, block: Block) -> None:
        assert trajectory.row is not None
        rows = [branch.row for branch in block.branches if branch.row is not None]
        self._tables.join(trajectory.row, rows)
        for branch in block.branches:
            branch.row = None

    # --- arithmetic ---

    def _own_pages(self, trajectory: Trajectory) -> int:
        """Pages of its own rows, the prompt's left out."""
        needed = 0
        room = self._tables.room(trajectory.row) if trajectory.row is not None else 0
        for segment in trajectory.segments[trajectory.frontier :]:
            spans = [segment] if isinstance(segment, Span) else segment.branches
            for span in spans:
                if span.is_branch:
                    room = self._tables.room(span.row) if span.row is not None else 0
                tokens = self._unfed(span)
                needed += self._pages(max(0, tokens - room))
                room = (room - tokens) % self._page_size  # a takeaway goes on in the last branch's page
        return needed

    def _prompt_pages(self, prompt: SharedPrompt) -> int:
        return self._pages(prompt.shared) - self._pages(prompt.fed)

    def _unfed(self, span: Span) -> int:
        """Tokens that the span's own row lacks; all of the prompt but its last token comes with the shared row."""
        return span.unfed if span.fed else span.unfed - max(0, span.prompt_length - 1)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size)
