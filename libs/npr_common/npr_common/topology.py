"""Order, positions and visibility of a trajectory: one pure function of its token ids and its prompt's length.

Invariants:
- A trajectory is one list in canonical order: prompt, guideline, step 1, ..., step n, takeaway, ...
- Nothing here is stored beside it.
- Spans tile the list: every token is in exactly one span, so no separator can leak from one branch into a sibling.
- Only tags that are single tokens of the response count. The prompt's tags, and spelled-out ones, are text.
- Any list has a topology, also one cut off anywhere or malformed: what opens no block is prose.
- With g the position of `</guideline>`, every branch span of its block starts at position g+1; the takeaway span starts
  at g+1+L, L being the longest branch span's length. All other tokens count up.
- Visible is what is causal, less every pair of tokens in two different branch spans of the same block.

The spans follow from the guideline alone: a `</guideline>` that closes a guideline of n >= 1 plans forks; each of the
next n spans runs up to and with the next `</step>`, whatever other tags stand in it; the takeaway span comes next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from npr_common.tags import Role, Tag, TagIds

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

NONE = -1
"""Index that stands for "in no block", "in no branch" or "has no predecessor" in the integer arrays."""


class SpanKind(Enum):
    """What a span of tokens is in the tree."""

    PROMPT = "prompt"
    PROSE = "prose"
    GUIDELINE = "guideline"
    BRANCH = "branch"
    TAKEAWAY = "takeaway"


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens `start <= i < end` of the list.

    Attributes:
        block: index of the block, counted from 0; None outside of any block.
        branch: index of the branch in its block, counted from 0; None unless `kind` is BRANCH.
    """

    kind: SpanKind
    start: int
    end: int
    block: int | None = None
    branch: int | None = None

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Topology:
    """Everything that order, positions and visibility say about one list of S tokens.

    Attributes:
        prompt_length: number of prompt tokens at the front.
        spans: the tiling, in order, without empty spans.
        positions: int64 [S], RoPE position of each token.
        block_of: int64 [S], index of the token's block, `NONE` outside.
        branch_of: int64 [S], index of the token's branch in its block, `NONE` outside.
        predecessors: int64 [S], index of the token after which the engine fed this one: the one before it, except
            that a branch's first token follows `</guideline>`; `NONE` for the first token of all.
        seams: bool [S], true at the first token of each branch and of what follows the last branch (the takeaway).
            The token before it in the list is not the one that the engine had its logits from; the engine forces
            these tokens, and they carry no loss.
    """

    prompt_length: int
    spans: tuple[TokenSpan, ...]
    positions: IntArray
    block_of: IntArray
    branch_of: IntArray
    predecessors: IntArray
    seams: BoolArray

    @classmethod
    def causal(cls, length: int, prompt_length: int = 0) -> Topology:
        """The topology of plain sequential decoding: positions count up, and the mask is causal."""
        return _build(length, _plain_spans(length, min(prompt_length, length)), min(prompt_length, length))

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def block_count(self) -> int:
        """Number of forked blocks."""
        return int(self.block_of.max(initial=NONE)) + 1

    @property
    def depth(self) -> int:
        """Number of sequential positions: the length of the longest chain of tokens that see each other."""
        return int(self.positions.max(initial=-1)) + 1

    @property
    def critical_path_length(self) -> int:
        """Tokens on the longest chain of the response alone: its decoding steps with all branches in parallel."""
        return self.depth - self.prompt_length

    def visible(self, query: int, key: int) -> bool:
        """Whether the token at index `query` attends to the one at index `key`."""
        if key > query:
            return False
        branches = self.branch_of[query], self.branch_of[key]
        apart = branches[0] != branches[1] and NONE not in branches
        return not (apart and self.block_of[query] == self.block_of[key])

    def dense_mask(self) -> BoolArray:
        """bool [S, S], true where the query (row) attends to the key (column). O(S^2) memory."""
        mask: BoolArray = np.tri(len(self), dtype=np.bool_)
        for branches in self.blocks():
            first = branches[0].start
            for span in branches:
                mask[span.start : span.end, first : span.start] = False
        return mask

    def blocks(self) -> Iterator[tuple[TokenSpan, ...]]:
        """The branch spans of each block that has any, in order."""
        for index in range(self.block_count):
            branches = tuple(s for s in self.spans if s.kind is SpanKind.BRANCH and s.block == index)
            if branches:
                yield branches


def topology(token_ids: Sequence[int] | npt.NDArray[np.integer[Any]], prompt_length: int, tags: TagIds) -> Topology:
    """The topology of a trajectory, whole or cut off anywhere, in O(S) time and memory.

    Args:
        token_ids: S ids in canonical order, prompt first.
        prompt_length: number of prompt tokens; the whole list if it is shorter.
        tags: ids of the tags in the tokenizer that made the list.

    Raises:
        ValueError: `prompt_length` is negative.
    """
    if prompt_length < 0:
        raise ValueError(f"A prompt has no negative length, got {prompt_length}.")
    ids = np.asarray(token_ids, dtype=np.int64)
    prompt_length = min(prompt_length, len(ids))
    return _build(len(ids), _tile(ids, prompt_length, tags), prompt_length)


