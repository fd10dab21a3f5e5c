"""Which tokens of a forward pass attend to what: the prompt, the trunk, and each row's own tokens, level by level.

A row's table is what it inherits from the rows it was forked from, and its own tokens behind it. Rows with a common
ancestor attend to what they inherit from it together, in one pass over its pages (a cascade), so the keys and values of
a group's prompt, or of the trunk before a fork, are read once a step, however many branches read them.

Invariants:
- A token sees exactly the first `kv_length` slots of its row, less those of later tokens of its own run. Visibility
  (SPEC section 2) is therefore a property of the tables; no mask over branches exists.
- How a token's slots are cut into segments depends on its own row and its ancestors alone, never on batch mates. With
  a kernel that treats each query by itself, results don't depend on the batch, to the bit.
- Tokens that share a segment are adjacent in the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from npr_rollout.engine.page_table import NO_ROW, IntArray, PageTables, SlotArray


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Segments of tables, and who attends to them.

    Attributes:
        tokens: T, the tokens of the pass.
        write_slots: int64 [T], where each token's key and value go; they are written before anything is read.
        slots: the tables: int32 [rows, width].
        items: int64 [N, 5]: row, first and last+1 column of the table, first and last+1 query.
        levels: int64 [L + 1], the items of level l are `items[levels[l] : levels[l + 1]]`. Level 0 is each row's own
            tokens, causally; the others are inherited segments, seen whole.
        runs: int64 [R, 4] for backends that know no levels: row, kv_length, first and last+1 query.
    """

    tokens: int
    write_slots: IntArray
    slots: SlotArray
    items: IntArray
    levels: IntArray
    runs: IntArray

    @property
    def tokens_read(self) -> int:
        """Tokens whose keys and values are read, shared segments once."""
        return int((self.items[:, 2] - self.items[:, 1]).sum())

    @property
    def tokens_attended(self) -> int:
        """The same, had each row read all of its table by itself."""
        return int(self.runs[:, 1].sum())


def attention_order(tables: PageTables, rows: IntArray) -> npt.NDArray[np.intp]:
    """The order in which rows that share segments are adjacent."""
    parents = tables.parent[rows]
    roots = np.where(parents == NO_ROW, rows, parents)
    grand = tables.parent[roots]
    roots = np.where(grand == NO_ROW, roots, grand)
    return np.lexsort((rows, parents, roots))


def make_plan(tables: PageTables, rows: IntArray, counts: IntArray, kv_lengths: IntArray) -> AttentionPlan:
    """Plan a pass over runs that are in `attention_order`.

    Args:
        rows: int64 [R], the row of each run; a row may have several runs, in the order in which they were fed.
        counts: int64 [R], tokens of each run.
        kv_lengths: int64 [R], what the last token of each run sees.
    """
    ends = np.cumsum(counts)
    begins = ends - counts
    own = np.stack([rows, tables.prefix[rows], kv_lengths, begins, ends], axis=1)
    levels = [own, *_inherited(tables, rows, begins, ends)]
    return AttentionPlan(
        int(ends[-1]),
        _write_slots(tables, rows, counts, kv_lengths),
        tables.slots,
        np.concatenate(levels),
        np.cumsum([0, *map(len, levels)]),
        np.stack([rows, kv_lengths, begins, ends], axis=1),
    )


def _inherited(tables: PageTables, rows: IntArray, begins: IntArray, ends: IntArray) -> Sequence[IntArray]:
    """One level a generation of ancestors: the segments that rows inherit from their parents, then grandparents."""
    levels: list[IntArray] = []
    heirs = rows
    while True:
        kept = tables.parent[heirs] != NO_ROW
        heirs, begins, ends = heirs[kept], begins[kept], ends[kept]
        if len(heirs) == 0:
            return levels
        parents = tables.parent[heirs]
        levels.append(_shared(parents, tables.prefix[parents], tables.prefix[heirs], begins, ends))
        heirs = parents


def _shared(rows: IntArray, first: IntArray, last: IntArray, begins: IntArray, ends: IntArray) -> IntArray:
    """Items of one level, where neighbours that see the same segment are made one."""
    new = np.ones(len(rows), np.bool_)
    new[1:] = (rows[1:] != rows[:-1]) | (last[1:] != last[:-1]) | (begins[1:] != ends[:-1])
    starts = np.flatnonzero(new)
    stops = np.append(starts[1:], len(rows)) - 1
    items = np.stack([rows[starts], first[starts], last[starts], begins[starts], ends[stops]], axis=1)
    return items[items[:, 2] > items[:, 1]]


def _write_slots(tables: PageTables, rows: IntArray, counts: IntArray, kv_lengths: IntArray) -> IntArray:
    if bool((counts == 1).all()):
        return tables.slots[rows, kv_lengths - 1].astype(np.int64)
    back = np.repeat(np.cumsum(counts), counts) - np.arange(int(counts.sum()))  # 1 at a run's last token
    columns = np.repeat(kv_lengths, counts) - back
    return tables.slots[np.repeat(rows, counts), columns].astype(np.int64)
