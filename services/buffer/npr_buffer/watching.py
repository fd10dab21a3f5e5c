"""WatchChannel: a channel's counts, once at the start and after every change, until nothing is left to wait for."""

import asyncio
from collections.abc import AsyncIterator

from npr.buffer.v1 import buffer_pb2
from npr_buffer.store.run_store import RunStore
from npr_buffer.store.wakeups import Wakeups, wait_for
from npr_common.errors import UnavailableError

COALESCE_SECONDS = 0.1


class Watching:
    """Streams counts; changes within 100 ms are one message."""

    def __init__(self, store: RunStore, wakeups: Wakeups, recheck_seconds: float) -> None:
        self._store = store
        self._wakeups = wakeups
        self._recheck_seconds = recheck_seconds
        self._draining = False

    async def watch(self, run_id: str, channel: str) -> AsyncIterator[buffer_pb2.WatchChannelResponse]:
        """Counts as they change; ends when no group waits or is leased (at once for a channel without groups)."""
        said: buffer_pb2.WatchChannelResponse | None = None
        with self._wakeups.changes(run_id, channel) as changed:
            while True:
                if self._draining:
                    raise UnavailableError("the buffer is shutting down; watch again", reason="DRAINING")
                changed.clear()
                counts = await self._store.counts(run_id, channel)
                if counts != said:
                    yield counts
                    said = counts
                if counts.waiting == 0 and counts.leased == 0:
                    return
                await wait_for(changed, self._recheck_seconds)
                await asyncio.sleep(COALESCE_SECONDS)  # collects the changes of one burst

    def drain(self) -> None:
        """Ends the streams with UNAVAILABLE, so that nobody takes the end for completion."""
        self._draining = True
        self._wakeups.wake_all()
