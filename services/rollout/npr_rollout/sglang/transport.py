"""The client's event loop in a thread of its own, for callers that are not asynchronous.

Invariants:
- Streams run side by side; what they bring waits in `arrivals`, in the order of its arrival.
- After `close` nothing runs, and nothing more arrives.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from npr_rollout.sglang.client import SglangClient
from npr_rollout.sglang.wire import Ask, Ended, Tokens

T = TypeVar("T")

_CLOSE_SECONDS = 10.0


class Transport:
    """One server, reached from one other thread.

    Attributes:
        arrivals: what the streams have brought.
        url: the server's.
    """

    def __init__(self, url: str, silence_seconds: float = math.inf) -> None:
        """See `SglangClient`."""
        self.url = url
        self.arrivals: queue.SimpleQueue[Tokens | Ended] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="npr-sglang", daemon=True)
        self._thread.start()
        self._client = self._run(lambda: _connect(url, silence_seconds), _CLOSE_SECONDS)

    def begin(self, asks: Sequence[Ask]) -> None:
        """Begin streams, together."""
        if asks:
            self._loop.call_soon_threadsafe(self._begin, asks)

    def abort(self, names: Sequence[str]) -> None:
        """Abort streams."""
        if names:
            self._loop.call_soon_threadsafe(self._spawn, lambda: self._client.abort(names))

    def ask(self, question: Callable[[SglangClient], Awaitable[T]], seconds: float | None = None) -> T:
        """The answer to a question to the server. Raises what the client raises, TimeoutError when it takes longer."""
        return self._run(lambda: question(self._client), seconds)

    def clear(self) -> None:
        """End all streams, and forget what they brought. Raises UnavailableError when they don't end."""
        self.ask(lambda client: client.end_streams())
        while not self.arrivals.empty():
            self.arrivals.get_nowait()

    def close(self) -> None:
        """End all streams, and the thread."""
        self._run(self._close, _CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, function: Callable[[], Awaitable[T]], seconds: float | None) -> T:
        async def run() -> T:
            return await function()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result(seconds)
        finally:
            future.cancel()  # nobody waits for it any more

    def _begin(self, asks: Sequence[Ask]) -> None:
        self._spawn(lambda: self._client.stream(asks, self.arrivals.put))

    def _spawn(self, function: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            await function()

        task = self._loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()


async def _connect(url: str, silence_seconds: float) -> SglangClient:
    return SglangClient(url, silence_seconds)
