"""Drawing tokens.

Invariants:
- A draw depends on the request's seed and prompt, the branch and the position, and on nothing else in the batch: one
  uniform number a row, hashed from these, is put through the inverse of the row's own cumulative distribution.
- The distribution is made in this order, each step on the rows that ask for it: penalty, temperature, top-k, top-p
  (of the mass that top-k left), min-p. Tokens that are just as likely as the last one kept are kept too, so what stays
  does not hang on how ties are sorted.
- The log-probability returned is that of the distribution the token was drawn from; 0 for greedy decoding, which draws
  from a point mass. The raw one is that of the model's own softmax: temperature 1, no penalty, nothing cut off.
- The penalty looks only at tokens of the step's own body. Tags and forced tokens are neither counted nor penalised.
- Rows don't touch: with the same logits, a row's token and log-probabilities are the same to the bit whatever the other
  rows are and ask for. Masses are summed as whole numbers, which has one result in any order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from npr_rollout.engine.request import SamplingParams
from npr_rollout.engine.trajectory import Span

_U64 = npt.NDArray[np.uint64]
_ONE = 2.0**40
"""Probability 1 in units of mass. Sums of whole units stay below 2**53, where float64 is exact."""
_CHUNK = 512
"""Tokens whose mass is summed up before the one that is drawn is looked for."""
_FIRST_RANKS = 64
"""How many of the likeliest tokens top-p looks at first; 16 times as many each time they don't have the mass."""


@dataclass(frozen=True, slots=True)
class Samples:
    """One token and its log-probability a row.

    Attributes:
        raw_log_probs: one a row, 0 where the request does not ask for it; empty where no row's does.
    """

    tokens: list[int]
    log_probs: list[float]
    raw_log_probs: list[float] = field(default_factory=list)


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
        params = [span.owner.request.sampling for span in spans]
        shaped = _shape(logits, spans, params)
        drawn = [i for i, p in enumerate(params) if p.temperature > 0]
        if len(drawn) == len(spans):
            tokens, log_probs = _draw(shaped, spans)
        else:
            tokens, log_probs = shaped.argmax(dim=-1), logits.new_zeros(len(spans))
            if drawn:
                index = torch.tensor(drawn, device=logits.device)
                tokens[index], log_probs[index] = _draw(shaped[index], [spans[i] for i in drawn])
        raw = _raw_log_probs(logits, spans, tokens, log_probs)
        return Samples(tokens.tolist(), log_probs.tolist(), raw)


