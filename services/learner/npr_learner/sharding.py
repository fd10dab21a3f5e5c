"""A policy's weights split over the processes of a world, by FSDP2.

Invariants:
- Each layer is gathered when it is computed and let go of after; the rest (embedding, last norm, head) is gathered for
  a whole pass.
- Gradients are summed over the processes, not averaged: losses are divided by the count of all tokens already.
- Master weights are float32; a layer is gathered, and computed, in the stage's precision.
- A process alone has plain tensors, and nothing here changes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from npr_learner.forward import TokenScorer
from npr_learner.options import StageOptions
from npr_learner.world import World


def shard(scorer: TokenScorer, world: World, options: StageOptions) -> None:
    """Splits the scorer's weights over the world, in place; each process holds all of them before."""
    if world.mesh is None:
        return
    precision = MixedPrecisionPolicy(param_dtype=options.dtype.torch_dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy()
    for module in (*_layers(scorer.model), scorer):
        fully_shard(module, mesh=world.mesh, mp_policy=precision, offload_policy=offload)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum


def _layers(model: Any) -> list[torch.nn.Module]:
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def wholes(tensors: Iterable[tuple[str, torch.Tensor]], world: World) -> dict[str, torch.Tensor]:
    """The whole tensors by name, on the first process; nothing on the others, who must call it too.

    Of a process alone, they are the tensors themselves; gathered ones lie on the CPU.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        whole = tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor
        if world.is_first:
            found[name] = whole
    return found


def item(scalar: torch.Tensor) -> float:
    """The number in a scalar that may be split over the world."""
    return (scalar.full_tensor() if isinstance(scalar, DTensor) else scalar).item()
