"""How a model computes: by `transformers`' own modules, or by kernels that fuse them.

Invariant: a decoder knows tokens, positions and an attention function; nothing of rows, spans or trajectories.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from npr_rollout.engine.attention.cascade_cpu import CascadeAttention
from npr_rollout.engine.attention.interface import PAGED_ATTENTION, Attend, AttentionBackend
from npr_rollout.engine.cpu.decoder import FusedDecoder, can_fuse
from npr_rollout.engine.cpu.packed_linear import pack_weights


class Decoder(Protocol):
    """A forward pass."""

    def logits(self, ids: Tensor, positions: Tensor, rows: Tensor, attend: Any) -> Tensor:
        """Logits [N, V] after the tokens `rows` [N] of a pass of T tokens: ids and positions int64 [T].

        `attend` is what the attention backend that the decoder was made for has prepared.
        """
        ...


def make_decoder(model: Any, attention: AttentionBackend) -> Decoder:
    """The fastest decoder for a model. The model's modules are changed, or taken apart: it is the engine's now."""
    if isinstance(attention, CascadeAttention) and can_fuse(model):
        return FusedDecoder(model)
    return TransformersDecoder(model)


class TransformersDecoder:
    """Any causal model of `transformers`, on any device, with its attention function replaced."""

    def __init__(self, model: Any) -> None:
        model.set_attn_implementation(PAGED_ATTENTION)
        pack_weights(model)
        self._model = model.eval()

    def logits(self, ids: Tensor, positions: Tensor, rows: Tensor, attend: Attend) -> Tensor:
        """See `Decoder`."""
        output = self._model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows, npr_attend=attend
        )
        logits: Tensor = output.logits[0]
        return logits
