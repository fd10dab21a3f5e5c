"""The report as data: what `report.json` holds, made from a run's record and facts alone.

Times are wall-clock seconds and include whatever the run waited for; rates are in [0, 1]; tokens and branches are means
over responses. A number that was not measured is null.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from npr_controller.recipe import (
    SEED_STAGE,
    AnyStage,
    BetaStage,
    MultiverseStage,
    Recipe,
    parse_recipe,
)
from npr_controller.stages.flow import EVALUATION_STAGE
from npr_controller.stages.records import (
    BenchmarkRecord,
    EvaluationRecord,
    RoundRecord,
    ShownTrajectory,
    StepRecord,
    TunedRecord,
)
from npr_controller.state import RunRecord, RunState
from npr_controller.statistics import bootstrap_interval

Fact = TypeVar("Fact", bound=BaseModel)


class ReportPart(BaseModel):
    """A frozen piece of the report."""

    model_config = ConfigDict(frozen=True)


class Difference(ReportPart):
    """Accuracy against the seed on the same problems, with the paired bootstrap interval."""

    accuracy: float
    low: float
    high: float


class BenchmarkRow(ReportPart):
    """What was measured of a policy on a set of problems."""

    prompts: int
    samples_per_problem: int
    format_pass_rate: float
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    best_at_k: float
    pass_at: dict[int, float]
    parallel_rate: float
    genuine_parallel_rate: float
    malformed_rate: float
    unfinished_rate: float
    unscorable: int
    mean_branches: float
    total_tokens: float
    critical_path_tokens: float
    reward: float | None


class StageRow(BenchmarkRow):
    """A stage: its policy measured over all benchmarks, and what it took."""

    name: str
    policy_version: int
    policy_digest: str
    entropy: float | None
    train_seconds: float
    evaluation_seconds: float
    wall_seconds: float
    gain_over_seed: Difference | None
    benchmarks: dict[str, BenchmarkRow]


class Curve(ReportPart):
    """A stage's training, one point a step (or update of fine-tuning); metrics by name."""

    stage: str
    unit: str
    points: list[dict[str, float]]


class SamplingRound(ReportPart):
    """One round of rejection sampling."""

    stage: str
    round: int
    tried: int
    accepted: int


class Report(ReportPart):
    """`report.json`."""

    run_id: str
    recipe: str
    notes: str
    seed: int
    state: RunState
    error: str
    confidence: float
    created_at: float
    updated_at: float
    stages: list[StageRow]
    curves: list[Curve]
    rejection_sampling: list[SamplingRound]
    trajectories: dict[str, list[ShownTrajectory]]
    dialect: str


class _Facts:
    def __init__(self, stored: Mapping[str, str]) -> None:
        self._stored = stored

    def get(self, name: str, kind: type[Fact]) -> Fact | None:
        text = self._stored.get(name)
        return kind.model_validate_json(text) if text is not None else None

    def numbered(self, prefix: str, kind: type[Fact]) -> list[Fact]:
        """The facts `prefix/0`, `prefix/1`... as far as they go."""
        found: list[Fact] = []
        while (fact := self.get(f"{prefix}/{len(found)}", kind)) is not None:
            found.append(fact)
        return found


def build_report(record: RunRecord, stored: Mapping[str, str]) -> Report:
    """The report of what a run has established so far."""
    recipe = parse_recipe(record.recipe_yaml)
    facts = _Facts(stored)
    evaluations = _evaluations(recipe, facts)
    curves = [curve for stage in recipe.stages if (curve := _curve(stage, facts)).points]
    return Report(
        run_id=record.run_id,
        recipe=recipe.name,
        notes=recipe.notes,
        seed=recipe.seed,
        state=record.state,
        error=record.error,
        confidence=recipe.evaluation.confidence,
        created_at=record.created_at,
        updated_at=record.updated_at,
        stages=_rows(record, recipe, evaluations, curves),
        curves=curves,
        rejection_sampling=[
            row for stage in recipe.stages if isinstance(stage, BetaStage) for row in _sampling(stage, facts)
        ],
        trajectories={evaluation.stage: evaluation.shown for evaluation in evaluations},
        dialect=recipe.dialect,
    )


def _evaluations(recipe: Recipe, facts: _Facts) -> list[EvaluationRecord]:
    first = SEED_STAGE if recipe.stages else EVALUATION_STAGE
    names = [first, *(stage.name for stage in recipe.stages)]
    found = [facts.get(f"{name}/evaluation", EvaluationRecord) for name in names]
    return [evaluation for evaluation in found if evaluation is not None]


def _rows(
    record: RunRecord, recipe: Recipe, evaluations: list[EvaluationRecord], curves: list[Curve]
) -> list[StageRow]:
    entropies = {curve.stage: curve.points[-1].get("entropy") for curve in curves}
    begun = record.created_at
    rows = []
    for place, evaluation in enumerate(evaluations):
        seed = evaluations[0] if place > 0 else None
        rows.append(_row(recipe, evaluation, seed, begun, entropies.get(evaluation.stage)))
        begun = evaluation.finished_at
    return rows


def _row(
    recipe: Recipe, evaluation: EvaluationRecord, seed: EvaluationRecord | None, begun: float, entropy: float | None
) -> StageRow:
    return StageRow(
        name=evaluation.stage,
        policy_version=evaluation.policy.version,
        policy_digest=evaluation.policy.digest,
        entropy=entropy,
        train_seconds=evaluation.started_at - begun,
        evaluation_seconds=evaluation.finished_at - evaluation.started_at,
        wall_seconds=evaluation.finished_at - begun,
        gain_over_seed=_gain(recipe, evaluation, seed) if seed is not None else None,
        benchmarks={name: BenchmarkRow(**_measured(record)) for name, record in evaluation.benchmarks.items()},
        **_measured(evaluation.overall),
    )


def _measured(record: BenchmarkRecord) -> dict[str, Any]:
    measures = record.measures
    return {
        **measures.model_dump(exclude={"responses", "reward_mean"}),
        **record.model_dump(exclude={"measures", "per_problem"}),
        "reward": measures.reward_mean,
    }


def _gain(recipe: Recipe, evaluation: EvaluationRecord, seed: EvaluationRecord) -> Difference:
    """The mean difference over problems; every stage is measured on the same ones."""
    differences = np.array(evaluation.overall.per_problem) - np.array(seed.overall.per_problem)
    settings = recipe.evaluation
    interval = bootstrap_interval(
        differences, resamples=settings.bootstrap_resamples, confidence=settings.confidence, seed=recipe.seed
    )
    return Difference(accuracy=float(differences.mean()), low=interval.low, high=interval.high)


def _curve(stage: AnyStage, facts: _Facts) -> Curve:
    if isinstance(stage, BetaStage | MultiverseStage):
        tuned = facts.get(f"{stage.name}/tuned", TunedRecord)
        return Curve(stage=stage.name, unit="update", points=tuned.curve if tuned is not None else [])
    steps = facts.numbered(f"{stage.name}/step", StepRecord)
    points = [{"step": float(record.step), **record.metrics} for record in steps]
    return Curve(stage=stage.name, unit="step", points=points)


def _sampling(stage: BetaStage, facts: _Facts) -> list[SamplingRound]:
    return [
        SamplingRound(
            stage=stage.name,
            round=number,
            tried=record.measures.responses,
            accepted=len(record.trajectory_ids),
        )
        for number, record in enumerate(facts.numbered(f"{stage.name}/round", RoundRecord))
    ]
