"""Attention by gathering each row's keys and values and calling `scaled_dot_product_attention`: runs on any device.

It knows no levels and copies what it reads, so it is the slow way; it is the oracle of the other backends in tests, and
what serves where neither of them runs.

Shapes: R runs of a group, Q queries a run (padded), L slots a run (padded), H query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from npr_rollout.engine.attention.plan import AttentionPlan
from npr_rollout.engine.kv_pool import KvPool
from npr_rollout.engine.page_table import IntArray

_MAX_SCORES = 1 << 26  # elements of one group's mask, so that a batch of long runs is cut


@dataclass(frozen=True, slots=True)
class _Group:
    """Runs that are attended together.

    Attributes:
        queries: int64 [R, Q], indices into the T tokens; padding repeats an index.
        slots: int64 [R, L]; padding is masked.
        mask: bool [R, 1, Q, L], what is seen.
        flat: int64 [N], which of the R * Q queries are real, and
        targets: int64 [N], which tokens they are.
    """

    queries: Tensor
    slots: Tensor
    mask: Tensor
    flat: Tensor
    targets: Tensor


class SdpaAttention:
    """The portable backend."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool

    def prepare(self, plan: AttentionPlan) -> Callable[[int, Tensor, Tensor, Tensor, float], Tensor]:
        """See `interface.Attend`."""
        groups = [self._group(plan, runs) for runs in _similar(plan.runs)]
        write_slots = self._tensor(plan.write_slots)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            keys, values = self._pool.keys[layer], self._pool.values[layer]
            keys.index_copy_(0, write_slots, key.to(keys.dtype))
            values.index_copy_(0, write_slots, value.to(values.dtype))
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            for group in groups:
                out[group.targets] = _attend(query, keys, values, group, scale)
            return out

        return attend

    def _group(self, plan: AttentionPlan, runs: IntArray) -> _Group:
        rows, lengths, begins, ends = runs.T
        counts = ends - begins
        width, longest = int(counts.max()), int(lengths.max())
        column = np.minimum(np.arange(width)[None], counts[:, None] - 1)
        queries = begins[:, None] + column
        seen = self._tensor(lengths[:, None] - counts[:, None] + column + 1)
        visible = torch.arange(longest, device=seen.device)[None, None] < seen[:, :, None]
        flat = np.flatnonzero(np.arange(width)[None] < counts[:, None])
        return _Group(
            self._tensor(queries),
            self._tensor(plan.slots[rows, :longest].astype(np.int64)),
            visible[:, None],
            self._tensor(flat),
            self._tensor(queries.reshape(-1)[flat]),
        )

    def _tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._pool.shape.device, non_blocking=True)


def _attend(query: Tensor, keys: Tensor, values: Tensor, group: _Group, scale: float) -> Tensor:
    out = functional.scaled_dot_product_attention(
        query[group.queries].transpose(1, 2),
        keys[group.slots].to(query.dtype).transpose(1, 2),
        values[group.slots].to(query.dtype).transpose(1, 2),
        group.mask,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1)[group.flat]


def _similar(runs: IntArray) -> Iterator[IntArray]:
    """Runs by their number of queries, grouped so that padding at most doubles a run."""
    counts = runs[:, 3] - runs[:, 2]
    runs = runs[np.lexsort((runs[:, 1], counts))]
    counts = runs[:, 3] - runs[:, 2]
    begin = 0
    while begin < len(runs):
        end = int(np.searchsorted(counts, 2 * counts[begin], side="right"))
        scores = np.arange(1, end - begin + 1) * counts[begin:end] * np.maximum.accumulate(runs[begin:end, 1])
        end = begin + max(1, int(np.searchsorted(scores, _MAX_SCORES, side="right")))
        yield runs[begin:end]
        begin = end
