"""Judging answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from npr.reward.v1 import reward_pb2, reward_pb2_grpc
from npr.types.v1 import trajectory_pb2
from npr_client.sdk.channels import Channels
from npr_common.errors import ResourceExhaustedError

SERVICE = "reward"
BATCH_ITEMS = 64
BATCHES_AT_ONCE = 4
DEFAULT_RETRY_SECONDS = 0.5


class Verification:
    """Calls of the reward service."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    @property
    def _stub(self) -> reward_pb2_grpc.RewardServiceAsyncStub:
        return reward_pb2_grpc.RewardServiceStub(self._channels.to(SERVICE))

    async def score(self, items: Sequence[reward_pb2.ScoreItem], dialect: str = "") -> list[trajectory_pb2.Score]:
        """One score an item, in their order, however many there are."""
        gate = asyncio.Semaphore(BATCHES_AT_ONCE)

        async def batch(start: int) -> Sequence[trajectory_pb2.Score]:
            request = reward_pb2.ScoreRequest(items=items[start : start + BATCH_ITEMS], dialect=dialect)
            async with gate:
                return await self._score_when_there_is_room(request)

        batches = await asyncio.gather(*(batch(start) for start in range(0, len(items), BATCH_ITEMS)))
        return [score for scores in batches for score in scores]

    async def _score_when_there_is_room(self, request: reward_pb2.ScoreRequest) -> Sequence[trajectory_pb2.Score]:
        while True:
            try:
                return (await self._channels.call(SERVICE, lambda: self._stub.Score(request))).scores
            except ResourceExhaustedError as error:
                await asyncio.sleep(error.retry_after_seconds or DEFAULT_RETRY_SECONDS)

    async def verifiers(self) -> list[reward_pb2.Verifier]:
        """The verifiers that can be named, sorted by name."""
        request = reward_pb2.ListVerifiersRequest()
        return list((await self._channels.call(SERVICE, lambda: self._stub.ListVerifiers(request))).verifiers)
