"""Reinforcement learning, step by step: NPR-Zero, NPR and the sequential baseline differ in their recipe's words only.

A step: choose prompts, have them rolled out by the current policy, replace groups without spread of rewards (dynamic
sampling), let the learner do its one step, remember the policy after it.

Invariants
- Strictly on-policy: a step trains on groups whose ids carry the version of the policy before it.
- The selection of a step is a fact before the learner hears of it, so a repeat names the same groups.
- When the learner's frontier lies behind (it came back from an older checkpoint), the run goes back to it.
"""

from collections import Counter
from collections.abc import Sequence

from npr.buffer.v1 import buffer_pb2
from npr.learner.v1 import learner_pb2
from npr_common.rpc import FailedPreconditionError
from npr_controller.datasets import Problem
from npr_controller.measures import has_spread, measure, numbers
from npr_controller.recipe import AnyReinforcement, PublishedPolicy
from npr_controller.stages.context import RunContext, named_groups
from npr_controller.stages.guards import check_malformed_rate
from npr_controller.stages.records import SelectionRecord, StepRecord
from npr_controller.stages.rollouts import Batch, RolledOut, discard_superseded, roll_out
from npr_controller.stages.starting import start_stage
from npr_controller.state import EventKind

_MOST_RETURNS_TO_ONE_STEP = 3


class LearnerBehindError(Exception):
    """The learner's frontier lies before the step it was asked for."""

    def __init__(self, next_step: int) -> None:
        super().__init__(f"the learner's next step is {next_step}")
        self.next_step = next_step


async def learn(ctx: RunContext, stage: AnyReinforcement, previous: PublishedPolicy) -> PublishedPolicy:
    """Runs a stage to its last step and returns the policy after it."""
    first, frontier = await start_stage(ctx, stage, previous)
    step = _finished_steps(ctx, stage)
    if frontier.next_step < step:
        step = await _go_back(ctx, stage, step, frontier.next_step)
    returns: Counter[int] = Counter()
    while step < stage.steps:
        try:
            await _do_step(ctx, stage, step, _policy_before(ctx, stage, step, first))
            step += 1
        except LearnerBehindError as behind:
            returns[behind.next_step] += 1
            if returns[behind.next_step] > _MOST_RETURNS_TO_ONE_STEP:
                raise FailedPreconditionError(
                    f"the learner went back to {stage.name} step {behind.next_step} again and again: see its log"
                ) from behind
            step = await _go_back(ctx, stage, step, behind.next_step)
    return _policy_before(ctx, stage, stage.steps, first)


async def _do_step(ctx: RunContext, stage: AnyReinforcement, step: int, policy: PublishedPolicy) -> None:
    selection = ctx.journal.fact(f"{stage.name}/groups/{step}", SelectionRecord)
    if selection is None or selection.policy_version != policy.version:
        selection = await _select(ctx, stage, step, policy)
    check_malformed_rate(ctx, stage, step)
    result = await _train(ctx, stage, step, selection)
    record = StepRecord(
        step=step, policy=PublishedPolicy.from_proto(result.policy), metrics=_metrics(selection, result)
    )
    await ctx.journal.record(
        EventKind.STEP_FINISHED,
        metrics=record.metrics,
        facts={f"{stage.name}/step/{step}": record},
        step=step + 1,
        phase="rollout",
    )


async def _select(ctx: RunContext, stage: AnyReinforcement, step: int, policy: PublishedPolicy) -> SelectionRecord:
    """The groups of a step: rolled out, and with dynamic sampling all of them with a spread of rewards."""
    channel = f"{stage.name}/train/{step}"
    prefix = f"{stage.name}-{step}-v{policy.version}-"
    await discard_superseded(ctx, channel, prefix)
    cursor = _cursor(ctx, stage, step)
    rounds: list[RolledOut] = []
    kept: list[str] = []
    while len(kept) < stage.prompts_per_step and len(rounds) <= stage.dynamic_sampling_rounds:
        problems = ctx.stream(stage.name).take(cursor, stage.prompts_per_step - len(kept))
        cursor += len(problems)
        named = named_groups(f"{prefix}r{len(rounds)}", problems)
        rounds.append(await roll_out(ctx, _batch(ctx, stage, channel, policy, named)))
        kept += await _keep(ctx, stage, rounds[-1].groups)
    if not kept:
        raise FailedPreconditionError(_nothing_kept(stage, step, len(rounds)), reason="NOTHING_KEPT")
    selection = SelectionRecord(
        policy_version=policy.version,
        group_ids=kept,
        cursor=cursor,
        rounds=len(rounds),
        measures=measure([sample for rolled in rounds for sample in rolled.samples]),
        rollout_seconds=sum(rolled.seconds for rolled in rounds),
    )
    facts = {f"{stage.name}/groups/{step}": selection}
    await ctx.journal.record(
        EventKind.SAMPLED, metrics=numbers(selection.measures), facts=facts, phase="train", step=step
    )
    return selection