class _Tiler:
    """Cuts a response into spans, one tag at a time. `start` is the first token that is in no span yet."""

    def __init__(self, prompt_length: int) -> None:
        self.spans: list[TokenSpan] = []
        self.start = 0
        self.block = NONE
        self._cut(prompt_length, SpanKind.PROMPT)
        self.guideline: int | None = None  # index of the open `<guideline>`
        self.plans = 0
        self.branch = 0
        self.branches = 0  # of the block whose branches are being read; 0 outside
        self.in_takeaway = False

    def feed(self, index: int, tag: Tag) -> None:
        """Take the tag at `index`."""
        if self.branches:
            self._in_branch(index, tag)
        elif tag == Tag(Role.GUIDELINE):
            self.guideline, self.plans = index, 0
        elif tag == Tag(Role.PLAN):
            self.plans += 1
        elif tag == Tag(Role.GUIDELINE, closing=True):
            self._fork(index)
        elif tag == Tag(Role.TAKEAWAY, closing=True) and self.in_takeaway:
            self._end_takeaway(index + 1)

    def finish(self, length: int) -> list[TokenSpan]:
        """All spans, the last one ending at `length`."""
        if self.branches:
            self._cut(length, SpanKind.BRANCH, self.block, self.branch)
        elif self.in_takeaway:
            self._end_takeaway(length)
        self._cut(length, SpanKind.PROSE)
        return self.spans

    def _fork(self, index: int) -> None:
        guideline, self.guideline = self.guideline, None
        if guideline is None or not self.plans:
            return
        if self.in_takeaway:
            self._end_takeaway(guideline)
        self._cut(guideline, SpanKind.PROSE)
        self.block += 1
        self._cut(index + 1, SpanKind.GUIDELINE, self.block)
        self.branch, self.branches = 0, self.plans

    def _in_branch(self, index: int, tag: Tag) -> None:
        if tag != Tag(Role.STEP, closing=True):
            return
        self._cut(index + 1, SpanKind.BRANCH, self.block, self.branch)
        self.branch += 1
        if self.branch == self.branches:
            self.branches, self.in_takeaway = 0, True

    def _end_takeaway(self, end: int) -> None:
        self._cut(end, SpanKind.TAKEAWAY, self.block)
        self.in_takeaway = False

    def _cut(self, end: int, kind: SpanKind, block: int | None = None, branch: int | None = None) -> None:
        if end > self.start:
            self.spans.append(TokenSpan(kind, self.start, end, block, branch))
            self.start = end


def _tile(ids: IntArray, prompt_length: int, tags: TagIds) -> tuple[TokenSpan, ...]:
    tiler = _Tiler(prompt_length)
    is_tag = np.isin(ids, np.fromiter(tags, np.int64, len(tags)))
    is_tag[:prompt_length] = False
    for index in np.flatnonzero(is_tag).tolist():
        tiler.feed(index, tags.tag_of[int(ids[index])])
    return tuple(tiler.finish(len(ids)))


def _plain_spans(length: int, prompt_length: int) -> tuple[TokenSpan, ...]:
    return tuple(_Tiler(prompt_length).finish(length))


def _build(length: int, spans: tuple[TokenSpan, ...], prompt_length: int) -> Topology:
    positions, predecessors = np.empty(length, np.int64), np.arange(NONE, length - 1, dtype=np.int64)
    block_of, branch_of = np.full(length, NONE, np.int64), np.full(length, NONE, np.int64)
    seams = np.zeros(length, np.bool_)
    after_branch = False
    for span, position in zip(spans, _first_positions(spans), strict=True):
        tokens = slice(span.start, span.end)
        positions[tokens] = np.arange(position, position + len(span))
        block_of[tokens] = NONE if span.block is None else span.block
        branch_of[tokens] = NONE if span.branch is None else span.branch
        seams[span.start] = after_branch or span.kind is SpanKind.BRANCH
        after_branch = span.kind is SpanKind.BRANCH
    for fork, start in _branch_starts(spans):
        predecessors[start] = fork
    for array in (positions, block_of, branch_of, predecessors, seams):
        array.setflags(write=False)
    return Topology(prompt_length, spans, positions, block_of, branch_of, predecessors, seams)


def _first_positions(spans: Sequence[TokenSpan]) -> Iterator[int]:
    """The position of each span's first token."""
    fork = join = 0  # where the block's branches start; where the next span that is no branch starts
    for span in spans:
        if span.kind is SpanKind.BRANCH:
            yield fork
            join = max(join, fork + len(span))
        else:
            yield join
            fork = join = join + len(span)


def _branch_starts(spans: Sequence[TokenSpan]) -> Iterator[tuple[int, int]]:
    """For each branch: the index of its block's `</guideline>`, and that of the branch's first token."""
    fork = NONE
    for span in spans:
        if span.kind is SpanKind.GUIDELINE:
            fork = span.end - 1
        elif span.kind is SpanKind.BRANCH:
            yield fork, span.start
