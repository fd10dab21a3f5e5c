"""One gradient over any number of micro-batches.

Invariants:
- The accumulated gradient is that of the whole batch, since every objective divides by a normaliser that was fixed
  before the first micro-batch.
- Rows whose advantage is 0 have a gradient of exactly 0: they are measured, but not differentiated.
- Processes take turns together: each computes one micro-batch a turn, since a layer is gathered from all of them.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from npr_common.topology import Topology
from npr_learner.batch import Batch, collate
from npr_learner.forward import TokenScorer
from npr_learner.objectives import LossTerms
from npr_learner.options import StageOptions
from npr_learner.packing import Family, families_of, micro_batches
from npr_learner.row import Row
from npr_learner.world import World

LossFunction = Callable[[torch.Tensor, Batch], LossTerms]
"""From the current log-probabilities and the micro-batch to its share of the loss."""

Observer = Callable[[int, int, Mapping[str, float]], None]
"""Told (done, total, newest metrics) after each piece of work; it may raise to stop the work."""


DRIFT_BOUNDS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Of the histogram, in nats."""


@dataclass(frozen=True)
class Drift:
    """|learner - engine| in the log-probability of trained tokens, in nats.

    Attributes:
        within: for each of `DRIFT_BOUNDS`, the share of the tokens that differ by no more.
    """

    largest: float
    mean: float
    within: tuple[float, ...]

    def metrics(self) -> dict[str, float]:
        """By name."""
        shares = {
            f"log_prob_drift_within_{bound:g}": share for bound, share in zip(DRIFT_BOUNDS, self.within, strict=True)
        }
        return {"log_prob_drift_max": self.largest, "log_prob_drift_mean": self.mean, **shares}


@dataclass(frozen=True)
class GradientSummary:
    """What was measured while the gradient was accumulated.

    Attributes:
        loss: of the whole batch.
        tokens: trained tokens.
        computed_tokens: tokens that went through the model: padding counts, and a shared prompt once.
        drift: how far the learner's log-probabilities of trained tokens are from the engine's.
        sums: sums over trained tokens by name: `entropy` in nats, and the objective's own.
    """

    loss: float
    tokens: int
    computed_tokens: int
    drift: Drift
    sums: Mapping[str, float]

    def mean(self, name: str) -> float:
        """A sum per trained token."""
        return self.sums[name] / max(1, self.tokens)


def trained_tokens(rows: Sequence[Row]) -> int:
    """Tokens that carry loss."""
    return sum(len(row.trained) for row in rows)


@dataclass(frozen=True)
class Turn:
    """What one process computes at a time at which every one computes something.

    Attributes:
        families: None where it has nothing left; it then goes through the model for the others' sake.
    """

    families: list[Family] | None
    has_gradient: bool


def accumulate_gradient(
    scorer: TokenScorer,
    rows: Sequence[Row],
    loss_of: LossFunction,
    options: StageOptions,
    *,
    observe: Observer,
    world: World,
) -> GradientSummary:
    """Adds the gradient of the rows' loss to the scorer's parameters, micro-batch by micro-batch.

    Every process of the world is given the same rows, computes its share of them, and returns the same summary.
    """
    measures = _Measures()
    own_turns = turns(rows, options, world)
    for done, turn in enumerate(own_turns, start=1):
        batch = collate(turn.families or [_stand_in(rows)], world.device)
        with torch.set_grad_enabled(turn.has_gradient):
            log_probs_N, entropy_N = scorer(batch)
            terms = loss_of(log_probs_N, batch)
        weight = 1.0 if turn.families else 0.0
        if turn.has_gradient:
            (terms.loss * weight).backward()  # type: ignore[no-untyped-call]
        measures.add(terms, log_probs_N, entropy_N, batch, weight)
        so_far = world.sum({"loss": measures.loss}, f"micro-batch {done} of {len(own_turns)}")
        observe(done, len(own_turns), so_far)
    return measures.summary(trained_tokens(rows), world)


_DRIFT = "drift"


@dataclass
class _Measures:
    """What this process has measured so far."""

    loss: float = 0.0
    largest_drift: float = 0.0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(
        self, terms: LossTerms, log_probs_N: torch.Tensor, entropy_N: torch.Tensor, batch: Batch, weight: float
    ) -> None:
        """A micro-batch; `weight` is 0 for a stand-in, which has the names of its measures but none of their worth."""
        self.loss += weight * terms.loss.item()
        self.sums["computed_tokens"] += weight * batch.token_ids_1S.numel()
        for name, value in {"entropy": entropy_N.sum(), **terms.sums}.items():
            self.sums[name] += weight * value.item()
        drift_N = (log_probs_N.detach() - batch.behavior_log_probs_N).abs()
        self.largest_drift = max(self.largest_drift, weight * drift_N.max().item())
        self.sums[_DRIFT] += weight * drift_N.sum().item()
        for bound in DRIFT_BOUNDS:
            self.sums[f"{_DRIFT}{bound}"] += weight * (drift_N <= bound).sum().item()

    def summary(self, tokens: int, world: World) -> GradientSummary:
        """Over all processes."""
        names = {"computed_tokens", _DRIFT, *(f"{_DRIFT}{bound}" for bound in DRIFT_BOUNDS)}
        own = {"loss": self.loss, **dict.fromkeys(names, 0.0), **self.sums}
        total = world.sum(own, "the sum of the measures")
        largest = world.largest({_DRIFT: self.largest_drift}, "the largest drift")[_DRIFT]
        within = tuple(total.pop(f"{_DRIFT}{bound}") / max(1, tokens) for bound in DRIFT_BOUNDS)
        drift = Drift(largest, total.pop(_DRIFT) / max(1, tokens), within)
        loss, computed = total.pop("loss"), int(total.pop("computed_tokens"))
        return GradientSummary(loss, tokens, computed, drift, total)


def turns(rows: Sequence[Row], options: StageOptions, world: World) -> list[Turn]:
    """This process's turns; every process has as many, and at each all have micro-batches of like size."""
    trained = [row for row in rows if len(row.trained)]
    found: list[Turn] = []
    for has_gradient in (True, False):
        chosen = [row for row in trained if bool(row.advantage) == has_gradient]
        batches = _micro_batches(families_of(chosen, share_prompts=options.share_prompts), options, world)
        for start in range(0, len(batches), world.size):
            own = start + world.rank
            found.append(Turn(batches[own] if own < len(batches) else None, has_gradient))
    return found


def _micro_batches(families: Sequence[Family], options: StageOptions, world: World) -> list[list[Family]]:
    """Within the budget, and small enough that every process gets some; a tenth more than its share fills them well."""
    share = math.ceil(1.1 * sum(map(len, families)) / world.size)
    return micro_batches(families, min(options.micro_batch_tokens, max(1, share)))


def _stand_in(rows: Sequence[Row]) -> Family:
    """Two tokens for a process that has nothing to compute but must take part."""
    row = rows[0]
    return Family((Row(row.token_ids[:2], Topology.causal(2), np.array([1]), np.zeros(1, np.float32), 0.0),))
