"""Page tables: which slots hold the tokens that a row attends to, in order.

A *row* is one stream of tokens: a trajectory's trunk, one branch of an open block, or a shared prompt.

Invariants:
- `slots[row, :length[row]]` are the row's tokens in the order of the canonical list. Rows only grow at their end.
- A row holds each of its pages exactly once, and only its own tail page is ever written to.
- A fork shares the parent's pages by reference; the child's first token goes to a fresh page, so nothing is copied and
  nothing shared is written.
- A join hands the children's own pages to the parent in plan order; the prefix pages they shared are released. No key
  or value is touched.
- A closed row's number is used again only after `recycle`: what a forward pass has planned to read stays readable.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from npr_rollout.engine.kv_pool import KvPool, PageAccountingError

SlotArray = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.int64]

NO_ROW = -1
"""The parent of a row that was not forked."""

_INITIAL_ROWS = 64
_INITIAL_WIDTH = 256


class PageTables:
    """The tables of all rows, as arrays, so that a decode step extends a whole batch at once.

    Attributes:
        slots: int32 [rows, width].
        length: int64 [rows], tokens of each row.
        parent: int64 [rows], the row it was forked from, or NO_ROW.
        prefix: int64 [rows], how many of its tokens came from there.
    """

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self.slots: SlotArray = np.zeros((_INITIAL_ROWS, _INITIAL_WIDTH), np.int32)
        self.length: IntArray = np.zeros(_INITIAL_ROWS, np.int64)
        self._room: IntArray = np.zeros(_INITIAL_ROWS, np.int64)  # slots left in the tail page
        self._next: IntArray = np.zeros(_INITIAL_ROWS, np.int64)  # the tail page's next slot
        self._pages: list[list[int]] = [[] for _ in range(_INITIAL_ROWS)]
        self._shared: list[int] = [0] * _INITIAL_ROWS  # how many of the pages came from the parent
        self.parent: IntArray = np.full(_INITIAL_ROWS, NO_ROW, np.int64)
        self.prefix: IntArray = np.zeros(_INITIAL_ROWS, np.int64)
        self._unused = list(range(_INITIAL_ROWS - 1, -1, -1))
        self._retired: list[int] = []
        self._live: set[int] = set()

    @property
    def live_rows(self) -> frozenset[int]:
        """Rows that are open."""
        return frozenset(self._live)

    def pages_of(self, row: int) -> tuple[int, ...]:
        """Pages that the row holds."""
        return tuple(self._pages[row])

    def open(self) -> int:
        """A new, empty row."""
        if not self._unused:
            self._add_rows()
        row = self._unused.pop()
        self._live.add(row)
        self.length[row] = self._room[row] = self._next[row] = 0
        self._shared[row] = self.prefix[row] = 0
        self.parent[row] = NO_ROW
        return row

    def fork(self, parent: int) -> int:
        """A new row that starts with the parent's tokens."""
        child = self.open()
        length = self.length[parent]
        self.slots[child, :length] = self.slots[parent, :length]
        self.length[child] = length
        self.pool.share(self._pages[parent])
        self._pages[child] = list(self._pages[parent])
        self._shared[child] = len(self._pages[parent])
        self.parent[child], self.prefix[child] = parent, length
        return child

    def join(self, parent: int, children: Sequence[int]) -> None:
        """Append the children's own tokens to the parent, in the order given, and close the children.

        Raises:
            PageAccountingError: the parent has grown since the fork.
        """
        if any(self.prefix[child] != self.length[parent] for child in children):
            raise PageAccountingError(f"Row {parent} grew while its branches were open.")
        for child in children:
            self._take_over(parent, child)

    def room(self, row: int) -> int:
        """Tokens that still fit into the row's tail page."""
        return int(self._room[row])

    def at_page_end(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """For each of the rows, whether its next token needs a page."""
        full: npt.NDArray[np.bool_] = self._room[rows] == 0
        return full

    def extend(self, row: int, tokens: int) -> int:
        """Give the row slots for `tokens` more tokens; the number of pages allocated."""
        start, end = int(self.length[row]), int(self.length[row]) + tokens
        self._reserve_width(end)
        allocated = 0
        while start < end:
            if self._room[row] == 0:
                self._add_page(row)
                allocated += 1
            count = min(end - start, int(self._room[row]))
            self.slots[row, start : start + count] = np.arange(self._next[row], self._next[row] + count)
            self._next[row] += count
            self._room[row] -= count
            start += count
        self.length[row] = end
        return allocated

    def extend_each(self, rows: IntArray) -> None:
        """Give every row a slot for one more token."""
        if len(rows) == 0:
            return
        for row in rows[self.at_page_end(rows)].tolist():
            self._add_page(row)
        lengths = self.length[rows]
        self._reserve_width(int(lengths.max()) + 1)
        self.slots[rows, lengths] = self._next[rows]
        self._next[rows] += 1
        self._room[rows] -= 1
        self.length[rows] = lengths + 1

    def close(self, row: int) -> None:
        """Release the row's pages."""
        self.pool.release(self._pages[row])
        self._forget(row)

    def recycle(self) -> None:
        """Let the numbers of closed rows be used again: no forward pass reads them any more."""
        self._unused.extend(self._retired)
        self._retired.clear()

    def _take_over(self, parent: int, child: int) -> None:
        prefix = int(self.prefix[child])
        start, count = int(self.length[parent]), int(self.length[child]) - prefix
        self._reserve_width(start + count)
        self.slots[parent, start : start + count] = self.slots[child, prefix : prefix + count]
        self.length[parent] = start + count
        shared, own = self._pages[child][: self._shared[child]], self._pages[child][self._shared[child] :]
        self.pool.release(shared)
        self._pages[parent].extend(own)
        self._next[parent], self._room[parent] = self._next[child], self._room[child]
        self._forget(child)

    def _add_page(self, row: int) -> None:
        page = self.pool.allocate()
        self._pages[row].append(page)
        self._next[row] = page * self.pool.page_size
        self._room[row] = self.pool.page_size

    def _forget(self, row: int) -> None:
        self._pages[row] = []
        self._live.remove(row)
        self._retired.append(row)

    def _add_rows(self) -> None:
        rows = len(self.length)
        self.slots = np.concatenate([self.slots, np.zeros_like(self.slots)])
        self.length, self._room, self._next, self.prefix = (
            np.concatenate([array, np.zeros_like(array)])
            for array in (self.length, self._room, self._next, self.prefix)
        )
        self.parent = np.concatenate([self.parent, np.full_like(self.parent, NO_ROW)])
        self._pages.extend([] for _ in range(rows))
        self._shared.extend([0] * rows)
        self._unused.extend(range(2 * rows - 1, rows - 1, -1))

    def _reserve_width(self, width: int) -> None:
        while self.slots.shape[1] < width:
            self.slots = np.concatenate([self.slots, np.zeros_like(self.slots)], axis=1)
