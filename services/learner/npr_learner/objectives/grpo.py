"""GRPO, a baseline: the mean over responses of each response's mean, where DAPO takes the mean over tokens."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from npr_learner.objectives.dapo import ClipRange


def grpo_weights(tokens_R: Sequence[int]) -> npt.NDArray[np.float64]:
    """By what each response's advantage is multiplied so that DAPO's token-level loss becomes GRPO's.

    With n_i the tokens of response i, T those of all R responses: T / (R n_i). For (1/R) sum_i (1/n_i) sum_t s(A_i) is
    (1/T) sum_i sum_t s(A_i T / (R n_i)), as the surrogate s grows in proportion to the advantage.
    Source: Shao et al. 2024, "DeepSeekMath", equation 3, without its KL term.

    Args:
        tokens_R: trained tokens of each response, none 0.
    """
    lengths_R = np.asarray(tokens_R, np.float64)
    weights_R: npt.NDArray[np.float64] = lengths_R.sum() / (len(lengths_R) * lengths_R)
    return weights_R


def grpo_clip(low: float) -> ClipRange:
    """GRPO's clip: as far up as down, and none against the worst ratios."""
    return ClipRange(low, low, math.inf)
