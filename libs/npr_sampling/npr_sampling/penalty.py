"""The repetition penalty, on what a step's own body has said."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def penalise(logits: Tensor, rows: Sequence[int], seen: Sequence[Tensor], penalties: Sequence[float]) -> Tensor:
    """The repetition penalty of Keskar et al. (2019), on some rows.

    Args:
        logits: float32 [N, V].
        rows: which rows have a penalty.
        seen: for each of these, bool [V]: the tokens that its body holds.
        penalties: for each of these, what divides the logits of such tokens, or multiplies negative ones.
    """
    if not rows:
        return logits
    index = torch.tensor(rows, device=logits.device)
    penalty = torch.tensor(penalties, device=logits.device)[:, None]
    old = logits[index]
    punished = torch.where(old > 0, old / penalty, old * penalty)
    return logits.index_copy(0, index, torch.where(torch.stack(list(seen)), punished, old))
