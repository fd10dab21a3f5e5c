"""One gradient over any number of micro-batches.

Invariants:
- The accumulated gradient is that of the whole batch, since every objective divides by a normaliser that was fixed
  before the first micro-batch.
- Rows whose advantage is 0 have a gradient of exactly 0: they are measured, but not differentiated.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from npr_learner.batch import Batch, collate
from npr_learner.forward import token_log_probs
from npr_learner.objectives import LossTerms
from npr_learner.options import StageOptions
from npr_learner.packing import Family, families_of, micro_batches
from npr_learner.row import Row

LossFunction = Callable[[torch.Tensor, Batch], LossTerms]
"""From the current log-probabilities and the micro-batch to its share of the loss."""

Observer = Callable[[int, int, Mapping[str, float]], None]
"""Told (done, total, newest metrics) after each piece of work; it may raise to stop the work."""


@dataclass(frozen=True)
class GradientSummary:
    """What was measured while the gradient was accumulated.

    Attributes:
        loss: of the whole batch.
        tokens: trained tokens.
        computed_tokens: tokens that went through the model: padding counts, and a shared prompt once.
        log_prob_drift_max: largest |learner - engine| in log-probability over trained tokens.
        sums: sums over trained tokens by name: `entropy` in nats, and the objective's own.
    """

    loss: float
    tokens: int
    computed_tokens: int
    log_prob_drift_max: float
    sums: Mapping[str, float]

    def mean(self, name: str) -> float:
        """A sum per trained token."""
        return self.sums[name] / max(1, self.tokens)


def trained_tokens(rows: Sequence[Row]) -> int:
    """Tokens that carry loss."""
    return sum(len(row.trained) for row in rows)


def accumulate_gradient(
    model: Any, rows: Sequence[Row], loss_of: LossFunction, options: StageOptions, observe: Observer
) -> GradientSummary:
    """Adds the gradient of the rows' loss to the model's parameters, micro-batch by micro-batch."""
    device = model.get_output_embeddings().weight.device
    batches = _by_gradient(rows, options)
    loss, computed, drift, sums = 0.0, 0, 0.0, Counter[str]()
    for done, (micro_batch, has_gradient) in enumerate(batches, start=1):
        batch = collate(micro_batch, device)
        with torch.set_grad_enabled(has_gradient):
            log_probs_N, entropy_N = token_log_probs(model, batch, options.dtype)
            terms = loss_of(log_probs_N, batch)
        if has_gradient:
            terms.loss.backward()  # type: ignore[no-untyped-call]
        loss += terms.loss.item()
        computed += batch.token_ids_1S.numel()
        drift = max(drift, (log_probs_N.detach() - batch.behavior_log_probs_N).abs().max().item())
        sums.update({"entropy": entropy_N.sum().item(), **{name: item.item() for name, item in terms.sums.items()}})
        observe(done, len(batches), {"loss": loss})
    return GradientSummary(loss, trained_tokens(rows), computed, drift, sums)


def _by_gradient(rows: Sequence[Row], options: StageOptions) -> list[tuple[list[Family], bool]]:
    """Micro-batches of the rows that have trained tokens, and whether they have a gradient."""
    trained = [row for row in rows if len(row.trained)]
    found: list[tuple[list[Family], bool]] = []
    for has_gradient in (True, False):
        chosen = [row for row in trained if bool(row.advantage) == has_gradient]
        families = families_of(chosen, share_prompts=options.share_prompts)
        found += [(batch, has_gradient) for batch in micro_batches(families, options.micro_batch_tokens)]
    return found
