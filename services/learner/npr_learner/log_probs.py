"""Log-probabilities of chosen tokens without ever holding the logits of a whole batch.

Invariants:
- At most `chunk_elements` logits exist at a time, forward and backward; backward computes them again.
- Softmax runs in float32 at least, in float64 where the hidden states are float64.
- The entropy is a measurement: it carries no gradient.
"""

from collections.abc import Iterator
from typing import Any

import torch

CPU_CHUNK_ELEMENTS = 1 << 22  # small enough for the allocator to hand out the same memory again
GPU_CHUNK_ELEMENTS = 1 << 27


def chosen_log_probs(
    hidden_NH: torch.Tensor, head_VH: torch.Tensor, targets_N: torch.Tensor, chunk_elements: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(hidden @ head.T)[target] and the entropy of each distribution, in nats.

    Args:
        hidden_NH: final hidden states from which each token was drawn.
        head_VH: the output embedding, without bias.
        targets_N: the tokens that were drawn, int64.
        chunk_elements: most logits to hold at once; None lets the device choose.

    Returns:
        `log_probs_N`, differentiable with respect to hidden states and head, and `entropy_N`, detached.
    """
    if chunk_elements is None:
        chunk_elements = GPU_CHUNK_ELEMENTS if hidden_NH.is_cuda else CPU_CHUNK_ELEMENTS
    log_probs_N, entropy_N = _ChosenLogProbs.apply(hidden_NH, head_VH, targets_N, chunk_elements)  # type: ignore[no-untyped-call]
    return log_probs_N, entropy_N


class _ChosenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, head_VH: torch.Tensor, targets_N: torch.Tensor, chunk_elements: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape, dtype = targets_N.shape, _softmax_dtype(hidden_NH)
        log_probs_N, normalizer_N, entropy_N = (
            torch.empty(shape, dtype=dtype, device=hidden_NH.device) for _ in range(3)
        )
        for chunk in _chunks(len(targets_N), len(head_VH), chunk_elements):
            logits_CV = _logits(hidden_NH[chunk], head_VH)
            peak_C = logits_CV.amax(-1)
            weights_CV = (logits_CV - peak_C[:, None]).exp_()
            total_C = weights_CV.sum(-1)
            normalizer_C = peak_C + total_C.log()
            chosen_C = logits_CV.gather(-1, targets_N[chunk, None]).squeeze(-1)
            normalizer_N[chunk] = normalizer_C
            log_probs_N[chunk] = chosen_C - normalizer_C
            # -sum p log p, with log p = logits - normaliser and sum p = 1
            entropy_N[chunk] = normalizer_C - torch.linalg.vecdot(weights_CV, logits_CV) / total_C
        ctx.save_for_backward(hidden_NH, head_VH, targets_N, normalizer_N)
        ctx.chunk_elements = chunk_elements
        ctx.mark_non_differentiable(entropy_N)
        return log_probs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        hidden_NH, head_VH, targets_N, normalizer_N = ctx.saved_tensors
        grad_N = gradients[0]
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_head_VH = torch.zeros_like(head_VH, dtype=grad_N.dtype)
        for chunk in _chunks(len(targets_N), len(head_VH), ctx.chunk_elements):
            # d log p(y) / d logits = onehot(y) - softmax
            grad_CV = (_logits(hidden_NH[chunk], head_VH) - normalizer_N[chunk, None]).exp_().neg_()
            grad_CV.scatter_add_(-1, targets_N[chunk, None], torch.ones_like(grad_N[chunk, None]))
            grad_CV.mul_(grad_N[chunk, None])
            rounded_CV = grad_CV.to(hidden_NH.dtype)
            grad_hidden_NH[chunk] = rounded_CV @ head_VH.to(hidden_NH.dtype)
            _add_product(grad_head_VH, rounded_CV.T, hidden_NH[chunk])
        return grad_hidden_NH, grad_head_VH.to(head_VH.dtype), None, None


def _add_product(total_VH: torch.Tensor, left_VC: torch.Tensor, right_CH: torch.Tensor) -> None:
    """total += left @ right, in place where the types allow it; sums over chunks stay in the type of `total`."""
    if total_VH.dtype == left_VC.dtype:
        total_VH.addmm_(left_VC, right_CH)
    else:
        total_VH += left_VC @ right_CH


def _logits(hidden_CH: torch.Tensor, head_VH: torch.Tensor) -> torch.Tensor:
    return (hidden_CH @ head_VH.to(hidden_CH.dtype).T).to(_softmax_dtype(hidden_CH))


def _softmax_dtype(hidden: torch.Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _chunks(count: int, width: int, chunk_elements: int) -> Iterator[slice]:
    size = max(1, chunk_elements // width)
    return (slice(start, start + size) for start in range(0, count, size))
