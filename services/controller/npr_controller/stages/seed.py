"""The recipe's own model: published as the run's first policy, so that it can be measured like any other."""

import time

from npr.learner.v1 import learner_pb2
from npr_controller.recipe import PublishedPolicy
from npr_controller.stages.context import RunContext
from npr_controller.stages.records import StartRecord
from npr_controller.stages.starting import model_source
from npr_controller.state import EventKind

# The learner asks every stage for a rate; this one takes no step.
_NEVER_USED = '{"learning_rate": 1e-6}'


async def publish(ctx: RunContext, stage: str) -> PublishedPolicy:
    """The policy of the recipe's model, published once; a recipe that names a policy has it already."""
    if ctx.recipe.policy is not None:
        return ctx.recipe.policy
    known = ctx.journal.fact(f"{stage}/start", StartRecord)
    if known is not None:
        return known.policy
    await ctx.journal.record(EventKind.STAGE_STARTED, f"loading {ctx.recipe.model}", stage=stage, phase="start")
    answer = await ctx.learner.start_stage(
        learner_pb2.StartStageRequest(
            run_id=ctx.run_id,
            stage=stage,
            source=model_source(ctx),
            objective=learner_pb2.OBJECTIVE_DAPO,
            options_json=_NEVER_USED,
            dialect=ctx.recipe.dialect,
            visibility=ctx.recipe.evaluation.model_visibility,
        )
    )
    policy = PublishedPolicy.from_proto(answer.policy)
    await ctx.journal.record(
        EventKind.STAGE_STARTED,
        f"{stage} is policy version {policy.version}",
        facts={f"{stage}/start": StartRecord(policy=policy, at=time.time())},
    )
    return policy
