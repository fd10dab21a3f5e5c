"""NPR-Beta (SPEC section 5, stage 2): sample from the previous policy, keep what is right, fine-tune.

Invariants: a response is accepted when it is correct, complete and free of any format penalty; a group with nothing
accepted is discarded with that reason; accepted groups are acknowledged by the learner once the fine-tuned policy is
durable. Every round is a fact.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from npr.buffer.v1 import buffer_pb2
from npr.reward.v1 import reward_pb2
from npr.types.v1 import sampling_pb2
from npr_common.rpc import FailedPreconditionError
from npr_controller.measures import is_correct, is_malformed, measure, numbers
from npr_controller.recipe import BetaStage, Keep, PublishedPolicy
from npr_controller.stages.context import RunContext
from npr_controller.stages.fine_tuning import fine_tune
from npr_controller.stages.records import RoundRecord
from npr_controller.stages.rollouts import Batch, progress_of, roll_out
from npr_controller.state import EventKind


async def learn(ctx: RunContext, stage: BetaStage, previous: PublishedPolicy) -> PublishedPolicy:
    """Accepts responses of `previous` and fine-tunes on them; returns the policy after it."""
    rounds = await _sample(ctx, stage, previous)
    trajectory_ids = [trajectory_id for record in rounds for trajectory_id in record.trajectory_ids]
    if len(trajectory_ids) < stage.min_accepted:
        raise FailedPreconditionError(
            f"{stage.name}: {len(trajectory_ids)} of {stage.problems} problems gave a correct, well-formed response in "
            f"{stage.tries} tries and min_accepted is {stage.min_accepted}; train the stage before it longer",
            reason="NOTHING_ACCEPTED",
        )
    group_ids = [group_id for record in rounds for group_id in record.group_ids]
    return await fine_tune(ctx, stage, previous, trajectory_ids=trajectory_ids, group_ids=group_ids)


@dataclass(frozen=True)
class _Round:
    """One round: its number, the problems (by their place in the stream) that wait, how often each is tried, and how
    many responses were accepted before it.
    """

    number: int
    waiting: Sequence[int]
    tries: int
    accepted: int


async def _sample(ctx: RunContext, stage: BetaStage, sampler: PublishedPolicy) -> list[RoundRecord]:
    """Rounds of tries until every problem is accepted or has used its tries."""
    waiting = list(range(_problem_count(ctx, stage)))
    rounds: list[RoundRecord] = []
    left = stage.tries
    while waiting and left > 0:
        tries = min(stage.tries_per_round, left)
        left -= tries
        accepted_before = sum(len(record.trajectory_ids) for record in rounds)
        rounds.append(await _round(ctx, stage, sampler, _Round(len(rounds), waiting, tries, accepted_before)))
        if stage.keep is Keep.FIRST:
            accepted = set(rounds[-1].accepted_problems)
            waiting = [problem for problem in waiting if problem not in accepted]
    return rounds


async def _round(ctx: RunContext, stage: BetaStage, sampler: PublishedPolicy, this: _Round) -> RoundRecord:
    name = f"{stage.name}/round/{this.number}"
    known = ctx.journal.fact(name, RoundRecord)
    if known is not None:
        return known
    await ctx.journal.record(
        EventKind.ROLLOUT_PROGRESS,
        f"round {this.number + 1}: {len(this.waiting)} problems",
        stage=stage.name,
        phase="sample",
        step=this.number,
        steps=_round_count(stage),
    )
    batch = _batch(ctx, stage, sampler, this)
    rolled = await roll_out(ctx, batch, lambda counts: _tell(ctx, stage, this, batch, counts))
    record, refused = _accept(stage, rolled.groups, this.waiting)
    await ctx.buffer.discard(refused, "no response accepted")
    told = numbers(record.measures) | {"accepted": len(record.trajectory_ids), "tried": len(this.waiting)}
    await ctx.journal.record(EventKind.SAMPLED, metrics=told, facts={name: record}, step=this.number + 1)
    return record


async def _tell(
    ctx: RunContext, stage: BetaStage, this: _Round, batch: Batch, counts: buffer_pb2.WatchChannelResponse
) -> None:
    """A line every few seconds. The buffer's summaries say what would be accepted by now."""
    if not ctx.journal.is_due(EventKind.SAMPLING):
        return
    accepted = this.accepted + sum(len(_kept(stage, group)) for group in await ctx.buffer.summaries(batch.channel))
    message = (
        f"sampling, round {this.number + 1} of {_round_count(stage)}: {counts.trajectories} of "
        f"{counts.trajectories_expected} trajectories, {accepted} accepted so far"
    )
    await ctx.journal.progress(EventKind.SAMPLING, message, progress_of(counts) | {"accepted": accepted})


def _round_count(stage: BetaStage) -> int:
    return -(-stage.tries // stage.tries_per_round)


def _problem_count(ctx: RunContext, stage: BetaStage) -> int:
    """No problem is tried as two."""
    assert ctx.problems.train is not None, "a recipe with this stage names its training problems"
    return min(stage.problems, len(ctx.problems.train))


def _batch(ctx: RunContext, stage: BetaStage, sampler: PublishedPolicy, this: _Round) -> Batch:
    problems = ctx.stream(stage.name).take(0, _problem_count(ctx, stage))
    prefix = f"{stage.name}-r{this.number}"
    return Batch(
        channel=f"{stage.name}/sample/{this.number}",
        seed_scope=prefix,
        groups=[(f"{prefix}-{problem}", problems[problem]) for problem in this.waiting],
        policy=sampler,
        sample_count=this.tries,
        decoding=stage.decoding or ctx.recipe.decoding,
        visibility=sampling_pb2.VISIBILITY_SEQUENTIAL,
        reward_rule=reward_pb2.REWARD_RULE_FORMAT_GATED,
    )


def _accept(
    stage: BetaStage, groups: Sequence[buffer_pb2.GroupSummary], waiting: Sequence[int]
) -> tuple[RoundRecord, list[str]]:
    """What a round gave, and the groups that gave nothing."""
    trajectory_ids, group_ids, problems, refused = [], [], [], []
    for group, problem in zip(groups, waiting, strict=True):
        kept = _kept(stage, group)
        if not kept:
            refused.append(group.group_id)
            continue
        trajectory_ids += [f"{group.group_id}/{index}" for index in kept]
        group_ids.append(group.group_id)
        problems.append(problem)
    samples = [sample for group in groups for sample in group.samples]
    record = RoundRecord(
        trajectory_ids=trajectory_ids, group_ids=group_ids, accepted_problems=problems, measures=measure(samples)
    )
    return record, refused


def _kept(stage: BetaStage, group: buffer_pb2.GroupSummary) -> list[int]:
    """The samples of a group that are accepted, by their indices."""
    good = [sample.sample_index for sample in group.samples if is_correct(sample) and not is_malformed(sample)]
    return good if stage.keep is Keep.ALL else good[:1]
