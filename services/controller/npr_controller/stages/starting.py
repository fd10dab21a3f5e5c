"""Starting a stage at the learner: where its weights come from, and with what options."""

import json
import time

from npr.learner.v1 import learner_pb2
from npr_controller.recipe import (
    SEED_STAGE,
    AnyStage,
    NprStage,
    PublishedPolicy,
    ReinforcementStage,
    StartFrom,
)
from npr_controller.stages.context import RunContext
from npr_controller.stages.records import StartRecord
from npr_controller.state import EventKind


def model_source(ctx: RunContext) -> learner_pb2.ModelSource:
    """The recipe's own model, as the run's first policy once it is one: a model is fetched and converted once a run."""
    if ctx.recipe.policy is not None:
        return learner_pb2.ModelSource(policy=ctx.recipe.policy.to_proto())
    seed = ctx.journal.fact(f"{SEED_STAGE}/start", StartRecord)
    if seed is not None:
        return learner_pb2.ModelSource(policy=seed.policy.to_proto())
    return learner_pb2.ModelSource(model=ctx.recipe.model or "")


async def start_stage(
    ctx: RunContext, stage: AnyStage, previous: PublishedPolicy
) -> tuple[PublishedPolicy, learner_pb2.StartStageResponse]:
    """Starts a stage, or finds it where it is.

    Returns the policy that the stage started from, and the learner's frontier. `previous` is the policy of the stage
    before it.
    """
    answer = await ctx.learner.start_stage(_request(ctx, stage, previous))
    known = ctx.journal.fact(f"{stage.name}/start", StartRecord)
    if known is not None:
        return known.policy, answer
    policy = PublishedPolicy.from_proto(answer.policy)
    await ctx.journal.record(
        EventKind.STAGE_STARTED,
        f"{stage.name} starts from policy version {policy.version}",
        facts={f"{stage.name}/start": StartRecord(policy=policy, at=time.time())},
        stage=stage.name,
        phase="start",
        step=0,
        steps=stage.steps if isinstance(stage, ReinforcementStage) else 1,
    )
    return policy, answer


def _request(ctx: RunContext, stage: AnyStage, previous: PublishedPolicy) -> learner_pb2.StartStageRequest:
    source = model_source(ctx)
    if stage.start_from is StartFrom.PREVIOUS:
        source = learner_pb2.ModelSource(policy=previous.to_proto())
    return learner_pb2.StartStageRequest(
        run_id=ctx.run_id,
        stage=stage.name,
        source=source,
        objective=stage.objective,
        options_json=json.dumps(_options(ctx, stage)),
        add_tag_tokens=stage.adds_tag_tokens,
        dialect=ctx.recipe.dialect,
        visibility=stage.visibility,
    )


def _options(ctx: RunContext, stage: AnyStage) -> dict[str, object]:
    derived: dict[str, object] = {"seed": ctx.recipe.seed}
    if isinstance(stage, ReinforcementStage):
        derived["total_steps"] = stage.steps
        derived["max_log_prob_drift_mean"] = ctx.recipe.guard.max_log_prob_drift_mean
    if isinstance(stage, NprStage):
        derived["malformed"] = stage.malformed.value
    return stage.learning.options(**derived)
