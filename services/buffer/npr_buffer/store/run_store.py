"""Everything that can be done to one run, as typed calls over the atomic scripts.

Each mutation is one script: it happens whole or not at all, and may be repeated. What a script refuses is raised here
as a typed error that names the groups.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from npr.buffer.v1 import buffer_pb2
from npr.types.v1 import trajectory_pb2
from npr_buffer.settings import BufferSettings
from npr_buffer.store import keys
from npr_buffer.store.gateway import RedisGateway
from npr_buffer.store.samples import summary_of
from npr_common.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, ResourceExhaustedError

NAMED_IN_ERRORS = 5
SUMMARIES_PER_SCRIPT = 256
READABLE = (b"READY", b"CONSUMED")


class RunStore:
    """The work and experience of runs. Raises typed errors only."""

    def __init__(self, gateway: RedisGateway, settings: BufferSettings) -> None:
        self._gateway = gateway
        self._settings = settings

    async def enqueue(self, run_id: str, request_id: str, groups: Sequence[buffer_pb2.Group]) -> tuple[int, int]:
        """Adds groups; returns how many were new and how many existed. `ResourceExhaustedError` past the limit."""
        arguments: list[str | bytes | int] = [request_id, self._settings.max_open_groups]
        for group in groups:
            arguments += _enqueue_arguments(group)
        reply = await self._gateway.run_script("enqueue", run_id, arguments)
        if reply[0] == b"LIMIT":
            raise ResourceExhaustedError(
                f"run {run_id} has {reply[1]} open groups, {len(groups)} more would pass its limit of"
                f" {self._settings.max_open_groups}; acknowledge or discard some, or raise NPR_BUFFER_MAX_OPEN_GROUPS",
                reason="RUN_FULL",
                retry_after_seconds=self._settings.full_retry_seconds,
            )
        return reply[1], reply[2]

    async def renew(self, run_id: str, worker_id: str, lease_ms: int, ids: Sequence[str]) -> tuple[int, list[str]]:
        """Extends leases; returns how many leases of the run had ended meanwhile, and which `ids` are lost."""
        expired, lost = await self._gateway.run_script("renew", run_id, [worker_id, lease_ms, *ids])
        return expired, [group_id.decode() for group_id in lost]

    async def give_back(self, run_id: str, worker_id: str, ids: Sequence[str]) -> tuple[int, int]:
        """Makes the worker's groups wait again; returns how many leases had ended meanwhile, and how many went back."""
        expired, returned = await self._gateway.run_script("return_groups", run_id, [worker_id, *ids])
        return expired, returned

    async def append(
        self, run_id: str, scored: Sequence[trajectory_pb2.ScoredTrajectory]
    ) -> buffer_pb2.AppendTrajectoriesResponse:
        """Appends trajectories, all or none."""
        arguments: list[str | bytes | int] = []
        for one in scored:
            arguments += _append_arguments(one)
        tag, *rest = await self._gateway.run_script("append", run_id, arguments)
        if tag == b"OK":
            appended, duplicates, ready = rest
            return buffer_pb2.AppendTrajectoriesResponse(
                appended=appended, duplicates=duplicates, ready_group_ids=[group_id.decode() for group_id in ready]
            )
        named = _name(rest[0])
        if tag == b"NO_GROUP":
            raise _no_group(run_id, named)
        if tag == b"INDEX":
            raise InvalidArgumentError(
                f"sample_index is not below sample_count in group(s) {named}", reason="SAMPLE_INDEX_TOO_LARGE"
            )
        raise FailedPreconditionError(
            f"trajectories of group(s) {named} come from another policy than the group needs; nothing was stored",
            reason="POLICY_MISMATCH",
        )

    async def acknowledge(self, run_id: str, consumer: str, policy_version: int, ids: Sequence[str]) -> None:
        """Marks READY groups CONSUMED, all or none."""
        tag, *rest = await self._gateway.run_script("ack", run_id, [consumer, policy_version, *ids])
        if tag == b"OK":
            return
        named = _name(rest[0])
        if tag == b"NO_GROUP":
            raise _no_group(run_id, named)
        if tag == b"VERSION":
            raise FailedPreconditionError(
                f"group(s) hold trajectories of another policy version than {policy_version}: {named}",
                reason="POLICY_VERSION_MISMATCH",
            )
        raise FailedPreconditionError(f"group(s) can't be consumed by {consumer}: {named}", reason="GROUPS_NOT_READY")

    async def discard(self, run_id: str, reason: str, ids: Sequence[str]) -> None:
        """Marks groups DISCARDED, all or none."""
        tag, *rest = await self._gateway.run_script("discard", run_id, [reason, *ids])
        if tag == b"NO_GROUP":
            raise _no_group(run_id, _name(rest[0]))
        if tag == b"CONSUMED":
            raise FailedPreconditionError(f"group(s) are used up: {_name(rest[0])}", reason="GROUPS_CONSUMED")

    async def counts(self, run_id: str, channel: str) -> buffer_pb2.WatchChannelResponse:
        """The channel's counts now; zeros for a channel that has no groups."""
        fields = await self._gateway.command("HGETALL", f"{keys.run_prefix(run_id)}counts:{channel}")
        return counts_message({name.decode(): int(number) for name, number in fields.items()})

    async def summaries(
        self, run_id: str, channel: str, after: int, most: int, with_samples: bool
    ) -> tuple[list[buffer_pb2.GroupSummary], int | None]:
        """At most `most` groups enqueued after sequence number `after`, and the number to go on from (None: no more).

        An empty channel lists all of the run's.
        """
        order = f"{keys.run_prefix(run_id)}order{f':{channel}' if channel else ''}"
        flat = await self._gateway.command(
            "ZRANGE", order, f"({after}", "+inf", "BYSCORE", "LIMIT", 0, most + 1, "WITHSCORES"
        )
        ids, sequences = flat[0 : 2 * most : 2], flat[1 : 2 * most : 2]
        found: list[buffer_pb2.GroupSummary] = []
        for chunk in _chunks(ids, SUMMARIES_PER_SCRIPT):
            reply = await self._gateway.run_script("summaries", run_id, [int(with_samples), *chunk])
            found += [_summary_message(fields) for fields in reply]
        return found, int(float(sequences[-1])) if len(flat) > 2 * most else None

    async def check_readable(self, run_id: str, ids: Sequence[str]) -> None:
        """Raises `NotFoundError` or `FailedPreconditionError` unless all groups are READY or CONSUMED."""
        prefix = keys.run_prefix(run_id)
        states = await self._gateway.pipeline([("HGET", f"{prefix}group:{group_id}", "state") for group_id in ids])
        missing = [group_id for group_id, state in zip(ids, states, strict=True) if state is None]
        if missing:
            raise _no_group(run_id, _name(missing))
        early = [
            f"{group_id} ({state.decode()})"
            for group_id, state in zip(ids, states, strict=True)
            if state not in READABLE
        ]
        if early:
            raise FailedPreconditionError(f"group(s) can't be read: {_name(early)}", reason="GROUPS_NOT_READY")

    async def read(self, run_id: str, ids: Sequence[str]) -> AsyncIterator[buffer_pb2.ReadGroupsResponse]:
        """Whole groups in order, one at a time in memory."""
        await self.check_readable(run_id, ids)
        prefix = keys.run_prefix(run_id)
        for group_id in ids:
            group, by_index = await self._gateway.pipeline(
                [("HGET", f"{prefix}group:{group_id}", "group"), ("HGETALL", f"{prefix}trajectories:{group_id}")]
            )
            if group is None:
                raise _no_group(run_id, group_id)
            yield buffer_pb2.ReadGroupsResponse(
                group=buffer_pb2.Group.FromString(group),
                trajectories=[
                    trajectory_pb2.ScoredTrajectory.FromString(by_index[index]) for index in sorted(by_index, key=int)
                ],
            )

    async def trajectory(self, run_id: str, trajectory_id: str) -> buffer_pb2.GetTrajectoryResponse:
        """One trajectory and its group; `NotFoundError` when it was never appended."""
        group_id, _, index = trajectory_id.rpartition("/")
        prefix = keys.run_prefix(run_id)
        group, scored = await self._gateway.pipeline(
            [("HGET", f"{prefix}group:{group_id}", "group"), ("HGET", f"{prefix}trajectories:{group_id}", index)]
        )
        if group is None or scored is None:
            raise NotFoundError(
                f"run {run_id} has no trajectory {trajectory_id}; `npr show` lists the run's trajectories",
                reason="TRAJECTORY_NOT_FOUND",
            )
        return buffer_pb2.GetTrajectoryResponse(
            trajectory=trajectory_pb2.ScoredTrajectory.FromString(scored), group=buffer_pb2.Group.FromString(group)
        )

    async def delete(self, run_id: str) -> int:
        """Deletes the run; returns how many groups it had."""
        deleted: int = await self._gateway.run_script("delete_run", run_id, [])
        return deleted


