"""The memory of keys and values, in pages that are counted.

Invariants:
- A page is free, or held by at least one table; its count is the number of tables that hold it.
- `release` is the only way back to the free list, and it takes a page there exactly once: when its count reaches zero.
- The pool knows nothing of trajectories. Who may allocate, and who must give way, is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


class PageAccountingError(RuntimeError):
    """The allocator and its users disagree: a page freed twice, or taken from an empty pool. A bug, never load."""


@dataclass(frozen=True)
class KvShape:
    """What one token costs in every layer."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype, device: torch.device) -> KvShape:
        """That of a model with this (text) configuration."""
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return cls(config.num_hidden_layers, kv_heads, head_dim, dtype, device)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class KvPool:
    """`pages` pages of `page_size` slots; a slot holds one token's keys and values in every layer.

    `keys[i]` and `values[i]` are layer i's, [slots, K, D]; the slots of page p are p * page_size and those that follow.
    """

    def __init__(self, shape: KvShape, pages: int, page_size: int) -> None:
        self.shape = shape
        self.pages = pages
        self.page_size = page_size
        self.keys = tuple(self._layer() for _ in range(shape.layers))
        self.values = tuple(self._layer() for _ in range(shape.layers))
        self._free = list(range(pages - 1, -1, -1))
        self._count = [0] * pages

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def holders(self, page: int) -> int:
        """How many tables hold the page."""
        return self._count[page]

    def free_list(self) -> tuple[int, ...]:
        """The free pages, for the audit."""
        return tuple(self._free)

    def allocate(self) -> int:
        """A free page, held once.

        Raises:
            PageAccountingError: there is none; the scheduler should have made room.
        """
        if not self._free:
            raise PageAccountingError("A page was taken from an empty pool: the scheduler must make room first.")
        page = self._free.pop()
        self._count[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Hold each page once more."""
        for page in pages:
            if self._count[page] == 0:
                raise PageAccountingError(f"Page {page} is free and can't be shared.")
            self._count[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Hold each page once less; those that nobody holds any more become free."""
        for page in pages:
            if self._count[page] == 0:
                raise PageAccountingError(f"Page {page} was freed twice.")
            self._count[page] -= 1
            if self._count[page] == 0:
                self._free.append(page)

    def _layer(self) -> torch.Tensor:
        """Zeros, not garbage: a kernel that reads padding and masks it must not meet a NaN."""
        shape = self.shape
        sizes = (self.pages * self.page_size, shape.kv_heads, shape.head_dim)
        if shape.device.type != "cpu":
            return torch.zeros(sizes, dtype=shape.dtype, device=shape.device)
        # The operating system gives zeros that take no memory until they are written to.
        bytes_ = np.zeros((*sizes[:-1], sizes[-1] * shape.dtype.itemsize), np.uint8)
        return torch.from_numpy(bytes_).view(shape.dtype)
