"""The forward pass of the Llama family on a CPU, made of packed weights and fused kernels.

`transformers`' modules spend more time between the matrix products than in them when a model or a batch is small: each
norm and rotation is half a dozen operations. Here a layer is four products, four kernels and the attention.

Invariants:
- The weights are the model's own, moved: afterwards `transformers`' forward pass of that model object doesn't work any
  more. Fusing a model a second time changes nothing.
- It computes what `transformers` does, in float32 (tests compare them).
- Batch invariance: a token's logits have the same bits, whatever else is in the pass.

Shapes: T tokens, padded to a number that the matrix kernels treat alike; C channels; N rows of logits; V words.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from npr_rollout.engine.attention.interface import Attend
from npr_rollout.engine.cpu.compiled import Array, array
from npr_rollout.engine.cpu.kernels import add_and_normalise, gate, normalise, split_heads
from npr_rollout.engine.cpu.packed_linear import PackedLinear, pack_weights

_FAMILIES = ("llama", "qwen2", "qwen3")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # others change with the length of the text
_MIN_ELEMENTS = 1 << 15  # of a tensor, for a kernel to be worth a second thread


def can_fuse(model: Any) -> bool:
    """Whether this is a model that the decoder computes."""
    config = model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return (
        config.model_type in _FAMILIES
        and config.hidden_act == "silu"
        and rope in _STATIC_ROPE
        and model.get_input_embeddings().weight.device.type == "cpu"
    )


class FusedDecoder:
    """Decodes with one model; see the module's docstring."""

    def __init__(self, model: Any) -> None:
        for layer in model.model.layers:
            _fuse(layer.self_attn, "qkv_proj", ("q_proj", "k_proj", "v_proj"))
            _fuse(layer.mlp, "gate_up_proj", ("gate_proj", "up_proj"))
        pack_weights(model)
        self._embedding = model.get_input_embeddings()
        self._layers = [_Layer(layer, model.config) for layer in model.model.layers]
        self._norm = _Norm(model.model.norm)
        self._head = model.get_output_embeddings()
        self._rope = _RopeTable(model.model.rotary_emb)

    def logits(self, ids: Tensor, positions: Tensor, rows: Tensor, attend: Attend) -> Tensor:
        """Logits float32 [N, V] after the tokens `rows` [N] of a pass: ids and positions int64 [T]."""
        tokens = len(ids)
        padding = self._layers[0].qkv.row_counts.padded(tokens) - tokens
        if padding:
            ids, positions = (torch.cat([tensor, tensor.new_zeros(padding)]) for tensor in (ids, positions))
        x = self._embedding(ids)
        rope = (array(positions), *self._rope.up_to(int(positions.max()) + 1))
        delta = None
        for index, layer in enumerate(self._layers):
            delta = layer.forward(index, x, delta, rope, attend)
        assert delta is not None
        return self._head(self._norm.apply(x[rows], delta[rows]))  # type: ignore[no-any-return]


class _Layer:
    """One layer. What it adds to the residual stream is handed on, and added where the next norm reads the stream."""

    def __init__(self, layer: Any, config: Any) -> None:
        attention = layer.self_attn
        self.qkv: PackedLinear = attention.qkv_proj
        self._out: PackedLinear = attention.o_proj
        self._gate_up: PackedLinear = layer.mlp.gate_up_proj
        self._down: PackedLinear = layer.mlp.down_proj
        self._input_norm, self._post_norm = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._head_dim, self._scale = int(attention.head_dim), float(attention.scaling)
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._head_norms = _head_norms(attention)

    def forward(self, index: int, x: Tensor, delta: Tensor | None, rope: tuple[Array, ...], attend: Attend) -> Tensor:
        """What the layer adds to x [T, C]; what the one before adds is added to x first."""
        attended = self._attend(index, self._input_norm.apply(x, delta), rope, attend)
        projected = self._gate_up(self._post_norm.apply(x, self._out(attended)))
        gated = projected.new_empty(len(x), self._down.in_features)
        gate(array(projected), array(gated), threads=_threads(gated))
        return self._down(gated)  # type: ignore[no-any-return]

    def _attend(self, index: int, x: Tensor, rope: tuple[Array, ...], attend: Attend) -> Tensor:
        projected = self.qkv(x).view(len(x), -1, self._head_dim)
        query, key, value = (
            projected.new_empty(len(x), heads, self._head_dim)
            for heads in (self._heads, self._kv_heads, self._kv_heads)
        )
        results = (array(query), array(key), array(value))
        split_heads(array(projected), *rope, *self._head_norms, *results, threads=_threads(projected))
        return attend(index, query, key, value, self._scale).view(len(x), -1)


class _Norm:
    """An RMSNorm."""

    def __init__(self, module: Any) -> None:
        self._weight = array(module.weight.detach())
        self._eps = array(torch.tensor([module.variance_epsilon]))[0]

    def apply(self, x: Tensor, delta: Tensor | None) -> Tensor:
        """Add `delta` to x [T, C], which changes x, and normalise."""
        out = torch.empty_like(x)
        if delta is None:
            normalise(array(x), self._weight, self._eps, array(out), threads=_threads(x))
        else:
            add_and_normalise(array(x), array(delta), self._weight, self._eps, array(out), threads=_threads(x))
        return out


class _RopeTable:
    """Cosines and sines of all positions so far; it grows with them."""

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        self._tables: tuple[Array, ...] = ()
        self._length = 0

    def up_to(self, length: int) -> tuple[Array, ...]:
        """Cosines and sines, float32 [`length` or more, D / 2]: the other half of a head's is the same."""
        if length > self._length:
            self._length = max(length, 2 * self._length)
            tables = self._rotary(torch.empty(0), torch.arange(self._length)[None])
            self._tables = tuple(array(table[0, :, : table.shape[-1] // 2]) for table in tables)
        return self._tables


def _head_norms(attention: Any) -> tuple[Array, Array, Any]:
    """Weights of the norms of queries and keys, empty where a model has none, and epsilon."""
    query, key = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    if query is None or key is None:
        none = array(torch.empty(0))
        return none, none, array(torch.zeros(1))[0]
    return array(query.weight.detach()), array(key.weight.detach()), array(torch.tensor([query.variance_epsilon]))[0]


def _fuse(parent: nn.Module, name: str, parts: tuple[str, ...]) -> None:
    """Replace several linear layers of the same input by one; nothing is done where that was done before."""
    if hasattr(parent, name):
        return
    linears = [getattr(parent, part) for part in parts]
    fused = nn.Linear(linears[0].in_features, sum(linear.out_features for linear in linears), device="meta")
    fused.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False)
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    fused.register_parameter("bias", nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None)
    for part in parts:
        delattr(parent, part)
    setattr(parent, name, fused)


def _threads(tensor: Tensor) -> int:
    return torch.get_num_threads() if tensor.numel() >= _MIN_ELEMENTS else 1
