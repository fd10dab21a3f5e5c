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

import numpy as np
import torch
from torch import Tensor, nn

from npr_rollout.engine.attention.cascade_cpu import CascadePass
from npr_rollout.engine.cpu.compiled import Array, array
from npr_rollout.engine.cpu.kernels import add_and_normalise, gate, normalise, split_heads
from npr_rollout.engine.cpu.packed_linear import PackedLinear, pack_weights
from npr_rollout.engine.cpu.row_counts import Product, RowCounts

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
        self._row_counts: RowCounts = model.model.layers[0].self_attn.qkv_proj.row_counts
        self._layers = [
            _Layer(index, layer, model.config, self._row_counts) for index, layer in enumerate(model.model.layers)
        ]
        self._norm = _Norm(model.model.norm)
        self._head = model.get_output_embeddings()
        self._rope = _RopeTable(model.model.rotary_emb)
        self._buffers: dict[int, _Buffers] = {}

    def logits(self, ids: Tensor, positions: Tensor, rows: Tensor, attend: CascadePass) -> Tensor:
        """Logits float32 [N, V] after the tokens `rows` [N] of a pass: ids and positions int64 [T]."""
        padding = self._row_counts.padded(len(ids)) - len(ids)
        if padding:
            ids, positions = (torch.cat([tensor, tensor.new_zeros(padding)]) for tensor in (ids, positions))
        x = self._embedding(ids)
        buffers = self._buffers_for(x)
        rope = (array(positions), *self._rope.up_to(int(positions.max()) + 1))
        stream, delta = array(x), None
        for layer in self._layers:
            delta = layer.forward(stream, delta, rope, buffers, attend)
        assert delta is not None
        last, last_delta = x[rows], delta[rows]
        out = torch.empty_like(last)
        self._norm.apply(array(last), last_delta, array(out))
        return self._head(out)  # type: ignore[no-any-return]

    def _buffers_for(self, x: Tensor) -> _Buffers:
        """Those of the pass before, if it had as many tokens."""
        if len(x) not in self._buffers:
            self._buffers = {len(x): _Buffers(x, self._layers[0])}
        return self._buffers[len(x)]


class _Layer:
    """One layer. What it adds to the residual stream is handed on, and added where the next norm reads the stream."""

    def __init__(self, index: int, layer: Any, config: Any, row_counts: RowCounts) -> None:
        attention = layer.self_attn
        self._index = index
        self._qkv, self._out, self._gate_up, self._down = (
            _product(linear, row_counts)
            for linear in (attention.qkv_proj, attention.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
        )
        self._input_norm, self._post_norm = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._scale = np.float32(attention.scaling)
        self._head_norms = _head_norms(attention)
        self.head_dim, self.inner = int(attention.head_dim), int(layer.mlp.down_proj.in_features)
        self.heads, self.kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)

    def forward(
        self, x: Array, delta: Tensor | None, rope: tuple[Array, ...], buffers: _Buffers, attend: CascadePass
    ) -> Tensor:
        """What the layer adds to x [T, C]; what the one before adds is added to x first, which changes it."""
        self._input_norm.apply(x, delta, buffers.normed_array)
        projected = array(self._qkv(buffers.normed)).reshape(len(x), -1, self.head_dim)
        new = buffers.query, buffers.key, buffers.value
        split_heads(projected, *rope, *self._head_norms, *new, threads=_threads(projected))
        attend.arrays(self._index, *new, self._scale, buffers.attended_array)
        self._post_norm.apply(x, self._out(buffers.attended), buffers.normed_array)
        projected = array(self._gate_up(buffers.normed))
        gate(projected, buffers.gated_array, threads=_threads(projected))
        return self._down(buffers.gated)


class _Buffers:
    """What layers write between their products, as tensors and as arrays of the same memory; one set for all layers."""

    def __init__(self, x: Tensor, layer: _Layer) -> None:
        """For a residual stream x [T, C]. What padding holds is never read by others, but it is a number."""
        tokens = len(x)
        self.normed = torch.empty_like(x)
        self.attended = x.new_zeros(tokens, layer.heads * layer.head_dim)
        self.gated = x.new_empty(tokens, layer.inner)
        self.normed_array, self.gated_array = array(self.normed), array(self.gated)
        self.attended_array = array(self.attended).reshape(tokens, layer.heads, layer.head_dim)
        self.query = np.empty_like(self.attended_array)
        self.key, self.value = (np.empty((tokens, layer.kv_heads, layer.head_dim), np.float32) for _ in range(2))


class _Norm:
    """An RMSNorm."""

    def __init__(self, module: Any) -> None:
        self._weight = array(module.weight.detach())
        self._eps = np.float32(module.variance_epsilon)

    def apply(self, x: Array, delta: Tensor | None, out: Array) -> None:
        """Add `delta` to x [T, C], which changes x, and normalise."""
        if delta is None:
            normalise(x, self._weight, self._eps, out, threads=_threads(x))
        else:
            add_and_normalise(x, array(delta), self._weight, self._eps, out, threads=_threads(x))


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
        none = np.empty(0, np.float32)
        return none, none, np.float32(0)
    return array(query.weight.detach()), array(key.weight.detach()), np.float32(query.variance_epsilon)


def _product(linear: PackedLinear, row_counts: RowCounts) -> Product:
    """The layer for a pass that is padded to one of these numbers of rows; a long one is cut into parts.

    A layer of another kernel, such as one whose weights half precision can't hold, pads by itself.
    """
    if linear.row_counts is not row_counts:
        return linear.forward
    product = linear.product
    return lambda x: product(x) if x.shape[0] <= row_counts.limit else row_counts.multiply(product, x)


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


def _threads(values: Array) -> int:
    return torch.get_num_threads() if values.size >= _MIN_ELEMENTS else 1
