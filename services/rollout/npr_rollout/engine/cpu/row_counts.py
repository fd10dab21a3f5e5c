"""Numbers of rows that a matrix kernel treats alike, to the bit.

A kernel that multiplies N rows by a matrix may sum in another order when N is another number: FBGEMM's kernels of one
and of two rows do, and it cuts N rows into pieces that may leave such a remainder. So the numbers are tried out once a
process, and rows are padded to one of those that agree.

Invariant: `multiply` gives a row the same bits, whatever the other rows are and however many there are, if the kernel
treats all weights of one type as it treats the one that was tried (tests try others).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Product = Callable[[Tensor], Tensor]


class RowCounts:
    """What has been found out about one kernel."""

    def __init__(self, product: Product, features: int, limit: int) -> None:
        """Try a kernel.

        Args:
            product: [N, features] -> [N, any].
            limit: rows of one call at most; that many are what the others are compared with.
        """
        rows = torch.randn(limit, features, generator=torch.Generator().manual_seed(0))
        whole = product(rows)
        agrees = [torch.equal(product(rows[:count]), whole[:count]) for count in range(1, limit)] + [True]
        self.limit = limit
        self._padded = [0] * (limit + 1)
        for count in range(limit, 0, -1):
            self._padded[count] = count if agrees[count - 1] else self._padded[count + 1]

    def padded(self, count: int) -> int:
        """The smallest number of rows, `count` or more, that agrees. More than the limit are cut into several calls."""
        return self._padded[count] if count <= self.limit else count

    def multiply(self, product: Product, rows: Tensor) -> Tensor:
        """Multiply contiguous [N, features] in calls that agree with each other."""
        if len(rows) > self.limit:
            return torch.cat([self.multiply(product, part) for part in torch.split(rows, self.limit)])
        padding = self._padded[len(rows)] - len(rows)
        return product(functional.pad(rows, (0, 0, 0, padding)))[: len(rows)] if padding else product(rows)
