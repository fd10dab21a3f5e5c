"""What `npr status` tells: each component by its own word, the queue, and the policy being served."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc

from npr.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from npr.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from npr_client.stack.components import COMPONENTS
from npr_client.stack.probes import PROBE_SECONDS, Health
from npr_client.stack.state import Phase, StackState
from npr_common.rpc.client import connect


@dataclass(frozen=True)
class ComponentStatus:
    """One component now."""

    name: str
    phase: Phase
    health: Health
    address: str | None
    pid: int | None
    uptime_seconds: float | None
    restarts: int
    last_error: str


@dataclass(frozen=True)
class QueueStatus:
    """Work over all runs, by the buffer's account."""

    waiting_groups: int
    leased_groups: int
    oldest_waiting_seconds: float
    expired_leases: int


@dataclass(frozen=True)
class PolicyStatus:
    """What the engine serves; no line when that is nothing, as after a start until work names a policy.

    Attributes:
        backend: what decodes.
        condition: a policy that is being loaded, or why one is not served; else empty.
    """

    line: str
    version: int
    digest: str
    backend: str
    condition: str


@dataclass(frozen=True)
class StackStatus:
    """The whole stack now. `queue` and `policy` are None when their service can't say."""

    supervisor_alive: bool
    components: tuple[ComponentStatus, ...]
    queue: QueueStatus | None
    policy: PolicyStatus | None

    @property
    def healthy(self) -> bool:
        """Whether there is a stack, and every component that was ever started serves."""
        started = [component for component in self.components if component.phase is not Phase.STOPPED]
        return self.supervisor_alive and bool(started) and all(c.health is Health.SERVING for c in started)


async def describe(state: StackState) -> StackStatus:
    """Asks all components at once; takes no longer than one probe."""
    async with asyncio.TaskGroup() as tasks:
        queue = tasks.create_task(_queue(state))
        policy = tasks.create_task(_policy(state))
        components = [tasks.create_task(_component(name, state)) for name in COMPONENTS]
    return StackStatus(
        state.supervisor_alive, tuple(task.result() for task in components), queue.result(), policy.result()
    )


async def _component(name: str, state: StackState) -> ComponentStatus:
    component = state.component(name)
    process = component.process if component.process and component.process.alive() else None
    if process is None or component.address is None:
        health = Health.STOPPED if process is None else Health.UNREACHABLE
    else:
        health = await COMPONENTS[name].health(component.address)
    return ComponentStatus(
        name=name,
        phase=component.phase,
        health=health,
        address=component.address,
        pid=process.pid if process else None,
        uptime_seconds=process.uptime_seconds if process else None,
        restarts=component.restarts,
        last_error=component.last_error,
    )


async def _queue(state: StackState) -> QueueStatus | None:
    address = state.component("buffer").address
    if address is None or not state.running("buffer"):
        return None
    async with connect(address) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        try:
            stats = await stub.GetQueueStats(buffer_pb2.GetQueueStatsRequest(), timeout=PROBE_SECONDS)
        except grpc.aio.AioRpcError:
            return None
    return QueueStatus(stats.waiting_groups, stats.leased_groups, stats.oldest_waiting_seconds, stats.expired_leases)


async def _policy(state: StackState) -> PolicyStatus | None:
    address = state.component("rollout").address
    if address is None or not state.running("rollout"):
        return None
    async with connect(address) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        try:
            engine = await stub.GetEngineStatus(rollout_pb2.GetEngineStatusRequest(), timeout=PROBE_SECONDS)
        except grpc.aio.AioRpcError:
            return None
    policy = engine.policy
    return PolicyStatus(policy.line, policy.version, policy.digest, engine.backend, engine.condition)
