"""A service on loopback for the length of a test."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from npr_common.rpc.server import RunningServer, ServerSettings, Service


@asynccontextmanager
async def running_server(service: Service, settings: ServerSettings | None = None) -> AsyncIterator[str]:
    """Serves `service` on a free loopback port; yields its address; drains at the end."""
    running = RunningServer(service, settings or ServerSettings(drain_seconds=5.0))
    await running.start()
    try:
        yield running.address
    finally:
        await running.stop()