def counts_message(counts: dict[str, int]) -> buffer_pb2.WatchChannelResponse:
    """Counts by the names that the scripts use."""
    return buffer_pb2.WatchChannelResponse(
        waiting=counts.get("WAITING", 0),
        leased=counts.get("LEASED", 0),
        ready=counts.get("READY", 0),
        consumed=counts.get("CONSUMED", 0),
        discarded=counts.get("DISCARDED", 0),
        trajectories=counts.get("trajectories", 0),
        trajectories_expected=counts.get("expected", 0),
    )


def _enqueue_arguments(group: buffer_pb2.Group) -> list[str | bytes | int]:
    needs = group.HasField("policy")
    return [
        group.group_id,
        group.channel,
        keys.policy_key(group.policy) if needs else keys.NO_POLICY,
        group.policy.digest if needs else "",
        group.sample_count,
        group.priority,
        group.prompt.prompt_id,
        group.SerializeToString(),
    ]


def _append_arguments(scored: trajectory_pb2.ScoredTrajectory) -> list[str | bytes | int]:
    trajectory = scored.trajectory
    return [
        trajectory.group_id,
        trajectory.sample_index,
        keys.policy_key(trajectory.policy),
        trajectory.policy.digest,
        trajectory.policy.version,
        scored.SerializeToString(),
        summary_of(scored).SerializeToString(),
    ]


