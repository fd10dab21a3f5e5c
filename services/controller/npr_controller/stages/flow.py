"""A run from its model to its last stage: measure the seed, then learn and measure, stage after stage."""

from npr.types.v1 import sampling_pb2
from npr_controller.recipe import SEED_STAGE, AnyStage, BetaStage, MultiverseStage, PublishedPolicy
from npr_controller.stages import beta, multiverse, reinforcement, seed
from npr_controller.stages.context import RunContext
from npr_controller.stages.evaluation import evaluate
from npr_controller.stages.guards import check_forks
from npr_controller.stages.records import EvaluationRecord
from npr_controller.state import EventKind, RunState

EVALUATION_STAGE = "evaluation"


async def drive(ctx: RunContext) -> None:
    """Takes a run from its frontier to its end. Raises typed errors; what was established stays established."""
    first = SEED_STAGE if ctx.recipe.stages else EVALUATION_STAGE
    policy = await seed.publish(ctx, first)
    visibility = ctx.recipe.evaluation.model_visibility
    measured = await evaluate(ctx, first, policy, visibility)
    for stage in ctx.recipe.stages:
        if visibility == sampling_pb2.VISIBILITY_PARALLEL:
            _check(ctx, stage, measured)
        policy = await _learn(ctx, stage, policy)
        visibility = stage.visibility
        measured = await evaluate(ctx, stage.name, policy, visibility)
    await ctx.journal.record(EventKind.RUN_FINISHED, state=RunState.COMPLETED, phase="done")


def _check(ctx: RunContext, stage: AnyStage, before: EvaluationRecord) -> None:
    if not isinstance(stage, BetaStage | MultiverseStage):
        check_forks(ctx, stage, before)


async def _learn(ctx: RunContext, stage: AnyStage, previous: PublishedPolicy) -> PublishedPolicy:
    match stage:
        case BetaStage():
            return await beta.learn(ctx, stage, previous)
        case MultiverseStage():
            return await multiverse.learn(ctx, stage, previous)
        case _:
            return await reinforcement.learn(ctx, stage, previous)
