"""Drawing tokens on a CPU: softmax, inverse cumulative distribution and log-probability in one go over each row.

Invariants:
- A row's token depends on that row alone.
- A logit of -inf is never drawn.
- Sums are taken block by block in float64, so a vocabulary of any size loses no probability.

Shapes: N rows, V words.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from npr_rollout.engine.cpu.compiled import Array, Kernel, array, exp

_BLOCK = 512


def _draw(logits: Array, temperatures: Array, uniforms: Array, tokens: Array, log_probs: Array) -> None:
    """Draw one token a row.

    Args:
        logits: float32 [N, V].
        temperatures: float32 [N]; 0 takes the likeliest token, with log-probability 0.
        uniforms: float64 [N], in [0, 1).
        tokens: int64 [N], a result; likewise `log_probs`, float64 [N].
    """
    rows, size = logits.shape
    blocks = (size + _BLOCK - 1) // _BLOCK
    for row in numba.prange(rows):
        best: Any = np.int64(0)
        for v in range(1, size):
            if logits[row, v] > logits[row, best]:
                best = v
        tokens[row], log_probs[row] = best, 0.0
        if temperatures[row] > 0:
            top, scale = logits[row, best], np.float32(1.0) / temperatures[row]
            masses = np.empty(blocks, np.float64)
            total = 0.0
            for block in range(blocks):
                mass: Any = np.float32(0.0)
                for v in range(block * _BLOCK, min(size, (block + 1) * _BLOCK)):
                    weight = exp((logits[row, v] - top) * scale)
                    mass += weight if logits[row, v] > -np.inf else np.float32(0.0)
                masses[block] = mass
                total += mass
            left = uniforms[row] * total
            block = 0
            while block < blocks - 1 and left >= masses[block]:
                left -= masses[block]
                block += 1
            chosen = best
            for v in range(block * _BLOCK, min(size, (block + 1) * _BLOCK)):
                if logits[row, v] > -np.inf:
                    chosen = v
                    left -= exp((logits[row, v] - top) * scale)
                    if left < 0.0:
                        break
            tokens[row] = chosen
            log_probs[row] = (logits[row, chosen] - top) * scale - math.log(total)


_draw_kernel = Kernel(_draw)


def draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from float32 logits [N, V] at temperatures float32 [N], by numbers float64 [N] in [0, 1).

    Returns:
        Tokens int64 [N] and their log-probabilities float64 [N]; 0 where the temperature is 0.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64)
    log_probs = torch.empty(len(logits), dtype=torch.float64)
    threads = torch.get_num_threads() if logits.numel() >= 1 << 15 else 1
    _draw_kernel(*map(array, (logits, temperatures, uniforms, tokens, log_probs)), threads=threads)
    return tokens, log_probs
