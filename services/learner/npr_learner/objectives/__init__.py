"""The objectives of the three stages as pure functions of log-probabilities and advantages (SPEC section 5)."""

from npr_learner.objectives.base import LossTerms
from npr_learner.objectives.dapo import ClipRange, dapo_loss, overlong_penalty
from npr_learner.objectives.papo import papo_loss
from npr_learner.objectives.sft import sft_loss

__all__ = ["ClipRange", "LossTerms", "dapo_loss", "overlong_penalty", "papo_loss", "sft_loss"]
