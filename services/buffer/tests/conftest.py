"""A real Valkey and a real buffer server for every test; a fresh run id keeps tests apart."""

import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import grpc
import pytest
import redis.asyncio

from npr.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from npr.types.v1 import policy_pb2, trajectory_pb2
from npr_buffer.service import BufferService
from npr_buffer.settings import BufferSettings
from npr_common.errors import rpc_errors
from npr_common.rpc import connect
from npr_common.testing.servers import running_server
from npr_common.testing.valkey import ValkeyProcess, valkey_server


class Client:
    """The RPCs as a worker and a learner use them; failures are raised as typed errors."""

    def __init__(self, stub: "buffer_pb2_grpc.BufferServiceAsyncStub") -> None:
        self.stub = stub

    async def enqueue(self, *groups: buffer_pb2.Group, request_id: str = "") -> buffer_pb2.EnqueueGroupsResponse:
        with rpc_errors():
            return await self.stub.EnqueueGroups(
                buffer_pb2.EnqueueGroupsRequest(request_id=request_id or uuid.uuid4().hex, groups=groups)
            )

    async def lease(
        self,
        most: int = 1,
        *,
        worker: str = "w1",
        seconds: float = 60,
        wait: float = 0,
        request_id: str = "",
        prefer: policy_pb2.PolicyRef | None = None,
        only: bool = False,
        avoid: Sequence[policy_pb2.PolicyRef] = (),
    ) -> list[buffer_pb2.LeasedGroup]:
        request = buffer_pb2.LeaseGroupsRequest(
            request_id=request_id or uuid.uuid4().hex,
            worker_id=worker,
            max_groups=most,
            lease_seconds=seconds,
            wait_seconds=wait,
            prefer_policy=prefer,
            only_preferred=only,
            avoid_policies=avoid,
        )
        with rpc_errors():
            return list((await self.stub.LeaseGroups(request)).groups)

    async def append(
        self, run_id: str, *scored: trajectory_pb2.ScoredTrajectory
    ) -> buffer_pb2.AppendTrajectoriesResponse:
        with rpc_errors():
            return await self.stub.AppendTrajectories(
                buffer_pb2.AppendTrajectoriesRequest(run_id=run_id, trajectories=scored)
            )

    async def ack(self, run_id: str, consumer: str, *group_ids: str, version: int = 0) -> None:
        with rpc_errors():
            await self.stub.AckGroups(
                buffer_pb2.AckGroupsRequest(
                    run_id=run_id, consumer=consumer, policy_version=version, group_ids=group_ids
                )
            )

    async def discard(self, run_id: str, reason: str, *group_ids: str) -> None:
        with rpc_errors():
            await self.stub.DiscardGroups(
                buffer_pb2.DiscardGroupsRequest(run_id=run_id, reason=reason, group_ids=group_ids)
            )

    async def read(self, run_id: str, *group_ids: str) -> list[buffer_pb2.ReadGroupsResponse]:
        with rpc_errors():
            return [
                group
                async for group in self.stub.ReadGroups(
                    buffer_pb2.ReadGroupsRequest(run_id=run_id, group_ids=group_ids)
                )
            ]

    async def states(self, run_id: str, channel: str = "") -> dict[str, str]:
        with rpc_errors():
            listed = await self.stub.ListGroups(buffer_pb2.ListGroupsRequest(run_id=run_id, channel=channel))
        return {
            group.group_id: buffer_pb2.GroupState.Name(group.state).removeprefix("GROUP_STATE_")
            for group in listed.groups
        }

    async def audit(self, run_id: str) -> buffer_pb2.AuditRunResponse:
        with rpc_errors():
            return await self.stub.AuditRun(buffer_pb2.AuditRunRequest(run_id=run_id))

    async def stats(self) -> buffer_pb2.GetQueueStatsResponse:
        with rpc_errors():
            return await self.stub.GetQueueStats(buffer_pb2.GetQueueStatsRequest())


def client_of(channel: grpc.aio.Channel) -> Client:
    return Client(buffer_pb2_grpc.BufferServiceStub(channel))


@pytest.fixture(scope="session")
def valkey_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as process:
        yield process


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[ValkeyProcess]:
    """For tests that kill, fill or look into it."""
    with valkey_server(tmp_path / "valkey") as process:
        yield process


@pytest.fixture
async def client(valkey_process: ValkeyProcess) -> AsyncIterator[Client]:
    """A client of a buffer on an empty store."""
    async with redis.asyncio.Redis.from_url(valkey_process.url) as store:
        await store.flushall()
    service = BufferService(BufferSettings(redis_url=valkey_process.url, max_open_groups=50))
    async with running_server(service) as address, connect(address) as channel:
        yield client_of(channel)


@pytest.fixture
def make_client() -> "Callable[[grpc.aio.Channel], Client]":
    return client_of
