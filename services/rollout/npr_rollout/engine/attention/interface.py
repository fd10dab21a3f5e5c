"""The hook behind `transformers`' own attention interface: no model code is copied.

A forward pass has T tokens of many rows, flattened to [1, T]. Every layer calls `paged_attention`, which hands the
layer's tensors to the function that a backend has prepared for the pass.

Invariant: nothing is known here of trajectories.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from npr_common.errors import FailedPreconditionError
from npr_rollout.engine.attention.cascade_cpu import CascadeAttention
from npr_rollout.engine.attention.flash_infer import FlashInferAttention, flash_infer_installed
from npr_rollout.engine.attention.plan import AttentionPlan
from npr_rollout.engine.attention.sdpa import SdpaAttention
from npr_rollout.engine.config import AttentionKind, KvDtype
from npr_rollout.engine.kv_pool import KvPool

PAGED_ATTENTION = "npr_paged"


class UnsupportedModelError(FailedPreconditionError):
    """The model's attention needs something that the engine does not do; the message says what."""


class Attend(Protocol):
    """The attention of one forward pass."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, /) -> Tensor:
        """Write key and value [T, K, D] to the pool, then attend from query [T, H, D]; the result is [T, H, D]."""
        ...


class AttentionBackend(Protocol):
    """Attends over the pages of one pool."""

    def prepare(self, plan: AttentionPlan) -> Attend:
        """The function of one forward pass, used by all its layers."""
        ...


def make_backend(kind: AttentionKind, pool: KvPool) -> AttentionBackend:
    """The backend for a pool; AUTO takes the fastest that runs on its device.

    Raises:
        FailedPreconditionError: the one that is asked for does not run there.
    """
    device = pool.shape.device.type
    if kind is AttentionKind.AUTO:
        if device == "cpu":
            kind = AttentionKind.CASCADE
        else:
            kind = AttentionKind.FLASHINFER if device == "cuda" and flash_infer_installed() else AttentionKind.SDPA
    if kind is AttentionKind.CASCADE and device == "cpu":
        return CascadeAttention(pool)
    if kind is AttentionKind.FLASHINFER and device == "cuda":
        return FlashInferAttention(pool)
    if kind is AttentionKind.SDPA:
        return SdpaAttention(pool)
    raise FailedPreconditionError(f"The attention backend {kind.value} does not run on {device}; choose auto or sdpa.")


def pool_dtype(kind: KvDtype, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What a pool holds, for a model of this type; AUTO is float32 on a CPU, whose arithmetic it is."""
    if kind is not KvDtype.AUTO:
        asked: torch.dtype = getattr(torch, kind.value)
        return asked
    return torch.float32 if device.type == "cpu" else dtype


def paged_attention(  # noqa: PLR0917 - transformers calls it so
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    npr_attend: Attend,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function: query [1, H, T, D], key and value [1, K, T, D]; the result is [1, T, H, D]."""
    layer = module.layer_idx
    assert isinstance(layer, int)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return npr_attend(layer, query, key, value, scale)[None], None


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
