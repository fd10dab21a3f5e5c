"""The CPU's attention kernel: cascade attention over pages, in place, compiled by numba.

Every layer's new keys and values are written to their slots; then each query goes over its segments, level by level,
with one running softmax (Milakov and Gimelshein, 2018), so levels need no merging pass. A shared segment is walked
once, block by block, for all its queries while the block is in the cache. Nothing is gathered, copied or padded.

Invariants:
- Batch invariance: a query's result is computed from its own segments in a fixed order by code that does not depend on
  how many other queries or rows there are. Decoded alone, in a batch, in chunks, or recomputed after a preemption, a
  token gets the same bits, given the number of threads.
- Arithmetic is float32, whatever the pool holds (float32, or bfloat16 as its bits in uint16).

Shapes: T tokens, H query heads, K key heads, G = H / K, D head size.
"""

# ruff: noqa: PLR0917 - kernels take arrays and indices

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from npr_rollout.engine.attention.plan import AttentionPlan
from npr_rollout.engine.cpu.compiled import Array, Kernel, array, exp, inlined
from npr_rollout.engine.kv_pool import KvPool

_BLOCK = 64  # tokens whose scores are kept at once; a block of keys stays in the cache for all its queries


def _as_float(value: Any) -> Any:
    """A pool's element as float32; bfloat16 is the upper half of a float32's bits."""
    raise NotImplementedError  # compiled code only


# Not strict: the annotations, which compiled code doesn't know, would differ.
@overload(_as_float, strict=False)  # type: ignore[untyped-decorator]
def _overload_as_float(value: Any) -> Callable[[Any], Any]:
    if isinstance(value, types.Float):
        return lambda value: value
    return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)


def _write(new_keys: Array, new_values: Array, write_slots: Array, keys: Array, values: Array) -> None:
    """Put each token's keys and values [T, K, D] where the plan says."""
    tokens, heads, size = new_keys.shape
    for t in numba.prange(tokens):
        slot = write_slots[t]
        for k in range(heads):
            for d in range(size):
                keys[slot, k, d] = new_keys[t, k, d]
                values[slot, k, d] = new_values[t, k, d]


@inlined
def _score(
    query: Array,
    t: int,
    keys: Array,
    first: int,
    last: int,
    slots: Array,
    row: int,
    begin: int,
    end: int,
    scale: Any,
    scores: Array,
) -> None:
    """Scores of a block's keys [H, block] for the query heads of key heads `first` to `last`.

    A token's heads lie side by side, so all of them are read before the next token's. Four keys at a time share the
    loads of the query and hide the sums' latency.
    """
    group, size = query.shape[1] // keys.shape[1], query.shape[2]
    count = end - begin
    whole = count - count % 4
    for j in range(0, whole, 4):
        a, b, c, e = (
            slots[row, begin + j],
            slots[row, begin + j + 1],
            slots[row, begin + j + 2],
            slots[row, begin + j + 3],
        )
        for k in range(first, last):
            for h in range(k * group, (k + 1) * group):
                score_a, score_b, score_c, score_e = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
                for d in range(size):
                    q = query[t, h, d]
                    score_a += q * _as_float(keys[a, k, d])
                    score_b += q * _as_float(keys[b, k, d])
                    score_c += q * _as_float(keys[c, k, d])
                    score_e += q * _as_float(keys[e, k, d])
                scores[h, j] = score_a * scale
                scores[h, j + 1] = score_b * scale
                scores[h, j + 2] = score_c * scale
                scores[h, j + 3] = score_e * scale
    for j in range(whole, count):
        slot = slots[row, begin + j]
        for k in range(first, last):
            for h in range(k * group, (k + 1) * group):
                score = np.float32(0.0)
                for d in range(size):
                    score += query[t, h, d] * _as_float(keys[slot, k, d])
                scores[h, j] = score * scale


@inlined
def _weigh(scores: Array, h: int, count: int, top: Any) -> Any:
    """Turn a head's scores into softmax weights relative to the highest score so far; that score, and their sum."""
    for j in range(count):
        top = max(top, scores[h, j])
    mass = np.float32(0.0)
    for j in range(count):
        scores[h, j] = exp(scores[h, j] - top)
        mass += scores[h, j]
    return top, mass


@inlined
def _add_values(
    values: Array,
    first: int,
    last: int,
    slots: Array,
    row: int,
    begin: int,
    end: int,
    weights: Array,
    out: Array,
    t: int,
) -> None:
    """Add a block's weighted values, four at a time so that the result is loaded and stored less often."""
    group, size = out.shape[1] // values.shape[1], out.shape[2]
    count = end - begin
    whole = count - count % 4
    for j in range(0, whole, 4):
        a, b, c, e = (
            slots[row, begin + j],
            slots[row, begin + j + 1],
            slots[row, begin + j + 2],
            slots[row, begin + j + 3],
        )
        for k in range(first, last):
            for h in range(k * group, (k + 1) * group):
                for d in range(size):
                    out[t, h, d] += (
                        weights[h, j] * _as_float(values[a, k, d])
                        + weights[h, j + 1] * _as_float(values[b, k, d])
                        + weights[h, j + 2] * _as_float(values[c, k, d])
                        + weights[h, j + 3] * _as_float(values[e, k, d])
                    )
    for j in range(whole, count):
        slot = slots[row, begin + j]
        for k in range(first, last):
            for h in range(k * group, (k + 1) * group):
                for d in range(size):
                    out[t, h, d] += weights[h, j] * _as_float(values[slot, k, d])


