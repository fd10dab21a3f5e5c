"""Negative log-likelihood, the objective of stage 2."""

import torch

from npr_learner.objectives.base import LossTerms


def sft_loss(log_probs_N: torch.Tensor, normalizer: float) -> LossTerms:
    """-(1 / normalizer) * sum_t log pi(y_t) over response tokens less the forced ones.

    Source: SPEC section 5, stage 2. The normaliser is one constant for all updates of an epoch: means over batches of
    their own would over-weight short responses wherever lengths differ between batches.

    Args:
        log_probs_N: log-probability of each trained token.
        normalizer: trained tokens of an *average* update.
    """
    nll = -log_probs_N.sum()
    return LossTerms(loss=nll / normalizer, sums={"nll": nll.detach()})
