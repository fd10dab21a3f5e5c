"""A model's weights, packed once for the CPU's kernels.

- float32 weights go to oneDNN. torch's own `linear` packs a float32 weight anew in every call with more than one row,
  so eight rows cost almost three times as much as one.
- Weights in half precision (bfloat16, float16) go to FBGEMM, which keeps them as float16 and multiplies in float32:
  half the bytes of a float32 weight to read, on processors that have no arithmetic in half precision too. Everything
  between the linear layers is float32. A bfloat16 number has fewer bits than a float16 one, so the conversion is
  exact, except for what lies below 2**-14, which is rounded to multiples of 2**-24.

Invariants:
- Batch invariance: a row's result has the same bits whatever the number of rows; torch's `linear` doesn't give that.
- A packed weight replaces the original, which is freed unless something else holds it (a tied embedding).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from npr_rollout.engine.cpu.row_counts import Product, RowCounts

_HALF = (torch.bfloat16, torch.float16)
_HALF_MAX = torch.finfo(torch.float16).max
_PROBE = 96, 64  # out, in; of the weight that kernels are tried with
_ROWS = 8  # the number of rows that oneDNN chooses its layout for; any other number works too


def pack_weights(model: Any) -> int:
    """Replace the plain linear layers of a model on a CPU by packed ones, in place; how many were.

    A model in half precision computes in float32 from then on. A model on another device stays as it is.
    """
    if model.get_input_embeddings().weight.device.type != "cpu":
        return 0
    plain = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is nn.Linear
    ]
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # FBGEMM packs with one thread, 16 ns a number
        packed = threads.map(PackedLinear, (linear for _, _, linear in plain))
        for (module, name, _), linear in zip(plain, packed, strict=True):
            setattr(module, name, linear)
    _compute_in_float32(model)
    return len(plain)


class PackedLinear(nn.Module):
    """A linear layer for inference: float32 [..., in] -> float32 [..., out].

    Attributes:
        product: float32 [N, in] -> float32 [N, out], for numbers of rows that the kernel treats alike.
        row_counts: which numbers these are; `forward` pads others to one of them.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        bias = None if linear.bias is None else linear.bias.detach().float()
        if weight.dtype in _HALF and _fits_half(weight):
            self.product, self.row_counts = _half_product(weight, bias), _half_rows()
        else:
            self.product, self.row_counts = _float_product(weight.float(), bias), _float_rows()

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        rows = self.row_counts.multiply(self.product, x.reshape(-1, self.in_features))
        return rows.view(*x.shape[:-1], self.out_features)


class HalfEmbedding(nn.Module):
    """An embedding whose table stays in half precision: ids [...] -> float32 [..., size]."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Look up."""
        return nn.functional.embedding(ids, self.weight).float()


def _compute_in_float32(model: Any) -> None:
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding) and embedding.weight.dtype in _HALF:
        embedding = HalfEmbedding(embedding)
        model.set_input_embeddings(embedding)
    for parameter in model.parameters():
        if parameter is not embedding.weight and parameter.dtype in _HALF:
            parameter.data = parameter.data.float()


def _fits_half(weight: Tensor) -> bool:
    """Whether FBGEMM is there and float16 can hold the weight."""
    return (
        "fbgemm" in torch.backends.quantized.supported_engines
        and hasattr(torch.ops.quantized, "linear_prepack_fp16")
        and float(weight.abs().max()) <= _HALF_MAX
    )


def _half_product(weight: Tensor, bias: Tensor | None) -> Product:
    packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)
    multiply = torch.ops.quantized.linear_dynamic_fp16
    return lambda rows: multiply(rows, packed)


def _float_product(weight: Tensor, bias: Tensor | None) -> Product:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):  # type: ignore[no-untyped-call]
        return lambda rows: nn.functional.linear(rows, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda rows: multiply(rows, packed, bias, "none", [], "")


@cache
def _half_rows() -> RowCounts:
    return RowCounts(_half_product(_probe(), None), _PROBE[1], limit=120)


@cache
def _float_rows() -> RowCounts:
    return RowCounts(_float_product(_probe(), None), _PROBE[1], limit=256)


def _probe() -> Tensor:
    return torch.randn(_PROBE, generator=torch.Generator().manual_seed(1))
