"""Trajectories that the buffer keeps, and the audit of a run."""

from __future__ import annotations

from collections.abc import Sequence

from npr.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from npr_client.sdk.channels import Channels
from npr_common.errors import NotFoundError

SERVICE = "buffer"


class Trajectories:
    """Reading calls of the buffer."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    @property
    def _stub(self) -> buffer_pb2_grpc.BufferServiceAsyncStub:
        return buffer_pb2_grpc.BufferServiceStub(self._channels.to(SERVICE))

    async def get(self, run_id: str, trajectory_id: str) -> buffer_pb2.GetTrajectoryResponse:
        """One trajectory with its score and its group."""
        request = buffer_pb2.GetTrajectoryRequest(run_id=run_id, trajectory_id=trajectory_id)
        return await self._channels.call(SERVICE, lambda: self._stub.GetTrajectory(request))

    async def find(self, run_ids: Sequence[str], trajectory_id: str) -> buffer_pb2.GetTrajectoryResponse:
        """The trajectory in the first of these runs that has it."""
        for run_id in run_ids:
            try:
                return await self.get(run_id, trajectory_id)
            except NotFoundError:
                continue
        message = f"no trajectory {trajectory_id!r} in {len(run_ids)} runs: `npr trajectories RUN` lists those of a run"
        raise NotFoundError(message, reason="TRAJECTORY_NOT_FOUND", metadata={"trajectory_id": trajectory_id})

    async def groups(self, run_id: str, channel: str = "") -> list[buffer_pb2.GroupSummary]:
        """Summaries of a run's groups, in the order in which they were asked for."""
        groups: list[buffer_pb2.GroupSummary] = []
        token = ""
        while True:
            page = await self._page(buffer_pb2.ListGroupsRequest(run_id=run_id, channel=channel, page_token=token))
            groups.extend(page.groups)
            token = page.next_page_token
            if not token:
                return groups

    async def _page(self, request: buffer_pb2.ListGroupsRequest) -> buffer_pb2.ListGroupsResponse:
        return await self._channels.call(SERVICE, lambda: self._stub.ListGroups(request))

    async def audit(self, run_id: str) -> buffer_pb2.AuditRunResponse:
        """A recount of everything that the run holds."""
        request = buffer_pb2.AuditRunRequest(run_id=run_id)
        return await self._channels.call(SERVICE, lambda: self._stub.AuditRun(request))
