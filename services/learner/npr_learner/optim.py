"""AdamW, its learning-rate schedule, and the clipped update.

Invariants:
- The learning rate is a pure function of the step: there is no scheduler whose state could be lost.
- A gradient that is not finite changes nothing.
"""

import math
from collections.abc import Iterable

import torch

from npr_common.errors import FailedPreconditionError
from npr_learner.options import Schedule, StageOptions
from npr_learner.sharding import item


def make_optimizer(model: torch.nn.Module, options: StageOptions) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay on matrices, none on norms and biases."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=options.learning_rate, betas=options.betas, eps=options.optimizer_epsilon, fused=True
    )


def learning_rate_at(step: int, options: StageOptions, total_steps: int | None) -> float:
    """The learning rate of a step, counted from 0.

    Linear warm-up to the full rate, which its last step reaches; then constant, or half a cosine down to 0 at
    `total_steps` (and 0 beyond).
    """
    warmup = options.warmup_steps
    if options.warmup_fraction is not None and total_steps is not None:
        warmup = math.ceil(options.warmup_fraction * total_steps)
    if step < warmup:
        return options.learning_rate * (step + 1) / warmup
    if options.schedule is Schedule.CONSTANT or total_steps is None:
        return options.learning_rate
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return options.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def apply_update(
    parameters: Iterable[torch.nn.Parameter], optimizer: torch.optim.AdamW, learning_rate: float, max_grad_norm: float
) -> float:
    """Clips the accumulated gradient to `max_grad_norm`, takes one step and clears the gradient.

    Returns:
        The gradient's norm before clipping.

    Raises:
        FailedPreconditionError: the gradient is not finite.
    """
    norm = item(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm))
    if not math.isfinite(norm):
        optimizer.zero_grad()
        raise FailedPreconditionError(
            "the gradient is not finite: lower the stage's learning_rate or use dtype float32",
            reason="GRADIENT_NOT_FINITE",
        )
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()
    return norm