def _batch(
    ctx: RunContext,
    stage: AnyReinforcement,
    channel: str,
    policy: PublishedPolicy,
    groups: Sequence[tuple[str, Problem]],
) -> Batch:
    return Batch(
        channel=channel,
        seed_scope=groups[0][0],
        groups=groups,
        policy=policy,
        sample_count=stage.samples_per_prompt,
        decoding=stage.decoding or ctx.recipe.decoding,
        visibility=stage.visibility,
        reward_rule=stage.reward_rule,
    )


async def _keep(ctx: RunContext, stage: AnyReinforcement, groups: Sequence[buffer_pb2.GroupSummary]) -> list[str]:
    """The groups worth a gradient; dynamic sampling sets the others aside (DAPO, Yu et al. 2025, section 3.2)."""
    if stage.dynamic_sampling_rounds == 0:
        return [group.group_id for group in groups]
    flat = [group.group_id for group in groups if not has_spread(group)]
    await ctx.buffer.discard(flat, "no spread of rewards")
    if flat:
        await ctx.journal.record(EventKind.RESAMPLED, metrics={"groups_without_spread": len(flat)})
    return [group.group_id for group in groups if has_spread(group)]


async def _train(
    ctx: RunContext, stage: AnyReinforcement, step: int, selection: SelectionRecord
) -> learner_pb2.StepResult:
    """The learner's step over the selection. Raises `LearnerBehindError` when it must do earlier ones first."""
    request = learner_pb2.TrainStepRequest(
        run_id=ctx.run_id, stage=stage.name, step=step, group_ids=selection.group_ids
    )
    try:
        async for message in ctx.learner.train_step(request):
            if message.WhichOneof("event") == "result":
                return message.result
            progress = message.progress
            told = {"done": progress.done, "total": progress.total, **progress.metrics}
            await ctx.journal.progress(EventKind.TRAIN_PROGRESS, progress.unit, told)
    except FailedPreconditionError as error:
        next_step = int(error.metadata.get("next_step", step))
        if next_step < step:
            raise LearnerBehindError(next_step) from error
        raise
    raise FailedPreconditionError(f"the learner ended {stage.name} step {step} without a result: see its log")


async def _go_back(ctx: RunContext, stage: AnyReinforcement, step: int, next_step: int) -> int:
    """Forgets the results from `next_step` on; the groups are still in the buffer. Returns `next_step`."""
    await ctx.journal.record(
        EventKind.WENT_BACK,
        f"{stage.name} goes back from step {step} to {next_step}, the learner's last checkpoint",
        facts={f"{stage.name}/step/{gone}": None for gone in range(next_step, step + 1)},
        stage=stage.name,
        phase="train",
        step=next_step,
        steps=stage.steps,
    )
    return next_step


def _finished_steps(ctx: RunContext, stage: AnyReinforcement) -> int:
    return next(
        step for step in range(stage.steps + 1) if ctx.journal.fact(f"{stage.name}/step/{step}", StepRecord) is None
    )


def _policy_before(ctx: RunContext, stage: AnyReinforcement, step: int, first: PublishedPolicy) -> PublishedPolicy:
    if step == 0:
        return first
    record = ctx.journal.fact(f"{stage.name}/step/{step - 1}", StepRecord)
    assert record is not None, "steps are done in order"
    return record.policy


def _cursor(ctx: RunContext, stage: AnyReinforcement, step: int) -> int:
    """Where the stream of problems goes on."""
    if step == 0:
        return 0
    before = ctx.journal.fact(f"{stage.name}/groups/{step - 1}", SelectionRecord)
    assert before is not None, "a step's selection outlives its result"
    return before.cursor


def _metrics(selection: SelectionRecord, result: learner_pb2.StepResult) -> dict[str, float]:
    """The learner's numbers, and under their own names those of the rollouts."""
    return {
        **result.metrics,
        **numbers(selection.measures),
        "rollout_seconds": selection.rollout_seconds,
        "sampling_rounds": float(selection.rounds),
        "groups": float(len(selection.group_ids)),
    }


def _nothing_kept(stage: AnyReinforcement, step: int, rounds: int) -> str:
    return (
        f"{stage.name} step {step}: every group had equal rewards in {rounds} rounds, so there is nothing to learn "
        "from; use problems of another difficulty or more samples_per_prompt"
    )
