"""The random numbers that draw tokens, hashed from what they may depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

_U64 = npt.NDArray[np.uint64]


def draw_key(seed: int, prompt_ids: Sequence[int]) -> int:
    """64 bits that fix a trajectory's draws. The prompt is part of them, so prompts with one seed are independent."""
    content = np.asarray(prompt_ids, np.int64).tobytes() + (seed & (2**64 - 1)).to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def uniforms(
    keys: Iterable[int], branches: Iterable[int], positions: Iterable[int], count: int
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) a row.

    Args:
        keys: each row's `draw_key`.
        branches: each row's branch, counted from 0; -1 on the trunk.
        positions: RoPE position of each row's token that is to be drawn.
        count: how many rows there are.
    """
    mixed = _mix(np.fromiter((branch + 1 for branch in branches), np.uint64, count))
    mixed = _mix(np.fromiter(keys, np.uint64, count) ^ mixed)
    mixed = _mix(mixed ^ np.fromiter(positions, np.uint64, count))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: _U64) -> _U64:
    """SplitMix64's step and finaliser (Steele, Lea and Flood, 2014), element by element."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: _U64 = value ^ (value >> np.uint64(31))
    return result
