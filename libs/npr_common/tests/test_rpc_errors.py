"""Typed errors survive the wire, anything else becomes INTERNAL, and a restarted service is waited for."""

from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npr.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from npr_common.errors import InternalError, NprError, ResourceExhaustedError, UnavailableError
from npr_common.rpc import FailedPreconditionError, ServerSettings, call_durably, connect, rpc_errors
from npr_common.rpc.server import RunningServer, is_loopback
from npr_common.testing.servers import running_server


class FaultyService(buffer_pb2_grpc.BufferServiceServicer):
    """Raises what it is told to."""

    name = "faulty"
    grpc_names = ("npr.buffer.v1.BufferService",)

    def __init__(self, error: Exception) -> None:
        self.error = error

    def register(self, server: grpc.aio.Server) -> None:
        buffer_pb2_grpc.add_BufferServiceServicer_to_server(self, server)

    async def start(self) -> None:
        pass

    async def drain(self) -> None:
        pass

    async def AckGroups(self, request: Any, context: Any) -> Any:
        raise self.error

    async def WatchChannel(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield buffer_pb2.WatchChannelResponse(waiting=1)
        raise self.error


async def failure_of(call: Awaitable[Any]) -> NprError:
    with pytest.raises(NprError) as caught, rpc_errors():
        await call
    return caught.value


async def test_a_typed_error_arrives_whole() -> None:
    sent = ResourceExhaustedError(
        "the queue is full", retry_after_seconds=1.5, metadata={"limit": "10"}, field_violations={"groups": "too many"}
    )
    async with running_server(FaultyService(sent)) as address, connect(address) as channel:
        got = await failure_of(buffer_pb2_grpc.BufferServiceStub(channel).AckGroups(buffer_pb2.AckGroupsRequest()))
    assert type(got) is ResourceExhaustedError
    assert (got.message, got.reason, got.metadata) == (sent.message, "RESOURCE_EXHAUSTED", {"limit": "10"})
    assert got.retry_after_seconds == 1.5
    assert got.field_violations == {"groups": "too many"}


async def test_a_stream_that_fails_keeps_what_it_sent() -> None:
    async with running_server(FaultyService(ValueError("x"))) as address, connect(address) as channel:
        received = []

        async def drain() -> None:
            async for item in buffer_pb2_grpc.BufferServiceStub(channel).WatchChannel(buffer_pb2.WatchChannelRequest()):
                received.append(item.waiting)

        got = await failure_of(drain())
    assert received == [1]
    assert type(got) is InternalError
    assert "ValueError" in got.message


@given(
    st.sampled_from(NprError.__subclasses__()),
    st.text(max_size=50),
    st.dictionaries(st.text("ab", min_size=1), st.text(max_size=9)),
)
def test_every_error_becomes_a_status_of_its_code(kind: type[NprError], message: str, metadata: dict[str, str]) -> None:
    status = kind(message, metadata=metadata).to_status()
    assert status.code == kind.code.value[0]
    assert status.message == message
    assert len(status.details) == 1


async def test_a_dead_service_is_named_after_the_deadline() -> None:
    async with connect("127.0.0.1:1") as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        with pytest.raises(UnavailableError, match="the buffer did not answer"):
            await call_durably(
                lambda: stub.AckGroups(buffer_pb2.AckGroupsRequest()), whom="the buffer", deadline_seconds=0.5
            )


async def test_plain_text_is_refused_off_loopback() -> None:
    server = RunningServer(FaultyService(ValueError()), ServerSettings(listen="0.0.0.0:0"))
    with pytest.raises(FailedPreconditionError, match="NPR_TLS_CERTIFICATE"):
        await server.start()


def test_loopback_is_recognised() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "localhost", "[::1]", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "example.org", "[::]", "")))
