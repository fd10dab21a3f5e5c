"""The buffer, as the learner sees it: groups to read, groups to acknowledge."""

from collections.abc import Sequence

import grpc

from npr.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from npr_common.rpc import call_durably, connect

_BUFFER = "the buffer"


class Experience:
    """Reads and acknowledges groups; waits for a buffer that is being restarted."""

    def __init__(self, address: str, wait_seconds: float) -> None:
        self._channel: grpc.aio.Channel = connect(address)
        self._stub = buffer_pb2_grpc.BufferServiceStub(self._channel)
        self._wait_seconds = wait_seconds

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()

    async def read(self, run_id: str, group_ids: Sequence[str]) -> list[buffer_pb2.ReadGroupsResponse]:
        """Whole groups in the order asked for. Raises the buffer's typed errors."""
        request = buffer_pb2.ReadGroupsRequest(run_id=run_id, group_ids=group_ids)

        async def read_all() -> list[buffer_pb2.ReadGroupsResponse]:
            return [group async for group in self._stub.ReadGroups(request)]

        return await call_durably(read_all, whom=_BUFFER, deadline_seconds=self._wait_seconds)

    async def acknowledge(self, run_id: str, consumer: str, policy_version: int, group_ids: Sequence[str]) -> None:
        """Says that the step which used the groups is durable. A repeat changes nothing."""
        request = buffer_pb2.AckGroupsRequest(
            run_id=run_id, consumer=consumer, policy_version=policy_version, group_ids=group_ids
        )

        async def acknowledge() -> buffer_pb2.AckGroupsResponse:
            return await self._stub.AckGroups(request)

        await call_durably(acknowledge, whom=_BUFFER, deadline_seconds=self._wait_seconds)
