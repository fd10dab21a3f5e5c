"""Channels of one client, one a service, opened when they are first used."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc

from npr_client.sdk.addresses import ServiceAddresses
from npr_common.errors import CancelledError, UnavailableError, rpc_errors
from npr_common.rpc.client import call_durably, connect

T = TypeVar("T")

DEFAULT_PATIENCE_SECONDS = 120.0
RECONNECT_SECONDS = 0.2


class Channels:
    """The services as one client sees them."""

    def __init__(self, addresses: ServiceAddresses, patience_seconds: float = DEFAULT_PATIENCE_SECONDS) -> None:
        self._addresses = addresses
        self._patience_seconds = patience_seconds
        self._open: dict[str, grpc.aio.Channel] = {}

    def to(self, service: str) -> grpc.aio.Channel:
        """The channel to a service; FAILED_PRECONDITION when nobody knows where it is."""
        if service not in self._open:
            self._open[service] = connect(self._addresses[service])
        return self._open[service]

    async def call(self, service: str, call: Callable[[], Awaitable[T]]) -> T:
        """Awaits an idempotent call, through restarts of the service."""
        return await call_durably(call, whom=service, deadline_seconds=self._patience_seconds)

    async def stream(self, service: str, open_stream: Callable[[], AsyncIterable[T]]) -> AsyncIterator[T]:
        """Messages of a stream that `open_stream` opens anew, where it was, after the service has gone away.

        Raises `UnavailableError` when the service has been silent for the client's patience.
        """
        silent_since = time.monotonic()
        while True:
            try:
                with rpc_errors():
                    async for message in open_stream():
                        yield message
                        silent_since = time.monotonic()
            except (UnavailableError, CancelledError) as error:  # a server that drains cancels its streams
                if time.monotonic() - silent_since > self._patience_seconds:
                    message_text = f"{service} has not answered for {self._patience_seconds:.0f} s; see `npr status`"
                    raise UnavailableError(message_text, metadata={"service": service}) from error
            else:
                return
            await asyncio.sleep(RECONNECT_SECONDS)

    async def close(self) -> None:
        """Closes all channels."""
        for channel in self._open.values():
            await channel.close()
        self._open.clear()
