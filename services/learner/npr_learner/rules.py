"""What tells one objective of reinforcement learning from another.

Each is a row of one table: how responses are selected, what their advantages are, and what loss their tokens have. All
else (packing, normaliser, processes, update) is the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from npr.learner.v1 import learner_pb2
from npr_learner.advantages import FloatArray, dapo_advantages, papo_advantages
from npr_learner.batch import Batch
from npr_learner.gradient import LossFunction
from npr_learner.objectives import ClipRange, LossTerms, dapo_loss, grpo_clip, grpo_weights, papo_loss
from npr_learner.options import StageOptions
from npr_learner.row import Row


@dataclass(frozen=True)
class Rules:
    """One objective.

    Attributes:
        advantages: from rewards, group names and the epsilon of the division.
        loss: given the options and the normaliser, the loss of a micro-batch.
        by_accuracy: whether the reward is accuracy alone, after the structural filter; else the buffer's reward.
        strictly_on_policy: whether a batch is one update, and no ratio is taken to what the engine drew with.
        weigh: of one update's rows, each with its advantage as the loss is to see it.
    """

    advantages: Callable[[Sequence[float], Sequence[str], float], FloatArray]
    loss: Callable[[StageOptions, float], LossFunction]
    by_accuracy: bool = False
    strictly_on_policy: bool = False
    weigh: Callable[[Sequence[Row]], list[Row]] = list


def _papo(options: StageOptions, normalizer: float) -> LossFunction:
    return partial(_papo_terms, normalizer=normalizer)


def _dapo(options: StageOptions, normalizer: float) -> LossFunction:
    clip = ClipRange(options.clip_low, options.clip_high, options.dual_clip)
    return partial(_dapo_terms, normalizer=normalizer, clip=clip)


def _grpo(options: StageOptions, normalizer: float) -> LossFunction:
    return partial(_dapo_terms, normalizer=normalizer, clip=grpo_clip(options.clip_low))


def _papo_terms(log_probs_N: torch.Tensor, batch: Batch, *, normalizer: float) -> LossTerms:
    return papo_loss(log_probs_N, batch.advantages_N.to(log_probs_N.dtype), normalizer)


def _dapo_terms(log_probs_N: torch.Tensor, batch: Batch, *, normalizer: float, clip: ClipRange) -> LossTerms:
    advantages_N = batch.advantages_N.to(log_probs_N.dtype)
    return dapo_loss(log_probs_N, batch.behavior_log_probs_N, advantages_N, normalizer, clip)


def _by_response(rows: Sequence[Row]) -> list[Row]:
    trained = [row for row in rows if len(row.trained)]
    weights = grpo_weights([len(row.trained) for row in trained])
    return [replace(row, advantage=row.advantage * weight) for row, weight in zip(trained, weights, strict=True)]


RULES: Final[Mapping[int, Rules]] = {
    learner_pb2.OBJECTIVE_PAPO: Rules(papo_advantages, _papo, by_accuracy=True, strictly_on_policy=True),
    learner_pb2.OBJECTIVE_DAPO: Rules(dapo_advantages, _dapo),
    learner_pb2.OBJECTIVE_GRPO: Rules(dapo_advantages, _grpo, weigh=_by_response),
}
"""By the contract's enum."""
