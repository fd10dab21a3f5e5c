"""What the scripts answer, typed."""

from dataclasses import dataclass
from typing import Any, Self

from npr.buffer.v1 import buffer_pb2


@dataclass(frozen=True)
class Depth:
    """A run's open work at one instant of Redis' clock; `*_ms` are milliseconds since the epoch."""

    now_ms: int
    expired: int
    waiting: int
    leased: int
    oldest_waiting_ms: int | None
    next_lease_end_ms: int | None

    @classmethod
    def parse(cls, reply: list[Any]) -> Self:
        """From the prelude's `depth`."""
        now, expired, waiting, leased, oldest, next_end = reply
        return cls(now, expired, waiting, leased, _whole(oldest), _whole(next_end))

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is leased."""
        return self.waiting == 0 and self.leased == 0

    @property
    def next_lease_end_seconds(self) -> float | None:
        """Seconds until the next lease ends; None without leases."""
        return None if self.next_lease_end_ms is None else max(0, self.next_lease_end_ms - self.now_ms) / 1000


@dataclass(frozen=True, order=True)
class Head:
    """Rank of the first group that a lease would take from a run; smaller comes first."""

    negated_priority: int
    stranger: bool
    enqueued_ms: int


@dataclass(frozen=True)
class Peek:
    """A run as a lease call finds it."""

    depth: Depth
    holds_request: bool
    head: Head | None

    @classmethod
    def parse(cls, reply: list[Any]) -> Self:
        """From `peek.lua`."""
        depth, holds, head = reply
        return cls(Depth.parse(depth), bool(holds), Head(head[0], bool(head[1]), head[2]) if head else None)


@dataclass(frozen=True)
class Lease:
    """One leased group."""

    group: buffer_pb2.Group
    expires_ms: int
    present_indices: frozenset[int]

    def to_message(self) -> buffer_pb2.LeasedGroup:
        """As it goes to the worker."""
        missing = [index for index in range(self.group.sample_count) if index not in self.present_indices]
        message = buffer_pb2.LeasedGroup(group=self.group, missing_sample_indices=missing)
        message.expires_at.FromMilliseconds(self.expires_ms)
        return message


@dataclass(frozen=True)
class LeaseReply:
    """What one run gave; all leases need `policy` (a policy key, None without leases)."""

    depth: Depth
    policy: str | None
    leases: tuple[Lease, ...]

    @classmethod
    def parse(cls, reply: list[Any]) -> Self:
        """From `lease.lua`."""
        depth, policy, leased = reply
        leases = tuple(
            Lease(buffer_pb2.Group.FromString(group), expires, frozenset(int(index) for index in present))
            for group, expires, present in leased
        )
        return cls(Depth.parse(depth), None if policy is None else policy.decode(), leases)


def _whole(score: bytes | None) -> int | None:
    return None if score is None else int(float(score))
