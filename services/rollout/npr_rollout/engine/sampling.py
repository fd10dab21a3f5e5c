"""Drawing tokens.

Invariants:
- A draw depends on the request's seed and prompt, the branch and the position, and on nothing else in the batch: one
  uniform number a row, hashed from these, is put through the inverse of the row's own cumulative distribution.
- The log-probability returned is that of the distribution the token was drawn from: after penalty, temperature, top-k
  and top-p; 0 for greedy decoding, which draws from a point mass.
- The penalty looks only at tokens of the step's own body. Tags and forced tokens are neither counted nor penalised.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from npr_rollout.engine.trajectory import Span

_U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Samples:
    """One token and its log-probability a row."""

    tokens: list[int]
    log_probs: list[float]


class Sampler(Protocol):
    """Chooses the next token of each span."""

    def sample(self, logits: Tensor, spans: Sequence[Span]) -> Samples:
        """Choose from float32 logits [N, V], one row for each of the N spans."""
        ...


def draw_key(seed: int, prompt_ids: Sequence[int]) -> int:
    """64 bits that fix a trajectory's draws. The prompt is part of them, so prompts with one seed are independent."""
    content = np.asarray(prompt_ids, np.int64).tobytes() + (seed & (2**64 - 1)).to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


class RandomSampler:
    """The sampler that is used in production."""

    def sample(self, logits: Tensor, spans: Sequence[Span]) -> Samples:
        """Draw one token a row; see the module's invariants."""
        logits = _penalise(logits, spans)
        params = [span.owner.request.sampling for span in spans]
        temperature = torch.tensor([p.temperature for p in params], device=logits.device)
        likeliest = logits.argmax(dim=-1)
        if not bool((temperature > 0).any()):
            return Samples(likeliest.tolist(), [0.0] * len(spans))
        greedy = temperature == 0
        scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
        log_probs = _truncate(scaled, [p.top_k for p in params], [p.top_p for p in params]).log_softmax(dim=-1)
        drawn = _inverse_cdf(log_probs, torch.from_numpy(_uniforms(spans)).to(logits.device))
        tokens = torch.where(greedy, likeliest, drawn)
        chosen = log_probs.gather(1, tokens[:, None])[:, 0].masked_fill(greedy, 0.0)
        return Samples(tokens.tolist(), chosen.tolist())


def _inverse_cdf(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token at which the cumulative probability exceeds the row's uniform number in [0, 1)."""
    cumulative = log_probs.exp().to(torch.float64).cumsum(dim=-1)
    target = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return tokens.clamp_(max=log_probs.shape[-1] - 1)


def _truncate(logits: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> Tensor:
    """Mask what top-k and top-p leave out; rows that ask for neither are not sorted."""
    rows = [i for i, (k, p) in enumerate(zip(top_k, top_p, strict=True)) if k > 0 or p < 1.0]
    if not rows:
        return logits
    index = torch.tensor(rows, device=logits.device)
    ranked, order = logits[index].sort(dim=-1, descending=True)
    size = ranked.shape[-1]
    keep_k = torch.tensor([top_k[i] or size for i in rows], device=logits.device)[:, None]
    keep_p = torch.tensor([top_p[i] for i in rows], device=logits.device)[:, None]
    ranked = ranked.masked_fill(torch.arange(size, device=logits.device)[None] >= keep_k, float("-inf"))
    mass = ranked.softmax(dim=-1)
    before = mass.cumsum(dim=-1) - mass  # the likeliest token is always kept
    ranked = ranked.masked_fill((before >= keep_p) & (keep_p < 1.0), float("-inf"))
    kept = torch.empty_like(ranked).scatter_(1, order, ranked)
    return logits.index_copy(0, index, kept)


def _penalise(logits: Tensor, spans: Sequence[Span]) -> Tensor:
    """The repetition penalty of Keskar et al. (2019), on the rows that have it."""
    rows = [i for i, span in enumerate(spans) if span.seen is not None]
    if not rows:
        return logits
    index = torch.tensor(rows, device=logits.device)
    seen = torch.stack([seen for i in rows if (seen := spans[i].seen) is not None])
    penalty = torch.tensor([spans[i].owner.request.sampling.repetition_penalty for i in rows], device=logits.device)
    old = logits[index]
    punished = torch.where(old > 0, old / penalty[:, None], old * penalty[:, None])
    return logits.index_copy(0, index, torch.where(seen, punished, old))


def _uniforms(spans: Sequence[Span]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) a span, hashed from its trajectory's key, its branch and the position drawn for."""
    keys = np.fromiter((span.owner.key for span in spans), np.uint64, len(spans))
    branches = np.fromiter((span.branch + 1 for span in spans), np.uint64, len(spans))
    positions = np.fromiter((span.end for span in spans), np.uint64, len(spans))
    mixed = _mix(_mix(keys ^ _mix(branches)) ^ positions)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: _U64) -> _U64:
    """SplitMix64's step and finaliser (Steele, Lea and Flood, 2014), element by element."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: _U64 = value ^ (value >> np.uint64(31))
    return result
