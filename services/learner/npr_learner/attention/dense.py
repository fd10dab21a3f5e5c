"""Attention over a forest under a mask of S x S elements: the oracle that the others are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from npr_learner.attention.forest import Fork, holes_of


@dataclass(frozen=True)
class DenseAttention:
    """Attention over one packed row of S tokens.

    Attributes:
        visible_SS: bool, true where the query (row) sees the key (column).
    """

    visible_SS: torch.Tensor

    @classmethod
    def of(cls, forest: Fork, length: int, device: torch.device) -> DenseAttention:
        """The attention of a forest in a row padded to `length`."""
        return cls(torch.from_numpy(holes_of(forest, length).visible(0, length)).to(device))

    def __call__(
        self, query_1HSD: torch.Tensor, key_1KSD: torch.Tensor, value_1KSD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """What each token attends to, [1, S, H, D]; K key heads are shared by H query heads, K divides H."""
        shared = query_1HSD.shape[1] // key_1KSD.shape[1]
        key_1HSD, value_1HSD = (heads.repeat_interleave(shared, 1) for heads in (key_1KSD, value_1KSD))
        output_1HSD = scaled_dot_product_attention(
            query_1HSD, key_1HSD, value_1HSD, attn_mask=self.visible_SS, scale=scale
        )
        return output_1HSD.transpose(1, 2)
