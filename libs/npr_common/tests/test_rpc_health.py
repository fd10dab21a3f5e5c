"""Health as peers see it: a watch tells every change from loading to draining, for the process and its services."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from npr_common.rpc import ServerSettings, connect
from npr_common.rpc.server import ReportsHealth, RunningServer

NAME = "npr.test.v1.ModelService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class LoadingService:
    """Loads until it is told that it has, and drains until it is told that it has."""

    name = "loading"
    grpc_names = (NAME,)

    def __init__(self) -> None:
        self.loading, self.loaded, self.drained = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.report: Callable[[bool], Awaitable[None]] | None = None

    def register(self, server: grpc.aio.Server) -> None:
        pass

    def report_health_to(self, report: Callable[[bool], Awaitable[None]]) -> None:
        self.report = report

    async def start(self) -> None:
        self.loading.set()
        await self.loaded.wait()

    async def drain(self) -> None:
        await self.drained.wait()


@asynccontextmanager
async def watched(running: RunningServer, *names: str) -> AsyncIterator[Callable[[], Awaitable[list[int]]]]:
    """A function that waits for the next status of each watched name."""
    async with connect(running.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        streams = [stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in names]

        async def statuses() -> list[int]:
            async with asyncio.timeout(10):
                return [(await stream.read()).status for stream in streams]

        yield statuses


@pytest.mark.parametrize("names", [("",), (NAME,), ("", NAME)])
async def test_a_watch_tells_every_change_from_loading_to_draining(names: tuple[str, ...]) -> None:
    service = LoadingService()
    running = RunningServer(service, ServerSettings(drain_seconds=10))
    starting = asyncio.create_task(running.start())
    await service.loading.wait()
    async with watched(running, *names) as statuses:
        assert await statuses() == [NOT_SERVING] * len(names)
        service.loaded.set()
        await starting
        assert await statuses() == [SERVING] * len(names)

        assert isinstance(service, ReportsHealth)
        assert service.report is not None
        await service.report(False)
        assert await statuses() == [NOT_SERVING] * len(names)
        await service.report(True)
        assert await statuses() == [SERVING] * len(names)

        stopping = asyncio.create_task(running.stop())
        assert await statuses() == [NOT_SERVING] * len(names)
        assert not stopping.done()
        service.drained.set()
    await stopping


async def test_a_watch_of_what_is_not_served_says_so_and_stays_open() -> None:
    service = LoadingService()
    service.loaded.set()
    service.drained.set()
    running = RunningServer(service, ServerSettings(drain_seconds=10))
    await running.start()
    async with watched(running, "npr.test.v1.OtherService", NAME) as statuses:
        assert await statuses() == [SERVICE_UNKNOWN, SERVING]
    await running.stop()
