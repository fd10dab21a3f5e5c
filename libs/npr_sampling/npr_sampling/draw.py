"""Drawing, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_anywhere(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row, by the inverse of its cumulative distribution.

    Args:
        logits: float32 [N, V], -inf where truncated, before temperature.
        temperatures: float32 [N]; 0 takes the likeliest token.
        uniforms: float64 [N] in [0, 1).

    Returns:
        Token ids int64 [N], and their log-probabilities float64 [N].
    """
    likeliest = logits.argmax(dim=-1)
    greedy = temperatures == 0
    log_probs = (logits / torch.where(greedy, 1.0, temperatures)[:, None]).log_softmax(dim=-1)
    cumulative = log_probs.exp().to(torch.float64).cumsum(dim=-1)
    target = uniforms[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, likeliest, drawn)
    chosen = log_probs.gather(1, tokens[:, None])[:, 0].masked_fill(greedy, 0.0)
    return tokens, chosen.to(torch.float64)
