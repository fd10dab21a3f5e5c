"""From a batch of responses to scores: format, verdict, reward.

Invariants:
- Scores come in the order of the responses.
- Equal answers to equal golds are judged once a batch: a group of samples repeats itself.
- Only what a glance can't settle goes to the sandbox, and only it counts against the queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from npr_common.dialects import Dialect
from npr_common.telemetry import meter, names, tracer
from npr_reward.format import FormatGrade, grade_format
from npr_reward.sandbox import Job, SandboxPool
from npr_reward.verdict import Verdict, VerdictKind
from npr_reward.verifiers import Verifier

_REWARDS = {VerdictKind.CORRECT: 1.0, VerdictKind.INCORRECT: -1.0, VerdictKind.UNSCORABLE: 0.0}


class Rule(Enum):
    """Which reward is made of verdict and format (SPEC section 4)."""

    ACCURACY = auto()
    """+1 or -1 by the verdict."""
    FORMAT_GATED = auto()
    """The format penalty where the format fails, else +1 or -1: accuracy is not paid to malformed responses."""


@dataclass(frozen=True, slots=True)
class Response:
    """One response to judge by a verifier that exists."""

    text: str
    gold: str
    verifier: str
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and the seconds that it took."""

    verdict: Verdict
    seconds: float


@dataclass(frozen=True, slots=True)
class Score:
    """The judgement of one response; `reward` is meaningless where the verdict is unscorable."""

    judgement: Judgement
    answer: str
    grade: FormatGrade
    reward: float


@dataclass(frozen=True, slots=True)
class _Reading:
    """What linear work finds in a response: either a judgement already, or the job that will give one."""

    answer: str
    grade: FormatGrade
    outcome: Judgement | Job


class Scorer:
    """Scores batches with `verifiers`, in `pool` where a glance does not settle it."""

    def __init__(self, verifiers: Mapping[str, Verifier], pool: SandboxPool) -> None:
        self._verifiers = verifiers
        self._pool = pool
        self._verdicts = meter().create_counter(names.METRIC_VERDICTS, description="verdicts by verifier and kind")
        self._seconds = meter().create_histogram(names.METRIC_VERDICT_SECONDS, unit="s")

    async def score(self, responses: Sequence[Response], rule: Rule, dialect: Dialect) -> list[Score]:
        """The scores, in order. Raises ResourceExhaustedError when the queue has no room for the batch."""
        readings = await asyncio.to_thread(lambda: [self._read(response, dialect) for response in responses])
        jobs = {reading.outcome for reading in readings if isinstance(reading.outcome, Job)}
        with self._pool.admitted(len(jobs)):
            judged = await self._judge_all(jobs)
        scores = [_score(reading, judged, rule) for reading in readings]
        for response, score in zip(responses, scores, strict=True):
            self._record(response.verifier, score.judgement)
        return scores

    def _read(self, response: Response, dialect: Dialect) -> _Reading:
        started = time.perf_counter()
        verifier = self._verifiers[response.verifier]
        answer = verifier.extract(response.text)
        outcome = _settle(verifier, answer, response)
        if isinstance(outcome, Verdict):
            return _Reading(
                answer or "", grade_format(response.text, dialect), Judgement(outcome, time.perf_counter() - started)
            )
        return _Reading(answer or "", grade_format(response.text, dialect), outcome)

    async def _judge_all(self, jobs: set[Job]) -> dict[Job, Judgement]:
        async with asyncio.TaskGroup() as group:
            tasks = {job: group.create_task(self._judge(job)) for job in jobs}
        return {job: task.result() for job, task in tasks.items()}

    async def _judge(self, job: Job) -> Judgement:
        with tracer().start_as_current_span(names.SPAN_VERDICT) as span:
            started = time.perf_counter()
            verdict = await self._pool.judge(job)
            span.set_attribute(names.VERDICT_KIND, verdict.kind.value)
        return Judgement(verdict, time.perf_counter() - started)

    def _record(self, verifier: str, judgement: Judgement) -> None:
        self._verdicts.add(1, {names.VERDICT_KIND: judgement.verdict.kind.value, "npr.verifier": verifier})
        self._seconds.record(judgement.seconds, {"npr.verifier": verifier})


def reward(rule: Rule, verdict: Verdict, grade: FormatGrade) -> float:
    """The reward that `rule` makes of verdict and format: SPEC section 4."""
    if rule is Rule.FORMAT_GATED and not grade.passed:
        return grade.penalty
    return _REWARDS[verdict.kind]


def _settle(verifier: Verifier, answer: str | None, response: Response) -> Verdict | Job:
    """The verdict where linear work gives one, else the job for the sandbox."""
    if answer is None:
        return Verdict.incorrect("the response commits to no final answer")
    if len(answer) > verifier.max_answer_chars:
        return Verdict.incorrect(f"the answer is longer than {verifier.max_answer_chars} characters")
    verdict = verifier.glance(answer, response.gold, response.metadata)
    return verdict or Job.of(verifier.name, answer, response.gold, response.metadata)


def _score(reading: _Reading, judged: Mapping[Job, Judgement], rule: Rule) -> Score:
    outcome = reading.outcome
    judgement = judged[outcome] if isinstance(outcome, Job) else outcome
    return Score(judgement, reading.answer, reading.grade, reward(rule, judgement.verdict, reading.grade))
