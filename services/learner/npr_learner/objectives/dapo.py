"""DAPO, the objective of stage 1 and of the sequential baseline."""

from dataclasses import dataclass

import torch

from npr_learner.objectives.base import LossTerms


@dataclass(frozen=True)
class ClipRange:
    """How far the ratio may move the loss: [1 - low, 1 + high], and `dual` against it for negative advantages."""

    low: float = 0.2
    high: float = 0.28
    dual: float = 10.0


def dapo_loss(
    log_probs_N: torch.Tensor,
    behavior_log_probs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    normalizer: float,
    clip: ClipRange,
) -> LossTerms:
    """-(1 / normalizer) * sum_t surrogate_t, token-level over the whole mini-batch, without KL.

    With r = pi / pi_behavior, surrogate = min(r A, clip(r, 1 - low, 1 + high) A), and for A < 0 not below dual * A.
    Sources: Yu et al. 2025, "DAPO", equations 8 to 12 (clip-higher, token-level loss); Ye et al. 2020, "Mastering
    Complex Control in MOBA Games with Deep Reinforcement Learning", equation 4 (dual clip).

    Args:
        log_probs_N: the current policy's log-probability of each sampled token.
        behavior_log_probs_N: what the engine drew the token with.
        advantages_N: the advantage of each token's response.
        normalizer: sampled tokens of the mini-batch, over all micro-batches.
        clip: the bounds.
    """
    ratio_N = torch.exp(log_probs_N - behavior_log_probs_N)
    plain_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - clip.low, 1 + clip.high) * advantages_N
    bounded_N = torch.minimum(plain_N, clipped_N)
    floor_N = clip.dual * advantages_N
    surrogate_N = torch.where(advantages_N < 0, torch.maximum(bounded_N, floor_N), bounded_N)
    is_clipped_N = (clipped_N < plain_N) | ((advantages_N < 0) & (bounded_N < floor_N))
    return LossTerms(loss=-surrogate_N.sum() / normalizer, sums={"clip_fraction": is_clipped_N.detach().sum()})


def overlong_penalty(response_tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """The soft penalty in [-1, 0] of a long response: 0 up to the buffer, then linear, -1 at the limit.

    Source: DAPO, equation 13 ("soft overlong punishment").

    Args:
        response_tokens: length of the response.
        max_tokens: the limit it was decoded under.
        buffer_tokens: the last tokens before the limit, in which the penalty grows; 0 is no penalty.
    """
    if not buffer_tokens:
        return 0.0
    over = response_tokens - (max_tokens - buffer_tokens)
    return -min(1.0, max(0.0, over / buffer_tokens))
