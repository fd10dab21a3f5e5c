"""What stands between the matrix products of a layer, each in one pass over its tensors.

Invariant: a token's result depends on that token alone, so it has the same bits in every batch.

Shapes: T tokens, C channels, F of the feed-forward layer, H query heads, K key heads, D head size.
"""

# ruff: noqa: PLR0917 - kernels take arrays

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from npr_rollout.engine.cpu.compiled import Array, Kernel, exp, inlined


@inlined
def _root_mean_square(row: Array, eps: Any) -> Any:
    squares = np.float32(0.0)
    for d in range(row.shape[0]):
        squares += row[d] * row[d]
    return np.float32(1.0) / np.float32(math.sqrt(squares / np.float32(row.shape[0]) + eps))


def _add_and_normalise(x: Array, delta: Array, weight: Array, eps: Any, out: Array) -> None:
    """Add to the residual stream and normalise it (RMSNorm, Zhang and Sennrich, 2019).

    Args:
        x: float32 [T, C], the residual stream; changed.
        delta: float32 [T, C], what is added to it.
        weight: float32 [C].
        out: float32 [T, C], the result.
    """
    tokens, size = x.shape
    for t in numba.prange(tokens):
        for d in range(size):
            x[t, d] += delta[t, d]
        scale = _root_mean_square(x[t], eps)
        for d in range(size):
            out[t, d] = x[t, d] * scale * weight[d]


def _normalise(x: Array, weight: Array, eps: Any, out: Array) -> None:
    """The same with nothing to add."""
    tokens, size = x.shape
    for t in numba.prange(tokens):
        scale = _root_mean_square(x[t], eps)
        for d in range(size):
            out[t, d] = x[t, d] * scale * weight[d]


@inlined
def _prepare_head(head: Array, weight: Array, eps: Any, cosine: Array, sine: Array) -> None:
    """Normalise one head's vector if the model does, and rotate it (RoPE, Su et al., 2021), in place."""
    half = head.shape[0] // 2
    if weight.shape[0] > 0:
        scale = _root_mean_square(head, eps)
        for d in range(head.shape[0]):
            head[d] *= scale * weight[d]
    for d in range(half):
        low, high = head[d], head[d + half]
        head[d] = low * cosine[d] - high * sine[d]
        head[d + half] = high * cosine[d] + low * sine[d]


def _split_heads(
    projected: Array,
    positions: Array,
    cosine: Array,
    sine: Array,
    query_weight: Array,
    key_weight: Array,
    eps: Any,
    query: Array,
    key: Array,
    value: Array,
) -> None:
    """From one projection to rotated queries and keys, and values.

    Args:
        projected: float32 [T, H + 2K, D]: queries, keys and values of each token.
        positions: int64 [T].
        cosine: float32 [positions, D / 2], likewise `sine`.
        query_weight: float32 [D] of the queries' norm, [0] without; likewise `key_weight`.
        query: float32 [T, H, D], a result; likewise `key` and `value` [T, K, D].
    """
    tokens, heads, size = query.shape
    kv_heads = key.shape[1]
    for t in numba.prange(tokens):
        position = positions[t]
        for h in range(heads):
            for d in range(size):
                query[t, h, d] = projected[t, h, d]
            _prepare_head(query[t, h], query_weight, eps, cosine[position], sine[position])
        for h in range(kv_heads):
            for d in range(size):
                key[t, h, d] = projected[t, heads + h, d]
                value[t, h, d] = projected[t, heads + kv_heads + h, d]
            _prepare_head(key[t, h], key_weight, eps, cosine[position], sine[position])


def _gate(projected: Array, out: Array) -> None:
    """SwiGLU (Shazeer, 2020).

    Args:
        projected: float32 [T, 2F], gate and up.
        out: float32 [T, F], silu(gate) * up.
    """
    tokens, size = out.shape
    for t in numba.prange(tokens):
        for d in range(size):
            gate = projected[t, d]
            out[t, d] = gate / (np.float32(1.0) + exp(-gate)) * projected[t, size + d]


add_and_normalise = Kernel(_add_and_normalise)
normalise = Kernel(_normalise)
split_heads = Kernel(_split_heads)
gate = Kernel(_gate)
