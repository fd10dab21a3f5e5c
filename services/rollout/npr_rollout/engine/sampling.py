"""Choosing tokens: from the logits of a pass to one token a span, by the rules of `npr_sampling`.

Invariant: the penalty looks only at tokens of the step's own body. Tags and forced tokens are neither counted nor
penalised.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from npr_rollout.engine.cpu.draw import draw as draw_on_cpu
from npr_rollout.record.request import SamplingParams
from npr_rollout.record.trajectory import Drawn, Span
from npr_sampling import draw_anywhere, penalise, truncate, uniforms


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


def _raw_log_probs(logits: Tensor, tokens: Tensor, params: Sequence[SamplingParams]) -> list[float]:
    """Of the tokens drawn, before penalty, temperature and truncation; 0 in rows that don't ask, empty if none does."""
    rows = [i for i, p in enumerate(params) if p.raw_log_probs]
    if not rows:
        return []
    index = torch.tensor(rows, device=logits.device)
    found = logits[index].log_softmax(dim=-1).gather(1, tokens[index, None])[:, 0]
    return torch.zeros(len(params), device=logits.device).index_copy(0, index, found).tolist()


def _penalise(logits: Tensor, spans: Sequence[Span]) -> Tensor:
    """The repetition penalty, on the spans that have it."""
    rows = [i for i, span in enumerate(spans) if span.seen is not None]
    seen = [cast(Tensor, spans[i].seen) for i in rows]
    return penalise(logits, rows, seen, [spans[i].owner.request.sampling.repetition_penalty for i in rows])


def _uniforms(spans: Sequence[Span]) -> npt.NDArray[np.float64]:
    return uniforms(
        (span.owner.key for span in spans), (span.branch for span in spans), (span.end for span in spans), len(spans)
    )
