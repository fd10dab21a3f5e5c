"""Exact attention over a forest on the CPU, in memory that grows with the row and not with its square.

Each piece goes through torch's own flash kernel, which also tells the log of the sum of its queries' exponentials; what
the pieces say is merged by these. Backward is the kernel's too, piece by piece, given the merged output and sums
(as ring attention does it: Liu et al. 2023, "Ring Attention with Blockwise Transformers").

Invariants:
- Nothing is kept for backward but queries, keys, values, output and one number a query and head.
- Outputs are merged in float32 at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from npr_learner.attention.forest import Fork, Holes, holes_of
from npr_learner.attention.pieces import MASKED_SQUARE, Rectangle, Square, batched, pieces_of

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_BATCH_TOKENS = 16_384
"""Most tokens of a batch of squares: what is gathered for it is held twice."""


@dataclass(frozen=True)
class SquareBatch:
    """B squares, padded at the right to L tokens.

    Attributes:
        index_BL: int64, the row's token at each place; padding repeats the square's last token.
        inside_N: int64, places of the flattened [B * L] that are no padding, N of them.
        tokens_N: int64, the row's token at each of them.
        bias_B1LL: float32, 0 where the query (row) sees the key and -inf elsewhere; None where all is causal.
    """

    index_BL: torch.Tensor
    inside_N: torch.Tensor
    tokens_N: torch.Tensor
    bias_B1LL: torch.Tensor | None

    @classmethod
    def of(cls, squares: Sequence[Square], holes: Holes) -> SquareBatch:
        """The batch of these squares, all causal or none."""
        width = max(map(len, squares))
        places_L = np.arange(width)
        ends_B = np.array([square.end for square in squares])
        index_BL = np.array([square.start for square in squares])[:, None] + places_L
        inside_BL = index_BL < ends_B[:, None]
        index_BL = np.minimum(index_BL, ends_B[:, None] - 1)
        return cls(
            index_BL=torch.from_numpy(index_BL),
            inside_N=torch.from_numpy(np.flatnonzero(inside_BL)),
            tokens_N=torch.from_numpy(index_BL[inside_BL]),
            bias_B1LL=None if squares[0].causal else _bias(squares, holes, width),
        )

    def gather(self, rows_SH: torch.Tensor, *, padded: bool = True) -> torch.Tensor:
        """[S, H, ...] as [B, H, L, ...]; the padding is 0 unless `padded`."""
        found_BLH = rows_SH[self.index_BL]
        if not padded and len(self.inside_N) < self.index_BL.numel():
            outside = torch.ones(self.index_BL.numel(), dtype=torch.bool).index_fill_(0, self.inside_N, False)
            found_BLH.flatten(0, 1)[outside] = 0
        return found_BLH.transpose(1, 2)

    def real(self, squares_BHL: torch.Tensor) -> torch.Tensor:
        """[B, H, L, ...] as [N, H, ...], without the padding."""
        return squares_BHL.transpose(1, 2).flatten(0, 1)[self.inside_N]

    def bias_for(self, rows: torch.Tensor) -> torch.Tensor | None:
        """The bias in the type of `rows`."""
        return None if self.bias_B1LL is None else self.bias_B1LL.to(rows.dtype)


def _bias(squares: Sequence[Square], holes: Holes, width: int) -> torch.Tensor:
    """Padded queries see themselves, so that no query is without a key; nobody sees them."""
    visible_BLL = np.tile(np.eye(width, dtype=np.bool_), (len(squares), 1, 1))
    for visible_LL, square in zip(visible_BLL, squares, strict=True):
        visible_LL[: len(square), : len(square)] = holes.visible(square.start, square.end)
    bias_BLL = torch.zeros(visible_BLL.shape).masked_fill_(torch.from_numpy(~visible_BLL), -torch.inf)
    return bias_BLL[:, None]


@dataclass(frozen=True)
class LeanAttention:
    """Attention over one packed row of S tokens."""

    squares: tuple[SquareBatch, ...]
    rectangles: tuple[Rectangle, ...]

    @classmethod
    def of(cls, forest: Fork, masked_square: int = MASKED_SQUARE) -> LeanAttention:
        """The attention of a forest; squares of up to `masked_square` tokens may be masked."""
        pieces, holes = pieces_of(forest, masked_square), holes_of(forest, forest.end)
        batches = batched(pieces.squares, _BATCH_TOKENS)
        return cls(tuple(SquareBatch.of(batch, holes) for batch in batches), pieces.rectangles)

    def __call__(
        self, query_1HSD: torch.Tensor, key_1KSD: torch.Tensor, value_1KSD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """What each token attends to, [1, S, H, D]; K key heads are shared by H query heads, K divides H."""
        shared = query_1HSD.shape[1] // key_1KSD.shape[1]
        query_SHD, key_SHD, value_SHD = (
            heads_HSD[0].repeat_interleave(repeats, 0).transpose(0, 1) if repeats > 1 else heads_HSD[0].transpose(0, 1)
            for heads_HSD, repeats in ((query_1HSD, 1), (key_1KSD, shared), (value_1KSD, shared))
        )
        output_SHD: torch.Tensor = _Lean.apply(query_SHD, key_SHD, value_SHD, self, scale)  # type: ignore[no-untyped-call]
        return output_SHD[None]


class _Lean(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  # torch calls it so
        ctx: Any,
        query_SHD: torch.Tensor,
        key_SHD: torch.Tensor,
        value_SHD: torch.Tensor,
        attention: LeanAttention,
        scale: float,
    ) -> torch.Tensor:
        rows = (query_SHD, key_SHD, value_SHD)
        merged = _Merged.empty_like(query_SHD)
        for square in attention.squares:
            bias = square.bias_for(query_SHD)
            merged.put(square, *_forward(*map(square.gather, rows), 0.0, bias is None, attn_mask=bias, scale=scale))
        for piece in attention.rectangles:
            merged.add(piece, *_forward(*_of_rectangle(piece, *rows), 0.0, False, scale=scale))
        output_SHD = merged.output_SHD.to(query_SHD.dtype)
        ctx.save_for_backward(*rows, output_SHD, merged.log_sum_SH)
        ctx.attention, ctx.scale = attention, scale
        return output_SHD

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *rows, output_SHD, log_sum_SH = ctx.saved_tensors
        grad_SHD, scale = gradients[0], ctx.scale
        totals = [torch.zeros_like(each_SHD, dtype=log_sum_SH.dtype) for each_SHD in rows]
        for square in ctx.attention.squares:
            bias, log_sum = square.bias_for(grad_SHD), square.gather(log_sum_SH)
            output, grad = square.gather(output_SHD), square.gather(grad_SHD, padded=False)
            inputs = (grad, *map(square.gather, rows), output, log_sum)
            parts = _backward(*inputs, 0.0, bias is None, attn_mask=bias, scale=scale)
            for total_SHD, part_BHLD in zip(totals, parts, strict=True):
                total_SHD.index_add_(0, square.tokens_N, square.real(part_BHLD).to(total_SHD.dtype))
        for piece in ctx.attention.rectangles:
            queries = slice(piece.query_start, piece.query_end)
            output, grad, log_sum = (_heads_first(each[queries]) for each in (output_SHD, grad_SHD, log_sum_SH))
            parts = _backward(grad, *_of_rectangle(piece, *rows), output, log_sum, 0.0, False, scale=scale)
            for total_1HLD, part_1HLD in zip(_of_rectangle(piece, *totals), parts, strict=True):
                total_1HLD.add_(part_1HLD)
        return (*(total.to(each.dtype) for total, each in zip(totals, rows, strict=True)), None, None)


class _Merged(NamedTuple):
    """What the pieces have said so far: output [S, H, D], and the log of the sum of exponentials [S, H]."""

    output_SHD: torch.Tensor
    log_sum_SH: torch.Tensor

    @classmethod
    def empty_like(cls, query_SHD: torch.Tensor) -> _Merged:
        dtype = torch.promote_types(query_SHD.dtype, torch.float32)
        return cls(torch.empty(query_SHD.shape, dtype=dtype), torch.empty(query_SHD.shape[:2], dtype=dtype))

    def put(self, square: SquareBatch, output_BHLD: torch.Tensor, log_sum_BHL: torch.Tensor) -> None:
        """The first that is said of these tokens: squares tile the row."""
        self.output_SHD[square.tokens_N] = square.real(output_BHLD).to(self.output_SHD.dtype)
        self.log_sum_SH[square.tokens_N] = square.real(log_sum_BHL).to(self.log_sum_SH.dtype)

    def add(self, piece: Rectangle, output_1HLD: torch.Tensor, log_sum_1HL: torch.Tensor) -> None:
        """More keys of these queries: both shares are weighed by their sums."""
        queries = slice(piece.query_start, piece.query_end)
        output_LHD, log_sum_LH = self.output_SHD[queries], self.log_sum_SH[queries]
        more_LH = log_sum_1HL[0].T.to(log_sum_LH.dtype)
        total_LH = torch.logaddexp(log_sum_LH, more_LH)
        output_LHD *= (log_sum_LH - total_LH).exp_()[..., None]
        output_LHD += output_1HLD[0].transpose(0, 1) * (more_LH - total_LH).exp_()[..., None]
        log_sum_LH.copy_(total_LH)


def _of_rectangle(
    piece: Rectangle, query_SHD: torch.Tensor, key_SHD: torch.Tensor, value_SHD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of the piece's queries, keys and values, [1, H, L, D] each."""
    keys = slice(piece.key_start, piece.key_end)
    queries = slice(piece.query_start, piece.query_end)
    return _heads_first(query_SHD[queries]), _heads_first(key_SHD[keys]), _heads_first(value_SHD[keys])


def _heads_first(rows_LH: torch.Tensor) -> torch.Tensor:
    """[L, H, ...] as [1, H, L, ...]."""
    return rows_LH.transpose(0, 1)[None]
