"""Redis pub/sub turned into asyncio events, so that long polls sleep until something happened.

Pub/sub may lose a message (a reconnect); whoever waits also re-checks at a bounded interval. A (re)subscription wakes
everybody, for they may have missed something. Works across any number of buffer replicas.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from redis.exceptions import RedisError

from npr_buffer.store import keys
from npr_buffer.store.gateway import RedisGateway

log = logging.getLogger(__name__)

RECONNECT_SECONDS = 0.2


class Wakeups:
    """Events by topic; `listen` feeds them."""

    def __init__(self, gateway: RedisGateway) -> None:
        self._gateway = gateway
        self._waiters: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    @contextlib.contextmanager
    def work(self) -> Iterator[asyncio.Event]:
        """An event that is set whenever work may have begun to wait, in any run."""
        with self._topic(keys.WORK_CHANNEL) as event:
            yield event

    @contextlib.contextmanager
    def changes(self, run_id: str, channel: str) -> Iterator[asyncio.Event]:
        """An event that is set whenever a group of the channel may have changed."""
        with self._topic(_change_topic(keys.changed_channel(run_id), channel)) as event:
            yield event

    def wake_all(self) -> None:
        """Sets every event."""
        for events in self._waiters.values():
            for event in events:
                event.set()

    async def listen(self) -> None:
        """Feeds the events until cancelled, over as many connections as it takes."""
        while True:
            try:
                await self._listen_once()
            except RedisError as error:
                log.warning("lost the subscription to %s (%s); subscribing again", self._gateway.whom, error)
                await asyncio.sleep(RECONNECT_SECONDS)  # Redis is down: the pause between two attempts

    async def _listen_once(self) -> None:
        async with self._gateway.pubsub() as subscription:
            await subscription.subscribe(keys.WORK_CHANNEL)
            await subscription.psubscribe(keys.CHANGED_PATTERN)
            async for message in subscription.listen():
                self._dispatch(message)

    def _dispatch(self, message: dict[str, Any]) -> None:
        if message["type"] == "message":
            self._wake(keys.WORK_CHANNEL)
        elif message["type"] == "pmessage":
            self._wake(_change_topic(message["channel"].decode(), message["data"].decode()))
        else:
            self.wake_all()

    def _wake(self, topic: str) -> None:
        for event in self._waiters.get(topic, ()):
            event.set()

    @contextlib.contextmanager
    def _topic(self, topic: str) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        self._waiters[topic].add(event)
        try:
            yield event
        finally:
            self._waiters[topic].discard(event)
            if not self._waiters[topic]:
                del self._waiters[topic]


def _change_topic(changed_channel: str, channel: str) -> str:
    return f"{changed_channel} {channel}"


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Waits until the event is set, at most `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