def _draw(scaled: Tensor, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Tokens [N] drawn at random, and their log-probabilities [N]."""
    log_probs = _distribution(scaled, [span.owner.request.sampling for span in spans])
    tokens = _inverse_cdf(log_probs, torch.from_numpy(_uniforms(spans)).to(scaled.device))
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0]


def _shape(logits: Tensor, spans: Sequence[Span], params: Sequence[SamplingParams]) -> Tensor:
    """The repetition penalty of Keskar et al. (2019) on the rows that have it, then temperature."""
    penalised = [i for i, span in enumerate(spans) if span.seen is not None]
    if not penalised and not any(p.temperature for p in params):
        return logits
    temperature = torch.tensor([p.temperature or 1.0 for p in params], device=logits.device)[:, None]
    shaped = logits / temperature
    if penalised:
        index = torch.tensor(penalised, device=logits.device)
        seen = torch.stack([seen for i in penalised if (seen := spans[i].seen) is not None])
        penalty = torch.tensor([params[i].repetition_penalty for i in penalised], device=logits.device)[:, None]
        old = logits[index]
        punished = torch.where(old > 0, old / penalty, old * penalty)
        shaped.index_copy_(0, index, torch.where(seen, punished, old) / temperature[index])
    return shaped


def _distribution(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Log-probabilities [N, V] after top-k, top-p and min-p. Rows that ask for none of them pay for none of them."""
    size = scaled.shape[-1]
    if few := [i for i, p in enumerate(params) if 0 < p.top_k < size]:
        _replace(scaled, few, lambda rows: _cut(rows, _top_k_floor(rows, [params[i].top_k for i in few])))
    log_probs = scaled.log_softmax(dim=-1)
    if nucleus := [i for i, p in enumerate(params) if p.top_p < 1]:
        _replace(log_probs, nucleus, lambda rows: _cut(rows, _top_p_floor(rows, [params[i].top_p for i in nucleus])))
    if likely := [i for i, p in enumerate(params) if p.min_p > 0]:
        _replace(log_probs, likely, lambda rows: _cut(rows, _min_p_floor(rows, [params[i].min_p for i in likely])))
    if cut := [i for i, p in enumerate(params) if p.top_p < 1 or p.min_p > 0]:
        _replace(log_probs, cut, lambda rows: rows.log_softmax(dim=-1))
    return log_probs


def _replace(values: Tensor, rows: Sequence[int], change: Callable[[Tensor], Tensor]) -> None:
    """Change some rows of [N, V] in place."""
    index = torch.tensor(rows, device=values.device)
    values.index_copy_(0, index, change(values[index]))


def _cut(values: Tensor, floor: Tensor) -> Tensor:
    """Minus infinity for what is below its row's floor."""
    return values.masked_fill(values < floor[:, None], float("-inf"))


def _top_k_floor(logits: Tensor, top_k: Sequence[int]) -> Tensor:
    """The k-th largest of each row."""
    last = torch.tensor(top_k, device=logits.device)[:, None] - 1
    return logits.topk(max(top_k), dim=-1).values.gather(1, last)[:, 0]


def _top_p_floor(log_probs: Tensor, top_p: Sequence[float]) -> Tensor:
    """The log-probability of the last token that it takes to have the mass p; minus infinity if it takes them all."""
    target = torch.tensor(top_p, dtype=torch.float64, device=log_probs.device) * _ONE
    floor = torch.full_like(log_probs[:, 0], float("-inf"))
    left, ranks, size = torch.arange(len(floor), device=floor.device), _FIRST_RANKS, log_probs.shape[-1]
    while len(left):
        ranked = log_probs[left].topk(min(ranks, size), dim=-1).values
        short = (_mass(ranked).cumsum(dim=-1, dtype=torch.float64) < target[left, None]).sum(dim=-1)
        found = short < ranked.shape[-1]
        floor[left[found]] = ranked[found].gather(1, short[found, None])[:, 0]
        left, ranks = left[~found] if ranks < size else left[:0], 16 * ranks
    return floor


def _min_p_floor(log_probs: Tensor, min_p: Sequence[float]) -> Tensor:
    """That fraction of the likeliest token's probability, as a log-probability (Nguyen et al., 2024)."""
    return log_probs.amax(dim=-1) + torch.tensor([math.log(p) for p in min_p], device=log_probs.device)


def _mass(log_probs: Tensor) -> Tensor:
    """Probabilities in whole units of mass, as float32."""
    return log_probs.exp().mul_(_ONE).floor_()


def _inverse_cdf(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token at which the cumulative mass exceeds the row's uniform number in [0, 1): [N] token ids.

    Mass is summed by chunks, and token by token in the chunk that has the one: the full cumulative sum is never made.
    """
    count, size = log_probs.shape
    mass = log_probs.new_zeros(count, -(-size // _CHUNK) * _CHUNK)
    torch.exp(log_probs, out=mass[:, :size])
    mass = mass.mul_(_ONE).floor_().view(count, -1, _CHUNK)
    upto = mass.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = (uniforms[:, None] * upto[:, -1:]).floor_()
    chunk = torch.searchsorted(upto, target, right=True).clamp_(max=upto.shape[-1] - 1)
    inside = mass[torch.arange(count, device=mass.device), chunk[:, 0]].cumsum(dim=-1, dtype=torch.float64)
    before = upto.gather(1, chunk) - inside[:, -1:]
    token = torch.searchsorted(inside, target - before, right=True)
    return (chunk * _CHUNK + token)[:, 0].clamp_(max=size - 1)


def _raw_log_probs(logits: Tensor, spans: Sequence[Span], tokens: Tensor, log_probs: Tensor) -> list[float]:
    """The tokens' log-probabilities under the model's own softmax, where asked for."""
    if not any(span.owner.request.sampling.raw_log_probs for span in spans):
        return []
    asked = torch.tensor([span.owner.request.sampling.raw_log_probs for span in spans], device=logits.device)
    raw = torch.where(asked, log_probs, 0.0)
    if other := [i for i, span in enumerate(spans) if span.owner.request.sampling.raw_log_probs and _reshaped(span)]:
        index = torch.tensor(other, device=logits.device)
        raw[index] = logits[index].log_softmax(dim=-1).gather(1, tokens[index, None])[:, 0]
    values: list[float] = raw.tolist()
    return values


def _reshaped(span: Span) -> bool:
    """Whether the span's tokens are drawn from another distribution than the model's own."""
    params = span.owner.request.sampling
    cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return params.temperature != 1 or cut or span.seen is not None


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
