"""What is left of a distribution: top-k, then top-p, then min-p, after penalty and temperature.

Invariants:
- What is left of a row depends on that row alone. Rows of one batch are treated together only where they ask for the
  same, and by operations that give a row the same bits beside any others: softmax and cumsum do, sum and logsumexp
  don't.
- What is cut off is cut at a value: tokens that are as likely as the last one kept are kept too.
- The likeliest token is always kept.

Shapes: N rows, V words.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

_HEAD = 256  # words that hold a usual nucleus; a row whose nucleus is larger is sorted as a whole


class Cut(Protocol):
    """What one row asks for: the k likeliest tokens (0: all), nucleus mass in (0, 1], least share of the likeliest."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...


def truncate(logits: Tensor, params: Sequence[Cut], temperatures: Tensor) -> Tensor:
    """Set what is cut off to -inf.

    Args:
        logits: float32 [N, V], before temperature.
        params: one a row.
        temperatures: float32 [N]; rows of temperature 0 are left as they are.
    """
    groups = defaultdict(list)
    for row, p in enumerate(params):
        if p.temperature > 0 and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0):
            groups[p.top_k, p.top_p, p.min_p].append(row)
    for (top_k, top_p, min_p), rows in groups.items():
        index = torch.tensor(rows, device=logits.device)
        mine, scales = logits[index], temperatures[index, None]
        lowest = _lowest_kept(mine, scales, min(top_k, logits.shape[-1]), top_p, min_p)
        logits = logits.index_copy(0, index, mine.masked_fill(mine < lowest, float("-inf")))
    return logits


def _lowest_kept(logits: Tensor, scales: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The smallest logit [N, 1] that each row keeps."""
    lowest = torch.full_like(scales, float("-inf"))
    if top_k:
        ranked = logits.topk(top_k, dim=-1).values
        lowest = ranked[:, -1:]
        if top_p < 1.0:
            lowest = torch.maximum(lowest, _end_of_nucleus(ranked, (ranked / scales).softmax(dim=-1), top_p))
    elif top_p < 1.0:
        lowest = _nucleus(logits, scales, top_p)
    if min_p:
        lowest = torch.maximum(lowest, logits.amax(dim=-1, keepdim=True) + math.log(min_p) * scales)
    return lowest


def _nucleus(logits: Tensor, scales: Tensor, top_p: float) -> Tensor:
    """The last logit [N, 1] of each row's nucleus, found among the likeliest words where it ends there."""
    probabilities = (logits / scales).softmax(dim=-1)
    head, where = probabilities.topk(min(_HEAD, logits.shape[-1]), dim=-1)
    lowest = _end_of_nucleus(logits.gather(1, where), head, top_p)
    larger = torch.nonzero(head.cumsum(dim=-1)[:, -1] < top_p)[:, 0]
    if len(larger) and head.shape[-1] < logits.shape[-1]:
        ranked, where = probabilities[larger].sort(dim=-1, descending=True)
        lowest = lowest.index_copy(0, larger, _end_of_nucleus(logits[larger].gather(1, where), ranked, top_p))
    return lowest


def _end_of_nucleus(ranked: Tensor, probabilities: Tensor, top_p: float) -> Tensor:
    """The logit [N, 1] of the last word before which less than `top_p` has been kept."""
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = (before < top_p).sum(dim=-1, keepdim=True).clamp_(min=1)
    return ranked.gather(1, kept - 1)
