"""Running the engine under a stopwatch: one record a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from npr_rollout.engine.engine import Engine
from npr_rollout.engine.sampling import RandomSampler, Samples
from npr_rollout.record.outcomes import Outcome
from npr_rollout.record.request import FinishedEvent, Request, Result
from npr_rollout.record.trajectory import Span
from npr_rollout.status import EngineStatus

_T = TypeVar("_T", int, float)
_PARTS = ("scheduling", "forward", "sampling")


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step: its seconds, and what the engine's own counts grew by; `pages` are held after it."""

    seconds: float
    tokens: int
    forks: int
    joins: int
    scheduling: float
    forward: float
    sampling: float
    kv_tokens_read: int
    kv_tokens_attended: int
    pages: int


@dataclass(frozen=True)
class Decoding:
    """All steps of a load, and what came of it."""

    steps: list[Step]
    results: list[Result]

    @property
    def seconds(self) -> float:
        """From the first step's start to the last one's end, less this stopwatch's own doings between them."""
        return sum(step.seconds for step in self.steps)

    @property
    def tokens(self) -> int:
        """Tokens after the prompts, forced ones included."""
        return sum(result.ledger.total_tokens for result in self.results)

    @property
    def peak_pages(self) -> int:
        """The most pages that were held after a step."""
        return max(step.pages for step in self.steps)

    def shares(self) -> dict[str, float]:
        """Which part of the time went where, by the engine's own stopwatch."""
        parts = {
            name: sum(getattr(step, name) for step in self.steps) for name in ("scheduling", "forward", "sampling")
        }
        whole = sum(parts.values())
        return {name: part / whole for name, part in parts.items()}


def decode(engine: Engine, requests: Sequence[Request]) -> Decoding:
    """Decode requests to their ends.

    Raises:
        RuntimeError: one of them did not complete.
    """
    for request in requests:
        engine.submit(request)
    steps: list[Step] = []
    results: list[Result] = []
    while not engine.idle:
        before = engine.status()
        begin = time.perf_counter()
        events = engine.step()
        seconds = time.perf_counter() - begin
        steps.append(_step(seconds, before, engine.status()))
        results += [event.result for event in events if isinstance(event, FinishedEvent)]
    for result in results:
        if result.outcome not in {Outcome.COMPLETED, Outcome.TRUNCATED}:
            raise RuntimeError(f"{result.request_id} ended as {result.outcome.name}: {result.message}")
    return Decoding(steps, results)


def is_stalled(rounds: Sequence[Decoding]) -> bool:
    """Whether the median round, the one that counts, took over twice the time of as many median steps.

    Its figure then tells of whatever held it up. Only for loads whose steps, but for that of the prompts, are alike.
    """
    counted = sorted(rounds, key=lambda done: done.seconds)[len(rounds) // 2].steps[1:]
    median = statistics.median(step.seconds for done in rounds for step in done.steps[1:])
    return sum(step.seconds for step in counted) > 2 * len(counted) * median


def _step(seconds: float, before: EngineStatus, after: EngineStatus) -> Step:
    def grown(count: Callable[[EngineStatus], _T]) -> _T:
        return count(after) - count(before)

    return Step(
        seconds,
        tokens=grown(lambda s: s.tokens),
        forks=grown(lambda s: s.forks),
        joins=grown(lambda s: s.joins),
        scheduling=grown(lambda s: s.scheduling_seconds),
        forward=grown(lambda s: s.forward_seconds),
        sampling=grown(lambda s: s.sampling_seconds),
        kv_tokens_read=grown(lambda s: s.kv_tokens_read),
        kv_tokens_attended=grown(lambda s: s.kv_tokens_attended),
        pages=after.pages_used,
    )


class EndlessSampler(RandomSampler):
    """Draws as in production, but never an end of text, so that every rival decodes as many tokens."""

    def __init__(self, ends: Sequence[int]) -> None:
        super().__init__()
        self._ends = torch.tensor(ends)

    @torch.inference_mode()
    def sample(self, logits: Tensor, spans: Sequence[Span]) -> Samples:
        """Draw from what is left of float32 logits [N, V]."""
        return super().sample(logits.index_fill_(1, self._ends.to(logits.device), -torch.inf), spans)
