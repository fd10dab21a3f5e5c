"""Linear layers whose weights are packed once for oneDNN.

torch's own `linear` packs a float32 weight anew in every call with more than one row, so eight rows cost almost three
times as much as one. Packed once, they cost little more than one: the weights are read from memory once a step.

Invariants:
- Batch invariance: a row's result has the same bits whatever the number of rows (tests assert it on this machine's
  kernels), which torch's `linear` doesn't give.
- The packed weight replaces the original, which is freed unless something else holds it (a tied embedding).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_ROWS = 8  # the number of rows that oneDNN chooses the layout for; any other number works too


class PackedLinear(nn.Module):
    """A float32 linear layer on the CPU, for inference: [..., in] -> [..., out]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to float32 [..., in]."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out


def can_pack(weight: Tensor) -> bool:
    """Whether weights like this one can be packed on this machine."""
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def pack_linears(model: Any) -> int:
    """Replace every plain linear layer of a model by a packed one, in place; how many were."""
    packed = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and can_pack(child.weight):
                setattr(module, name, PackedLinear(child))
                packed += 1
    return packed
