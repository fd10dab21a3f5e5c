"""PAPO, the objective of stage 3: strictly on-policy, no ratio, no clipping, no KL."""

import torch

from npr_learner.objectives.base import LossTerms


def papo_loss(log_probs_N: torch.Tensor, advantages_N: torch.Tensor, normalizer: float) -> LossTerms:
    """-(1 / normalizer) * sum_t [pi(y_t) / stopgrad(pi(y_t))] * A_t, whose gradient is that of A log pi.

    Source: SPEC section 5, stage 3 (Parallel-Aware Policy Optimization of the NPR paper). The quotient is 1 in value;
    it is written in log space, where it can't overflow. As nothing is clipped, structural tokens keep their gradient.

    Args:
        log_probs_N: the current policy's log-probability of each sampled token.
        advantages_N: the advantage of each token's response.
        normalizer: sampled tokens of the *whole* batch, over all micro-batches and workers.
    """
    quotient_N = torch.exp(log_probs_N - log_probs_N.detach())
    return LossTerms(loss=-(quotient_N * advantages_N).sum() / normalizer)