def _attend(
    query: Array,
    keys: Array,
    values: Array,
    slots: Array,
    items: Array,
    levels: Array,
    scale: Any,
    parts: int,
    top: Array,
    total: Array,
    out: Array,
) -> None:
    """One layer's attention for all tokens of a pass.

    Args:
        query: float32 [T, H, D].
        keys: [slots, K, D], likewise `values`: the pool.
        slots, items, levels: the plan's.
        parts: into how many parts an item's heads are cut, so that threads have work when there are few items.
        top: float32 [T, H], the running maximum; likewise `total`, the running sum. Their content is overwritten.
        out: float32 [T, H, D], the result.
    """
    tokens, heads, size = out.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    top[:] = -np.inf
    total[:] = 0.0
    out[:] = 0.0
    for level in range(levels.shape[0] - 1):
        first, count = levels[level], levels[level + 1] - levels[level]
        for work in numba.prange(count * parts):
            item, part = first + work // parts, work % parts
            row, begin, end, query_begin, query_end = (
                items[item, 0],
                items[item, 1],
                items[item, 2],
                items[item, 3],
                items[item, 4],
            )
            first_head, last_head = part * kv_heads // parts, (part + 1) * kv_heads // parts
            weights = np.empty((heads, _BLOCK), np.float32)
            for block in range(begin, end, _BLOCK):
                for t in range(query_begin, query_end):
                    seen = min(block + _BLOCK, end if level > 0 else end - (query_end - 1 - t))
                    if seen <= block:
                        continue
                    _score(query, t, keys, first_head, last_head, slots, row, block, seen, scale, weights)
                    for h in range(first_head * group, last_head * group):
                        highest, mass = _weigh(weights, h, seen - block, top[t, h])
                        fade = exp(top[t, h] - highest)
                        for d in range(size):
                            out[t, h, d] *= fade
                        total[t, h] = total[t, h] * fade + mass
                        top[t, h] = highest
                    _add_values(values, first_head, last_head, slots, row, block, seen, weights, out, t)
    for t in numba.prange(tokens):
        for h in range(heads):
            share = np.float32(1.0) / total[t, h]
            for d in range(size):
                out[t, h, d] *= share


_write_kernel = Kernel(_write)
_attend_kernel = Kernel(_attend)


class CascadeAttention:
    """The backend for the CPU."""

    def __init__(self, pool: KvPool) -> None:
        self._keys = tuple(map(array, pool.keys))
        self._values = tuple(map(array, pool.values))
        self._dtype = pool.shape.dtype

    def prepare(self, plan: AttentionPlan) -> CascadePass:
        """See `interface.AttentionBackend`."""
        return CascadePass(plan, self._keys, self._values, self._dtype)


class CascadePass:
    """The attention of one forward pass, for tensors (`interface.Attend`) or for arrays."""

    def __init__(
        self, plan: AttentionPlan, keys: tuple[Array, ...], values: tuple[Array, ...], dtype: torch.dtype
    ) -> None:
        self._plan = plan
        self._keys, self._values, self._dtype = keys, values, dtype
        self._threads = torch.get_num_threads()
        self._state: list[Array] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Write key and value [T, K, D] to the pool and attend from query [T, H, D]."""
        out = torch.empty(query.shape, dtype=torch.float32)
        new_key, new_value = array(key.to(self._dtype)), array(value.to(self._dtype))
        self.arrays(layer, array(query.to(torch.float32)), new_key, new_value, np.float32(scale), array(out))
        return out.to(query.dtype)

    def arrays(self, layer: int, query: Array, key: Array, value: Array, scale: Any, out: Array) -> None:
        """The same for arrays: query and `out`, the result, float32; key and value of the pool's type or float32.

        Rows behind the plan's tokens are padding: nothing is written for them, and their result is left as it is.
        """
        plan, tokens = self._plan, self._plan.tokens
        if len(query) > tokens:
            query, key, value, out = query[:tokens], key[:tokens], value[:tokens], out[:tokens]
        if key.dtype != self._keys[layer].dtype:
            key, value = (array(torch.from_numpy(new).to(self._dtype)) for new in (key, value))
        if not self._state:
            self._state = [np.empty(query.shape[:2], np.float32) for _ in range(2)]
        keys, values = self._keys[layer], self._values[layer]
        _write_kernel(key, value, plan.write_slots, keys, values, threads=1)
        parts = min(self._threads, keys.shape[1])
        tables = plan.slots, plan.items, plan.levels
        _attend_kernel(query, keys, values, *tables, scale, parts, *self._state, out, threads=self._threads)
