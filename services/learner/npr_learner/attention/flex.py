"""Attention over a forest by FlexAttention: one compiled kernel forward and backward on the GPU.

Invariants:
- The block mask is made on the device from the holes of the tokens; nothing has S x S elements.
- A block of pairs that is left out holds no visible pair, and one that is not masked holds visible pairs alone. All
  others are masked pair by pair, so coarse bounds cost time and never a number.
- Rows are padded to few lengths (`bucket`), so that the kernel is compiled a bounded number of times. One compilation
  more is an error: what would run then has S x S elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from npr_learner.attention.forest import Fork, holes_of

BLOCK = 128
"""Queries and keys of a block of the mask, FlexAttention's own."""

_STEPS_A_DOUBLING = 4
_MOST_COMPILATIONS = 128


def bucket(length: int) -> int:
    """The length to which a row is padded: whole blocks, four lengths a doubling; at most a fifth is padding.

    Below four blocks it is the next whole block.
    """
    blocks = -(-length // BLOCK)
    step = max(1, (1 << (blocks - 1).bit_length()) // (2 * _STEPS_A_DOUBLING))
    return -(-blocks // step) * step * BLOCK


@dataclass(frozen=True)
class FlexAttention:
    """Attention over one packed row of S tokens, S a multiple of `BLOCK`."""

    mask: BlockMask

    @classmethod
    def of(cls, forest: Fork, length: int, device: torch.device) -> FlexAttention:
        """The attention of a forest in a row padded to `length`."""
        holes = holes_of(forest, length)
        begin_DS, end_DS = torch.from_numpy(holes.begin).to(device), torch.from_numpy(holes.end).to(device)
        return cls(block_mask(begin_DS, end_DS))

    def __call__(
        self, query_1HSD: torch.Tensor, key_1KSD: torch.Tensor, value_1KSD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """What each token attends to, [1, S, H, D]; K key heads are shared by H query heads, K divides H."""
        attend = _compiled() if query_1HSD.is_cuda else flex_attention
        shared = query_1HSD.shape[1] != key_1KSD.shape[1]
        output_1HSD = attend(query_1HSD, key_1KSD, value_1KSD, block_mask=self.mask, scale=scale, enable_gqa=shared)
        output_1SHD: torch.Tensor = output_1HSD.transpose(1, 2)
        return output_1SHD


@cache
def _compiled() -> Any:
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _MOST_COMPILATIONS)
    config.fail_on_recompile_limit_hit = True
    return torch.compile(flex_attention, dynamic=False)


def block_mask(begin_DS: torch.Tensor, end_DS: torch.Tensor) -> BlockMask:
    """The mask of tokens with these holes (`forest.Holes`), int32 [LEVELS, S] each, S a multiple of `BLOCK`."""
    length = begin_DS.shape[1]
    masked_QK, whole_QK = _classified(begin_DS, end_DS)
    counts, indices = _ordered(masked_QK)
    whole_counts, whole_indices = _ordered(whole_QK)

    def visible(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        seen = kv_idx <= q_idx
        for level in range(begin_DS.shape[0]):
            seen = seen & ((kv_idx < begin_DS[level, q_idx]) | (kv_idx >= end_DS[level, q_idx]))
        return seen

    return BlockMask.from_kv_blocks(
        counts, indices, whole_counts, whole_indices, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(length, length)
    )


def _classified(begin_DS: torch.Tensor, end_DS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [Q, K] each: blocks of pairs that need the mask, and blocks that are visible throughout."""
    begin_DQB, end_DQB = (each.view(len(each), -1, BLOCK) for each in (begin_DS, end_DS))
    first_K = torch.arange(0, begin_DS.shape[1], BLOCK, device=begin_DS.device)
    last_K, first_Q = first_K + BLOCK - 1, first_K[:, None]
    hidden_DQK = (first_K >= begin_DQB.amax(-1)[..., None]) & (last_K < end_DQB.amin(-1)[..., None])
    clear_DQK = (last_K < begin_DQB.amin(-1)[..., None]) | (first_K >= end_DQB.amax(-1)[..., None])
    some_QK = (first_K <= first_Q + BLOCK - 1) & ~hidden_DQK.any(0)
    whole_QK = (last_K <= first_Q) & clear_DQK.all(0)
    return some_QK & ~whole_QK, whole_QK


def _ordered(blocks_QK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys each block of queries has, int32 [1, 1, Q], and which, these first, [1, 1, Q, K]."""
    chosen_QK = blocks_QK.to(torch.int32)
    order_QK = torch.argsort(chosen_QK, dim=-1, descending=True, stable=True).to(torch.int32)
    return chosen_QK.sum(-1, dtype=torch.int32)[None, None], order_QK[None, None]
