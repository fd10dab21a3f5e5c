"""The GPU's attention kernels: FlashInfer's paged prefill, one call a level, merged by log-sum-exp.

FlashInfer wants each row's table as a list of pages of which only the last is partly filled. Ours are partly filled
wherever a span ended, so a page of FlashInfer's is one slot of ours (as SGLang does).

Invariant: the arrays handed to FlashInfer are exactly the plan's levels; `level_arrays` makes them on any machine, and
tests check them there against SDPA. Merging (`cascade.merge_state`) is associative, so levels may come in any order.

Shapes as in `cascade_cpu`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from npr_rollout.engine.attention.plan import AttentionPlan
from npr_rollout.engine.kv_pool import KvPool
from npr_rollout.engine.page_table import IntArray

_WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation recommends


def flash_infer_installed() -> bool:
    """Whether the package is there."""
    return importlib.util.find_spec("flashinfer") is not None


@dataclass(frozen=True, slots=True)
class LevelArrays:
    """One level in FlashInfer's terms.

    Attributes:
        queries: int64 [N], the tokens that attend at this level, in order.
        query_ends: int32 [items + 1], where each item's queries begin and end among them.
        kv_ends: int32 [items + 1], where each item's slots begin and end in
        kv_slots: int32 [sum of segments].
        causal: whether the last query sees all, the one before it one less, and so on.
    """

    queries: IntArray
    query_ends: IntArray
    kv_ends: IntArray
    kv_slots: IntArray
    causal: bool


def level_arrays(plan: AttentionPlan) -> Iterator[LevelArrays]:
    """The plan's levels as ragged arrays."""
    for level in range(len(plan.levels) - 1):
        items = plan.items[plan.levels[level] : plan.levels[level + 1]]
        if len(items) == 0:
            continue
        rows, first, last, begins, ends = items.T
        yield LevelArrays(
            _ranges(begins, ends),
            np.cumsum([0, *(ends - begins)]).astype(np.int32),
            np.cumsum([0, *(last - first)]).astype(np.int32),
            plan.slots[np.repeat(rows, last - first), _ranges(first, last)],
            causal=level == 0,
        )


def _ranges(begins: IntArray, ends: IntArray) -> IntArray:
    """The numbers of all ranges, one range after the other."""
    counts = ends - begins
    offsets = np.cumsum(counts) - counts
    ranges: IntArray = np.arange(int(counts.sum())) - np.repeat(offsets - begins, counts)
    return ranges


class FlashInferAttention:
    """The backend for NVIDIA GPUs."""

    def __init__(self, pool: KvPool) -> None:
        import flashinfer  # noqa: PLC0415 - a package that only GPU machines have

        self._flashinfer: Any = flashinfer
        self._pool = pool
        self._wrappers: list[Any] = []

    def prepare(self, plan: AttentionPlan) -> Callable[[int, Tensor, Tensor, Tensor, float], Tensor]:
        """See `interface.Attend`. The wrappers are planned by the first layer, which knows heads and scale."""
        levels = list(level_arrays(plan))
        queries = [None if len(level.queries) == plan.tokens else self._tensor(level.queries) for level in levels]
        write_slots = self._tensor(plan.write_slots)
        planned: list[Any] = []

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            keys, values = self._pool.keys[layer], self._pool.values[layer]
            keys.index_copy_(0, write_slots, key)
            values.index_copy_(0, write_slots, value)
            if not planned:
                planned.extend(self._plan(index, level, query, scale) for index, level in enumerate(levels))
            cache = keys[:, None], values[:, None]
            out: Tensor
            out, mass = planned[0].run(query.contiguous(), cache, return_lse=True)
            for wrapper, index in zip(planned[1:], queries[1:], strict=True):
                part = wrapper.run(query.contiguous() if index is None else query[index], cache, return_lse=True)
                self._merge((out, mass), part, index)
            return out

        return attend

    def _plan(self, index: int, level: LevelArrays, query: Tensor, scale: float) -> Any:
        while len(self._wrappers) <= index:
            workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
            self._wrappers.append(self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"))
        wrapper, shape = self._wrappers[index], self._pool.shape
        items = len(level.kv_ends) - 1
        wrapper.plan(
            self._tensor(level.query_ends),
            self._tensor(level.kv_ends),
            self._tensor(level.kv_slots),
            torch.ones(items, dtype=torch.int32, device=query.device),
            query.shape[1],
            shape.kv_heads,
            shape.head_dim,
            1,
            causal=level.causal,
            sm_scale=scale,
            q_data_type=query.dtype,
            kv_data_type=shape.dtype,
        )
        return wrapper

    def _merge(self, whole: tuple[Tensor, Tensor], part: tuple[Tensor, Tensor], queries: Tensor | None) -> None:
        """Fold a level into the result, for the queries that have it (all of them if None)."""
        if queries is None:
            self._flashinfer.merge_state_in_place(*whole, *part)
        else:
            out, mass = whole
            out[queries], mass[queries] = self._flashinfer.merge_state(out[queries], mass[queries], *part)

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._pool.shape.device, non_blocking=True)
