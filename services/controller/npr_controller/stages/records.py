"""The facts that stages establish."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from npr_controller.measures import Measures
from npr_controller.recipe import PublishedPolicy


class FactRecord(BaseModel):
    """A fact: frozen, and stored as JSON."""

    model_config = ConfigDict(frozen=True)


class StartRecord(FactRecord):
    """The policy a stage started from, and when (seconds since the epoch)."""

    policy: PublishedPolicy
    at: float


class SelectionRecord(FactRecord):
    """The groups a step trains on, all rolled out by `policy_version`; the stream goes on at `cursor`."""

    policy_version: int
    group_ids: list[str]
    cursor: int
    rounds: int
    measures: Measures
    rollout_seconds: float


class StepRecord(FactRecord):
    """A finished step: the policy after it, and its numbers by name."""

    step: int
    policy: PublishedPolicy
    metrics: dict[str, float]


class RoundRecord(FactRecord):
    """One round of rejection sampling: what was accepted in it."""

    trajectory_ids: list[str]
    group_ids: list[str]
    accepted_problems: list[int]
    measures: Measures


class TunedRecord(FactRecord):
    """A finished fine-tuning and the metrics on its way."""

    policy: PublishedPolicy
    metrics: dict[str, float]
    curve: list[dict[str, float]] = Field(default_factory=list)


class ShownTrajectory(FactRecord):
    """A trajectory for the report: what it says and what it used."""

    trajectory_id: str
    benchmark: str
    prompt: str
    response: str
    gold: str
    answer: str
    verdict: str
    reason: str
    outcome: str
    format_penalty: float
    total_tokens: int
    critical_path_tokens: int
    blocks: list[list[dict[str, Any]]]


class BenchmarkRecord(FactRecord):
    """One benchmark's measures; intervals are over its problems."""

    prompts: int
    samples_per_problem: int
    measures: Measures
    accuracy_low: float
    accuracy_high: float
    best_at_k: float
    pass_at: dict[int, float]
    per_problem: list[float]


class EvaluationRecord(FactRecord):
    """The evaluation of one policy over all benchmarks. Times are seconds since the epoch."""

    stage: str
    policy: PublishedPolicy
    overall: BenchmarkRecord
    benchmarks: dict[str, BenchmarkRecord]
    shown: list[ShownTrajectory]
    started_at: float
    finished_at: float
