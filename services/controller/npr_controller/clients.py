"""The two services that a run is made with, as the stages see them.

Invariants: every call may be repeated, so a service that restarts is waited for; every wait has a deadline and says
whom it waited for; errors are the typed ones of `npr_common.rpc`.
"""

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import grpc

from npr.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from npr.learner.v1 import learner_pb2, learner_pb2_grpc
from npr_common.rpc import (
    CancelledError,
    DeadlineExceededError,
    UnavailableError,
    call_durably,
    rpc_errors,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

ENQUEUE_LIMIT = 4096
# A service that dies this often within one call dies of the call.
REOPEN_LIMIT = 10


class BufferClient:
    """Work and experience of one run."""

    def __init__(self, channel: grpc.aio.Channel, run_id: str, patience_seconds: float) -> None:
        self._stub = buffer_pb2_grpc.BufferServiceStub(channel)
        self._run_id = run_id
        self._patience = patience_seconds

    async def enqueue(self, channel: str, groups: Sequence[buffer_pb2.Group]) -> None:
        """Adds groups, in order; those that exist are left as they are."""
        for start in range(0, len(groups), ENQUEUE_LIMIT):
            part = groups[start : start + ENQUEUE_LIMIT]
            request_id = f"{self._run_id}/{channel}/{part[0].group_id}/{part[-1].group_id}"
            request = buffer_pb2.EnqueueGroupsRequest(request_id=request_id, groups=part)
            await self._call(self._stub.EnqueueGroups, request)

    async def watch(self, channel: str, stall_seconds: float) -> AsyncIterator[buffer_pb2.WatchChannelResponse]:
        """The channel's counts after each change, until all its groups are READY or further.

        Raises `DeadlineExceededError` when nothing changes for `stall_seconds`.
        """
        request = buffer_pb2.WatchChannelRequest(run_id=self._run_id, channel=channel)
        counts = follow(lambda: self._stub.WatchChannel(request), whom="buffer", patience_seconds=self._patience)
        while True:
            try:
                async with asyncio.timeout(stall_seconds):
                    count = await anext(counts)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise DeadlineExceededError(
                    f"no rollout worker finished anything of {channel} for {stall_seconds:.0f} s: "
                    "check the rollout service with `npr status`, then `npr run --resume`",
                    reason="ROLLOUT_STALLED",
                ) from error
            yield count

    async def summaries(self, channel: str, *, with_samples: bool = True) -> list[buffer_pb2.GroupSummary]:
        """All groups of a channel in enqueue order."""
        groups: list[buffer_pb2.GroupSummary] = []
        token = ""
        while True:
            request = buffer_pb2.ListGroupsRequest(
                run_id=self._run_id, channel=channel, page_token=token, without_samples=not with_samples, page_size=1000
            )
            page = await self._call(self._stub.ListGroups, request)
            groups.extend(page.groups)
            token = page.next_page_token
            if not token:
                return groups

    async def read(self, group_ids: Sequence[str]) -> list[buffer_pb2.ReadGroupsResponse]:
        """Whole groups, in the order asked for."""

        async def read_all() -> list[buffer_pb2.ReadGroupsResponse]:
            request = buffer_pb2.ReadGroupsRequest(run_id=self._run_id, group_ids=group_ids)
            return [group async for group in self._stub.ReadGroups(request)]

        return await call_durably(read_all, whom="buffer", deadline_seconds=self._patience)

    async def acknowledge(self, consumer: str, policy_version: int, group_ids: Sequence[str]) -> None:
        """Marks groups CONSUMED."""
        request = buffer_pb2.AckGroupsRequest(
            run_id=self._run_id, consumer=consumer, policy_version=policy_version, group_ids=group_ids
        )
        await self._call(self._stub.AckGroups, request)

    async def discard(self, group_ids: Sequence[str], reason: str) -> None:
        """Marks groups DISCARDED; none is fine."""
        if group_ids:
            request = buffer_pb2.DiscardGroupsRequest(run_id=self._run_id, group_ids=group_ids, reason=reason)
            await self._call(self._stub.DiscardGroups, request)

    async def _call(self, method: Any, request: Any) -> Any:
        return await call_durably(lambda: method(request), whom="buffer", deadline_seconds=self._patience)


class LearnerClient:
    """The stages of one run."""

    def __init__(self, channel: grpc.aio.Channel, patience_seconds: float) -> None:
        self._stub = learner_pb2_grpc.LearnerServiceStub(channel)
        self._patience = patience_seconds

    async def start_stage(self, request: learner_pb2.StartStageRequest) -> learner_pb2.StartStageResponse:
        """Starts a stage, or answers with its frontier."""
        return await call_durably(
            lambda: self._stub.StartStage(request), whom="learner", deadline_seconds=self._patience
        )

    def train_step(self, request: learner_pb2.TrainStepRequest) -> AsyncIterator[learner_pb2.TrainStepResponse]:
        """Progress of a step and its result."""
        return follow(lambda: self._stub.TrainStep(request), whom="learner", patience_seconds=self._patience)

    def fine_tune(self, request: learner_pb2.FineTuneRequest) -> AsyncIterator[learner_pb2.FineTuneResponse]:
        """Progress of fine-tuning and its result."""
        return follow(lambda: self._stub.FineTune(request), whom="learner", patience_seconds=self._patience)


async def follow(
    open_stream: Callable[[], AsyncIterable[T]], *, whom: str, patience_seconds: float
) -> AsyncIterator[T]:
    """Everything that a repeatable stream says, opened again when its server goes away.

    After an outage the stream starts from its beginning, so a message may come again. Raises `UnavailableError`
    naming `whom` when it stays away for `patience_seconds`, or goes away `REOPEN_LIMIT` times.
    """
    for _ in range(REOPEN_LIMIT):
        first, rest = await call_durably(lambda: _opened(open_stream()), whom=whom, deadline_seconds=patience_seconds)
        try:
            with rpc_errors():
                for message in first:
                    yield message
                async for message in rest:
                    yield message
        except (UnavailableError, CancelledError) as error:  # CANCELLED: the server was told to stop
            log.warning("%s went away (%s); asking again", whom, error.message)
        else:
            return
    raise UnavailableError(
        f"{whom} went away {REOPEN_LIMIT} times during one call: its log says why", metadata={"service": whom}
    )


async def _opened(stream: AsyncIterable[T]) -> tuple[list[T], AsyncIterator[T]]:
    """The stream's first message, if it has one, and the rest: only a message shows that the server is there."""
    messages = aiter(stream)
    try:
        return [await anext(messages)], messages
    except StopAsyncIteration:
        return [], messages
