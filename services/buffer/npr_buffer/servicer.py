"""The RPCs of `npr.buffer.v1.BufferService`: check the request, do it, answer. The proto is the contract."""
# ruff: noqa: N802 - the proto names the methods

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from npr.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from npr_buffer import requests
from npr_buffer.audit import audit_run
from npr_buffer.keeper import Keeper
from npr_buffer.leasing import Leasing
from npr_buffer.store.gateway import RedisGateway
from npr_buffer.store.run_index import RunIndex
from npr_buffer.store.run_store import RunStore
from npr_buffer.watching import Watching

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]


class BufferServicer(buffer_pb2_grpc.BufferServiceServicer):
    """Stateless between calls: any number of replicas may serve the same Redis."""

    def __init__(
        self,
        *,
        gateway: RedisGateway,
        store: RunStore,
        index: RunIndex,
        leasing: Leasing,
        watching: Watching,
        keeper: Keeper,
    ) -> None:
        self._gateway = gateway
        self._store = store
        self._index = index
        self._leasing = leasing
        self._watching = watching
        self._keeper = keeper

    async def EnqueueGroups(
        self, request: buffer_pb2.EnqueueGroupsRequest, context: "Context"
    ) -> buffer_pb2.EnqueueGroupsResponse:
        run_id = requests.check_enqueue(request)
        added, duplicates = await self._store.enqueue(run_id, request.request_id, request.groups)
        await self._index.touch(run_id)
        return buffer_pb2.EnqueueGroupsResponse(added=added, duplicates=duplicates)

    async def LeaseGroups(
        self, request: buffer_pb2.LeaseGroupsRequest, context: "Context"
    ) -> buffer_pb2.LeaseGroupsResponse:
        leases = await self._leasing.lease(requests.lease_ask(request), request.wait_seconds)
        return buffer_pb2.LeaseGroupsResponse(groups=[lease.to_message() for lease in leases])

    async def RenewLeases(
        self, request: buffer_pb2.RenewLeasesRequest, context: "Context"
    ) -> buffer_pb2.RenewLeasesResponse:
        by_run = requests.check_renew(request)
        lease_ms = int(request.lease_seconds * 1000)
        replies = await asyncio.gather(
            *(self._store.renew(run_id, request.worker_id, lease_ms, ids) for run_id, ids in by_run.items())
        )
        await self._index.note_expired(sum(expired for expired, _ in replies))
        lost = [
            buffer_pb2.GroupKey(run_id=run_id, group_id=group_id)
            for run_id, (_, ids) in zip(by_run, replies, strict=True)
            for group_id in ids
        ]
        return buffer_pb2.RenewLeasesResponse(lost_groups=lost)

    async def ReturnGroups(
        self, request: buffer_pb2.ReturnGroupsRequest, context: "Context"
    ) -> buffer_pb2.ReturnGroupsResponse:
        by_run = requests.check_return(request)
        replies = await asyncio.gather(
            *(self._store.give_back(run_id, request.worker_id, ids) for run_id, ids in by_run.items())
        )
        await self._index.note_expired(sum(expired for expired, _ in replies))
        await asyncio.gather(*(self._index.touch(run_id) for run_id in by_run))
        return buffer_pb2.ReturnGroupsResponse(returned=sum(returned for _, returned in replies))

    async def AppendTrajectories(
        self, request: buffer_pb2.AppendTrajectoriesRequest, context: "Context"
    ) -> buffer_pb2.AppendTrajectoriesResponse:
        requests.check_append(request)
        return await self._store.append(request.run_id, request.trajectories)

    async def ListGroups(
        self, request: buffer_pb2.ListGroupsRequest, context: "Context"
    ) -> buffer_pb2.ListGroupsResponse:
        after, page_size = requests.check_list(request)
        groups, last = await self._store.summaries(
            request.run_id, request.channel, after, page_size, with_samples=not request.without_samples
        )
        return buffer_pb2.ListGroupsResponse(groups=groups, next_page_token="" if last is None else str(last))

    async def WatchChannel(
        self, request: buffer_pb2.WatchChannelRequest, context: "Context"
    ) -> AsyncIterator[buffer_pb2.WatchChannelResponse]:
        requests.check_run(request.run_id)
        async for counts in self._watching.watch(request.run_id, request.channel):
            yield counts

    async def ReadGroups(
        self, request: buffer_pb2.ReadGroupsRequest, context: "Context"
    ) -> AsyncIterator[buffer_pb2.ReadGroupsResponse]:
        requests.check_ids(request.run_id, request.group_ids)
        async for group in self._store.read(request.run_id, request.group_ids):
            yield group

    async def AckGroups(self, request: buffer_pb2.AckGroupsRequest, context: "Context") -> buffer_pb2.AckGroupsResponse:
        requests.check_ids(request.run_id, request.group_ids, consumer=request.consumer)
        await self._store.acknowledge(request.run_id, request.consumer, request.policy_version, request.group_ids)
        return buffer_pb2.AckGroupsResponse()

    async def DiscardGroups(
        self, request: buffer_pb2.DiscardGroupsRequest, context: "Context"
    ) -> buffer_pb2.DiscardGroupsResponse:
        requests.check_ids(request.run_id, request.group_ids, reason=request.reason)
        await self._store.discard(request.run_id, request.reason, request.group_ids)
        return buffer_pb2.DiscardGroupsResponse()

    async def GetTrajectory(
        self, request: buffer_pb2.GetTrajectoryRequest, context: "Context"
    ) -> buffer_pb2.GetTrajectoryResponse:
        requests.check_run(request.run_id)
        return await self._store.trajectory(request.run_id, request.trajectory_id)

    async def AuditRun(self, request: buffer_pb2.AuditRunRequest, context: "Context") -> buffer_pb2.AuditRunResponse:
        requests.check_run(request.run_id)
        return await audit_run(self._gateway, request.run_id)

    async def GetQueueStats(
        self, request: buffer_pb2.GetQueueStatsRequest, context: "Context"
    ) -> buffer_pb2.GetQueueStatsResponse:
        stats = await self._keeper.stats()
        return buffer_pb2.GetQueueStatsResponse(
            waiting_groups=stats.waiting,
            leased_groups=stats.leased,
            oldest_waiting_seconds=stats.oldest_waiting_seconds,
            expired_leases=stats.expired_leases,
        )

    async def DeleteRun(self, request: buffer_pb2.DeleteRunRequest, context: "Context") -> buffer_pb2.DeleteRunResponse:
        requests.check_run(request.run_id)
        await self._store.delete(request.run_id)
        return buffer_pb2.DeleteRunResponse()