def _summary_message(fields: list[Any]) -> buffer_pb2.GroupSummary:
    group_id, prompt_id, state, sample_count, consumer, reason, samples = fields
    by_index = sorted(zip(map(int, samples[::2]), samples[1::2], strict=True))
    return buffer_pb2.GroupSummary(
        group_id=group_id.decode(),
        prompt_id=prompt_id.decode(),
        state=buffer_pb2.GroupState.Value(f"GROUP_STATE_{state.decode()}"),
        sample_count=sample_count,
        samples=[buffer_pb2.SampleSummary.FromString(summary) for _, summary in by_index],
        consumer=consumer.decode(),
        discard_reason=reason.decode(),
    )


def _no_group(run_id: str, named: str) -> NotFoundError:
    return NotFoundError(f"run {run_id} has no group(s) {named}; enqueue them first", reason="GROUP_NOT_FOUND")


def _name(values: Sequence[bytes | str]) -> str:
    names = [value.decode() if isinstance(value, bytes) else value for value in dict.fromkeys(values)]
    more = f" and {len(names) - NAMED_IN_ERRORS} more" if len(names) > NAMED_IN_ERRORS else ""
    return ", ".join(names[:NAMED_IN_ERRORS]) + more


def _chunks(values: list[bytes], size: int) -> Iterator[list[bytes]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
