"""What all objectives share.

Invariants:
- An objective sees *sampled* tokens only, flat over the rows of a micro-batch (axis N): prompt, padding and forced
  tokens were left out before, so there is no mask to get wrong.
- A loss is a sum over N divided by a normaliser that is fixed before the first micro-batch. So losses and gradients of
  micro-batches add up to those of the whole batch, however it is cut.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class LossTerms:
    """One micro-batch's share of the loss.

    Attributes:
        loss: scalar to call `backward` on.
        sums: detached scalars by metric name, to be summed over micro-batches and divided by the token count.
    """

    loss: torch.Tensor
    sums: Mapping[str, torch.Tensor] = field(default_factory=dict)
