"""Parallel fine-tuning at the learner, over accepted trajectories or over a file of given ones."""

from collections.abc import Sequence

from npr.learner.v1 import learner_pb2
from npr_common.rpc import FailedPreconditionError
from npr_controller.recipe import BetaStage, MultiverseStage, PublishedPolicy
from npr_controller.stages.context import RunContext
from npr_controller.stages.records import TunedRecord
from npr_controller.stages.starting import start_stage
from npr_controller.state import EventKind


async def fine_tune(
    ctx: RunContext,
    stage: BetaStage | MultiverseStage,
    previous: PublishedPolicy,
    *,
    trajectory_ids: Sequence[str] = (),
    group_ids: Sequence[str] = (),
    dataset_url: str = "",
) -> PublishedPolicy:
    """Fine-tunes a stage, once, and returns the policy after it."""
    known = ctx.journal.fact(f"{stage.name}/tuned", TunedRecord)
    if known is not None:
        return known.policy
    await start_stage(ctx, stage, previous)
    await ctx.journal.record(EventKind.TRAIN_PROGRESS, "fine-tuning", stage=stage.name, phase="train", step=0, steps=1)
    request = learner_pb2.FineTuneRequest(
        run_id=ctx.run_id,
        stage=stage.name,
        trajectory_ids=trajectory_ids,
        group_ids=group_ids,
        dataset_url=dataset_url,
    )
    record = await _followed(ctx, stage.name, request)
    facts = {f"{stage.name}/tuned": record}
    await ctx.journal.record(EventKind.FINE_TUNED, metrics=record.metrics, facts=facts, step=1)
    return record.policy


async def _followed(ctx: RunContext, stage: str, request: learner_pb2.FineTuneRequest) -> TunedRecord:
    """The result of fine-tuning and the curve that led to it, one point an update."""
    curve: dict[int, dict[str, float]] = {}
    async for message in ctx.learner.fine_tune(request):
        if message.WhichOneof("event") == "result":
            return TunedRecord(
                policy=PublishedPolicy.from_proto(message.result.policy),
                metrics=dict(message.result.metrics),
                curve=list(curve.values()),
            )
        progress = message.progress
        curve[progress.done] = {"step": progress.done, **progress.metrics}
        told = {"done": progress.done, "total": progress.total, **progress.metrics}
        loss = f", loss {progress.metrics['loss']:.3g}" if "loss" in progress.metrics else ""
        place = f"fine-tuning, update {progress.done} of {progress.total}"
        await ctx.journal.progress(EventKind.FINE_TUNING, f"{place}{loss}", told)
    raise FailedPreconditionError(f"the learner ended the fine-tuning of {stage} without a result: see its log")
