"""How a model of `transformers` comes to attend over a forest: an attention function, registered by name.

Invariant: models are made with `TREE_ATTENTION`. Without the keyword `npr_attend` they attend causally, as any model.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Protocol

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from npr_learner.attention.dense import DenseAttention
from npr_learner.attention.flex import FlexAttention, bucket
from npr_learner.attention.forest import Fork
from npr_learner.attention.lean import LeanAttention

TREE_ATTENTION = "npr_tree"
"""Name of the attention function, for `attn_implementation`."""


class Attend(Protocol):
    """Attention over one packed row of S tokens, made once and called by every layer."""

    def __call__(
        self, query_1HSD: torch.Tensor, key_1KSD: torch.Tensor, value_1KSD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """What each token attends to, [1, S, H, D]; K key heads are shared by H query heads, K divides H."""
        ...


class AttentionKind(StrEnum):
    """A way to compute attention over a forest; all give the same numbers."""

    LEAN = "lean"
    """By pieces, for CPUs."""
    FLEX = "flex"
    """By FlexAttention, for GPUs; on a CPU it has no backward pass."""
    DENSE = "dense"
    """Under a dense mask: the oracle."""

    @classmethod
    def of(cls, device: torch.device) -> AttentionKind:
        """The fastest for a device."""
        return cls.LEAN if device.type == "cpu" else cls.FLEX

    def row_length(self, length: int) -> int:
        """To how many tokens a row is to be padded."""
        return bucket(length) if self is AttentionKind.FLEX else length

    def prepare(self, forest: Fork, length: int, device: torch.device) -> Attend:
        """The attention of a forest in a row of `row_length` tokens."""
        match self:
            case AttentionKind.LEAN:
                return LeanAttention.of(forest)
            case AttentionKind.FLEX:
                return FlexAttention.of(forest, length, device)
            case AttentionKind.DENSE:
                return DenseAttention.of(forest, length, device)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    npr_attend: Attend | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    if npr_attend is not None:
        return npr_attend(query, key, value, scaling), None
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    return output, None


ALL_ATTENTION_FUNCTIONS.register(TREE_ATTENTION, _attend)
