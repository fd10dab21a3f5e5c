"""The CPU's attention kernel: cascade attention over pages, in place, compiled by numba.

Every layer's new keys and values are written to their slots; then each query goes over its segments, level by level,
with one running softmax (Milakov and Gimelshein, 2018), so levels need no merging pass. A shared segment is walked
once, block by block, for all its queries while the block is in the cache. Nothing is gathered, copied or padded.

Invariants:
- Batch invariance: a query's result is computed from its own segments in a fixed order by code that does not depend on
  how many other queries, rows or threads there are. Decoded alone, in a batch, in chunks, or recomputed after a
  preemption, a token gets the same bits.
- Arithmetic is float32, whatever the pool holds (float32, or bfloat16 as its bits in uint16).

Shapes: T tokens, H query heads, K key heads, G = H / K, D head size.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch

# One OpenMP pool for torch and for numba, where numba finds torch's: two pools would fight for the cores.
os.environ.setdefault("NUMBA_THREADING_LAYER_PRIORITY", "omp tbb workqueue")

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import overload
from torch import Tensor

from npr_rollout.engine.attention.plan import AttentionPlan
from npr_rollout.engine.kv_pool import KvPool

Array = npt.NDArray[Any]

_BLOCK = 64  # tokens whose scores are kept at once; a block of keys stays in the first-level cache for all its queries
_MATH = {"reassoc", "contract", "nsz", "arcp"}  # but not nnan, ninf: the running maximum starts at -inf


def _as_float(value: Any) -> Any:
    """A pool's element as float32; bfloat16 is the upper half of a float32's bits."""
    raise NotImplementedError  # compiled code only


# Not strict: the annotations, which compiled code doesn't know, would differ.
@overload(_as_float, strict=False)  # type: ignore[untyped-decorator]
def _overload_as_float(value: Any) -> Callable[[Any], Any]:
    if isinstance(value, types.Float):
        return lambda value: value
    return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)


def _cascade(  # noqa: PLR0917, PLR0912 - arrays, as a kernel takes them
    query: Array,
    new_keys: Array,
    new_values: Array,
    keys: Array,
    values: Array,
    write_slots: Array,
    slots: Array,
    items: Array,
    levels: Array,
    scale: Any,
    top: Array,
    total: Array,
    out: Array,
) -> None:
    """One layer's attention for all tokens of a pass.

    Args:
        query: float32 [T, H, D].
        new_keys: [T, K, D], likewise `new_values`; of the pool's type.
        keys: [slots, K, D], likewise `values`: the pool.
        write_slots, slots, items, levels: the plan's.
        top: float32 [T, H], the running maximum; likewise `total`, the running sum. Their content is overwritten.
        out: float32 [T, H, D], the result.
    """
    tokens, heads, size = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    for t in numba.prange(tokens):
        slot = write_slots[t]
        for k in range(kv_heads):
            for d in range(size):
                keys[slot, k, d] = new_keys[t, k, d]
                values[slot, k, d] = new_values[t, k, d]
        for h in range(heads):
            top[t, h] = -np.inf
            total[t, h] = 0.0
            for d in range(size):
                out[t, h, d] = 0.0
    for level in range(levels.shape[0] - 1):
        first, count = levels[level], levels[level + 1] - levels[level]
        # Heads outermost: whatever the items' lengths are, threads get equal parts.
        for work in numba.prange(count * kv_heads):
            kv_head = work // count
            item = first + work % count
            row, begin, end, query_begin, query_end = (
                items[item, 0],
                items[item, 1],
                items[item, 2],
                items[item, 3],
                items[item, 4],
            )
            scores = np.empty(_BLOCK, np.float32)
            for block in range(begin, end, _BLOCK):
                for t in range(query_begin, query_end):
                    seen = end if level > 0 else end - (query_end - 1 - t)
                    n = min(block + _BLOCK, seen) - block
                    for h in range(kv_head * group, (kv_head + 1) * group):
                        if n <= 0:
                            continue
                        highest = top[t, h]
                        for j in range(n):
                            slot = slots[row, block + j]
                            score = np.float32(0.0)
                            for d in range(size):
                                score += query[t, h, d] * _as_float(keys[slot, kv_head, d])
                            score *= scale
                            scores[j] = score
                            highest = max(highest, score)
                        fade = np.float32(math.exp(top[t, h] - highest))
                        mass = total[t, h] * fade
                        for d in range(size):
                            out[t, h, d] *= fade
                        for j in range(n):
                            slot = slots[row, block + j]
                            weight = np.float32(math.exp(scores[j] - highest))
                            mass += weight
                            for d in range(size):
                                out[t, h, d] += weight * _as_float(values[slot, kv_head, d])
                        top[t, h] = highest
                        total[t, h] = mass
    for t in numba.prange(tokens):
        for h in range(heads):
            share = np.float32(1.0) / total[t, h]
            for d in range(size):
                out[t, h, d] *= share


def _compile(*, parallel: bool) -> Any:
    options = {"fastmath": _MATH, "nogil": True, "parallel": parallel, "error_model": "numpy"}
    try:
        return numba.njit(_cascade, cache=True, **options)
    except RuntimeError:  # no folder to cache in, such as in a container that may not write: compiled in each process
        return numba.njit(_cascade, **options)


_serial = _compile(parallel=False)
_parallel = _compile(parallel=True)


class CascadeAttention:
    """The backend for the CPU."""

    def __init__(self, pool: KvPool) -> None:
        self._keys = tuple(map(_array, pool.keys))
        self._values = tuple(map(_array, pool.values))
        self._dtype = pool.shape.dtype

    def prepare(self, plan: AttentionPlan) -> Callable[[int, Tensor, Tensor, Tensor, float], Tensor]:
        """The function of one pass: layer, query [T, H, D], new keys and values [T, K, D], scale -> [T, H, D]."""
        state: list[Array] = []
        threads = torch.get_num_threads()
        kernel = _serial if threads == 1 else _parallel
        if threads > 1:
            numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            if not state:
                state.extend(np.empty(query.shape[:2], np.float32) for _ in range(2))
            out = torch.empty(query.shape, dtype=torch.float32)
            kernel(
                _array(query.to(torch.float32)),
                _array(key.to(self._dtype)),
                _array(value.to(self._dtype)),
                self._keys[layer],
                self._values[layer],
                plan.write_slots,
                plan.slots,
                plan.items,
                plan.levels,
                np.float32(scale),
                *state,
                out.numpy(),
            )
            return out.to(query.dtype)

        return attend


def _array(tensor: Tensor) -> Array:
    """The tensor's memory for the kernel; bfloat16 as the bits that numpy can hold."""
    tensor = tensor.contiguous()
    array: Array = (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array
