"""A running reward service and its stub."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from npr.reward.v1 import reward_pb2_grpc
from npr_common.rpc.client import connect
from npr_common.testing.servers import running_server
from npr_reward.service import RewardService
from npr_reward.settings import RewardSettings


@pytest.fixture
async def stub() -> AsyncIterator[reward_pb2_grpc.RewardServiceAsyncStub]:
    """A stub of a service with default limits and two sandbox processes."""
    async with (
        running_server(RewardService(RewardSettings(workers=2))) as address,
        connect(address) as channel,
    ):
        yield reward_pb2_grpc.RewardServiceStub(channel)
