"""Drawing tokens.

Invariants:
- A draw depends on the request's seed and prompt, the branch and the position, and on nothing else in the batch: one
  uniform number a row, hashed from these, is put through the inverse of the row's own cumulative distribution.
- The log-probability returned is that of the distribution the token was drawn from: after penalty, temperature, and
  truncation; 0 for greedy decoding, which draws from a point mass. The raw one, where asked for, is before all of them.
- The penalty looks only at tokens of the step's own body. Tags and forced tokens are neither counted nor penalised.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from npr_rollout.engine.cpu.draw import draw as draw_on_cpu
from npr_rollout.engine.truncation import truncate
from npr_rollout.record.request import SamplingParams
from npr_rollout.record.trajectory import Drawn, Span

_U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Samples:
    """One token and its log-probability a row.

    Attributes:
        raw_log_probs: one a row under the raw distribution, 0 where it isn't asked for; empty if no row asks.
    """

    tokens: list[int]
    log_probs: list[float]
    raw_log_probs: list[float] = field(default_factory=list)

    def rows(self) -> Iterator[Drawn]:
        """What was drawn, row by row."""
        return map(Drawn, self.tokens, self.log_probs, self.raw_log_probs or itertools.repeat(0.0))


class Sampler(Protocol):
    """Chooses the next token of each span."""

    def sample(self, logits: Tensor, spans: Sequence[Span]) -> Samples:
        """Choose from float32 logits [N, V], one row for each of the N spans."""
        ...


class RandomSampler:
    """The sampler that is used in production."""

    def sample(self, logits: Tensor, spans: Sequence[Span]) -> Samples:
        """Draw one token a row; see the module's invariants."""
        params = [span.owner.request.sampling for span in spans]
        temperatures = torch.tensor([p.temperature for p in params], device=logits.device)
        left = truncate(_penalise(logits, spans), params, temperatures)
        draw = draw_on_cpu if logits.device.type == "cpu" else draw_anywhere
        tokens, log_probs = draw(left, temperatures, torch.from_numpy(_uniforms(spans)).to(logits.device))
        return Samples(tokens.tolist(), log_probs.tolist(), _raw_log_probs(logits, tokens, params))


def draw_anywhere(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """What `cpu.draw` does, on any device."""
    likeliest = logits.argmax(dim=-1)
    greedy = temperatures == 0
    log_probs = (logits / torch.where(greedy, 1.0, temperatures)[:, None]).log_softmax(dim=-1)
    cumulative = log_probs.exp().to(torch.float64).cumsum(dim=-1)
    target = uniforms[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, likeliest, drawn)
    chosen = log_probs.gather(1, tokens[:, None])[:, 0].masked_fill(greedy, 0.0)
    return tokens, chosen.to(torch.float64)


def _raw_log_probs(logits: Tensor, tokens: Tensor, params: Sequence[SamplingParams]) -> list[float]:
    """Of the tokens drawn, before penalty, temperature and truncation; 0 in rows that don't ask, empty if none does."""
    rows = [i for i, p in enumerate(params) if p.raw_log_probs]
    if not rows:
        return []
    index = torch.tensor(rows, device=logits.device)
    found = logits[index].log_softmax(dim=-1).gather(1, tokens[index, None])[:, 0]
    return torch.zeros(len(params), device=logits.device).index_copy(0, index, found).tolist()


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
