"""Rolling out a batch of prompts: enqueue, watch, read the summaries.

Group ids are derived from run, stage, step and policy version, so that a batch that was asked for before a crash is
found again instead of asked for twice.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from npr.buffer.v1 import buffer_pb2
from npr.reward.v1 import reward_pb2
from npr.types.v1 import sampling_pb2
from npr_common.telemetry import current_traceparent
from npr_controller.datasets import Problem, derived_seed
from npr_controller.recipe import Decoding, PublishedPolicy
from npr_controller.stages.context import RunContext
from npr_controller.state import EventKind

OPEN_STATES = frozenset({buffer_pb2.GROUP_STATE_WAITING, buffer_pb2.GROUP_STATE_LEASED, buffer_pb2.GROUP_STATE_READY})

Tell = Callable[[buffer_pb2.WatchChannelResponse], Awaitable[None]]


@dataclass(frozen=True)
class Batch:
    """Prompts that are rolled out together under one policy.

    Batches of one `seed_scope` draw place by place with the same sampling seeds.
    """

    channel: str
    seed_scope: str
    groups: Sequence[tuple[str, Problem]]
    policy: PublishedPolicy
    sample_count: int
    decoding: Decoding
    visibility: "sampling_pb2.Visibility.ValueType"
    reward_rule: "reward_pb2.RewardRule.ValueType"


@dataclass(frozen=True)
class RolledOut:
    """A batch's groups in its own order, and how long they took."""

    groups: list[buffer_pb2.GroupSummary]
    seconds: float

    @property
    def samples(self) -> list[buffer_pb2.SampleSummary]:
        """All responses, group by group."""
        return [sample for group in self.groups for sample in group.samples]


async def roll_out(ctx: RunContext, batch: Batch, tell: Tell | None = None) -> RolledOut:
    """Has a batch decoded and scored, and waits for the last group; `tell` is called after each change."""
    started = time.monotonic()
    groups = [_group(ctx, batch, place) for place in range(len(batch.groups))]
    await ctx.buffer.enqueue(batch.channel, groups)
    async for counts in ctx.buffer.watch(batch.channel, ctx.limits.stall_seconds):
        if tell is not None:
            await tell(counts)
        else:
            await ctx.journal.progress(EventKind.ROLLOUT_PROGRESS, "", progress_of(counts))
    summaries = {group.group_id: group for group in await ctx.buffer.summaries(batch.channel)}
    rolled = [summaries[group_id] for group_id, _ in batch.groups]
    return RolledOut(rolled, time.monotonic() - started)


async def discard_superseded(ctx: RunContext, channel: str, prefix: str) -> None:
    """Sets aside what a channel still holds from another policy: it must never be trained on."""
    summaries = await ctx.buffer.summaries(channel, with_samples=False)
    stale = [
        group.group_id for group in summaries if group.state in OPEN_STATES and not group.group_id.startswith(prefix)
    ]
    await ctx.buffer.discard(stale, "superseded policy")


def _group(ctx: RunContext, batch: Batch, place: int) -> buffer_pb2.Group:
    group_id, problem = batch.groups[place]
    seed = derived_seed(ctx.recipe.seed, batch.seed_scope, place)
    return buffer_pb2.Group(
        group_id=group_id,
        run_id=ctx.run_id,
        channel=batch.channel,
        prompt=ctx.prompt(problem),
        sample_count=batch.sample_count,
        decoding=batch.decoding.to_proto(batch.visibility, seed),
        policy=batch.policy.to_proto(),
        reward_rule=batch.reward_rule,
        traceparent=current_traceparent(),
        dialect=ctx.recipe.dialect,
    )


def progress_of(counts: buffer_pb2.WatchChannelResponse) -> dict[str, float]:
    """The counts by the names that events give them."""
    return {
        "trajectories": counts.trajectories,
        "trajectories_expected": counts.trajectories_expected,
        "groups_waiting": counts.waiting,
        "groups_leased": counts.leased,
        "groups_ready": counts.ready,
    }
