"""The objectives of the three stages and of a baseline as pure functions of log-probabilities and advantages."""

from npr_learner.objectives.base import LossTerms
from npr_learner.objectives.dapo import ClipRange, dapo_loss, overlong_penalty
from npr_learner.objectives.grpo import grpo_clip, grpo_weights
from npr_learner.objectives.papo import papo_loss
from npr_learner.objectives.sft import sft_loss

__all__ = [
    "ClipRange",
    "LossTerms",
    "dapo_loss",
    "grpo_clip",
    "grpo_weights",
    "overlong_penalty",
    "papo_loss",
    "sft_loss",
]
