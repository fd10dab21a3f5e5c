"""Paged attention behind `transformers`' own attention interface: no model code is copied.

A forward pass has T tokens of many rows, flattened to [1, T]. Every layer writes the T new keys and values to its
slots first, then attends group by group: one group of all rows that feed one token, others by chunk length.

Invariants:
- A token sees exactly the first `kv_length` slots of its row, less those of later tokens of its own chunk. Visibility
  (SPEC section 2) is therefore a property of the tables, and no mask over branches is needed.
- Nothing is known here of trajectories.

Shapes: R rows of a group, Q queries a row (padded), L slots a row (padded), H query heads, K key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from npr_common.errors import FailedPreconditionError
from npr_rollout.engine.kv_pool import KvPool

PAGED_ATTENTION = "npr_paged"


class UnsupportedModelError(FailedPreconditionError):
    """The model's attention needs something that the engine does not do; the message says what."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows that are attended together.

    Attributes:
        queries: int64 [R, Q], indices into the T tokens; padding repeats an index.
        slots: int64 [R, L], slots to read; padding is masked.
        mask: float [R, 1, Q, L], 0 or -inf; None when the rows are whole prompts of one length, plainly causal.
        flat: int64 [N], which of the R * Q queries are real, and
        targets: int64 [N], which tokens they are.
    """

    queries: Tensor
    slots: Tensor
    mask: Tensor | None
    flat: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """What attention needs to know of one forward pass.

    Attributes:
        singles: rows that feed one token, Q = 1; they are the first R of the T tokens.
        write_slots: int64 [T], where the new keys and values go.
    """

    pool: KvPool
    write_slots: Tensor
    singles: tuple[AttentionGroup, ...]
    others: tuple[AttentionGroup, ...]


def paged_attention(  # noqa: PLR0917 - transformers calls it so
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    npr_batch: PagedBatch,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function: query [1, H, T, D], key and value [1, K, T, D]; the result is [1, T, H, D]."""
    pool = npr_batch.pool.layers[_layer_index(module)]
    new = torch.cat([key[0].transpose(0, 1).flatten(1), value[0].transpose(0, 1).flatten(1)], dim=1)
    pool.index_copy_(0, npr_batch.write_slots, new)
    query_thd = query[0].transpose(0, 1)
    out = torch.empty_like(query_thd, memory_format=torch.contiguous_format)
    kv_heads = key.shape[1]
    for group in npr_batch.singles:
        out[group.targets] = _attend_single(query_thd, pool, group, kv_heads, scaling)
    for group in npr_batch.others:
        out[group.targets] = _attend_chunks(query_thd, pool, group, kv_heads, scaling)
    return out.unsqueeze(0), None


def _attend_single(query: Tensor, pool: Tensor, group: AttentionGroup, kv_heads: int, scaling: float | None) -> Tensor:
    """One query a row; the query heads that share a key head stand in the place of the queries."""
    keys, values = _gather(pool, group.slots, kv_heads, query.shape[-1])
    rows, heads, size = len(group.targets), query.shape[1], query.shape[2]
    grouped = query[group.targets].view(rows, kv_heads, heads // kv_heads, size)
    assert group.mask is not None
    mask = group.mask.expand(-1, -1, heads // kv_heads, -1)
    return functional.scaled_dot_product_attention(grouped, keys, values, mask, scale=scaling).reshape(
        rows, heads, size
    )


def _attend_chunks(query: Tensor, pool: Tensor, group: AttentionGroup, kv_heads: int, scaling: float | None) -> Tensor:
    keys, values = _gather(pool, group.slots, kv_heads, query.shape[-1])
    causal, gqa = group.mask is None, query.shape[1] != kv_heads
    out = functional.scaled_dot_product_attention(
        query[group.queries].transpose(1, 2),
        keys,
        values,
        group.mask,
        is_causal=causal,
        scale=scaling,
        enable_gqa=gqa,
    )
    return out.transpose(1, 2).flatten(0, 1)[group.flat]


def _gather(pool: Tensor, slots: Tensor, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values [R, K, L, D] of the slots. Of torch's gathers of rows this is the fastest on a CPU."""
    rows, length = slots.shape
    both = pool.index_select(0, slots.view(-1)).view(rows, length, 2, kv_heads, head_dim)
    return both[:, :, 0].transpose(1, 2), both[:, :, 1].transpose(1, 2)


def _layer_index(module: nn.Module) -> int:
    index = module.layer_idx
    assert isinstance(index, int)
    return index


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The tables are the mask."""


def check_supported(config: Any) -> None:
    """Refuse models whose attention is not plain causal softmax attention over all earlier tokens.

    Raises:
        UnsupportedModelError: it has sliding windows, soft-capped logits or the like.
    """
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UnsupportedModelError(f"The engine serves full attention only; this model has {sorted(kinds)}.")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise UnsupportedModelError("The engine does not serve models with soft-capped attention logits.")


AttentionInterface.register(PAGED_ATTENTION, paged_attention)
AttentionMaskInterface.register(PAGED_ATTENTION, _no_mask)
