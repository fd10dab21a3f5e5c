"""What the buffer does unasked: reports whether Redis lives, sweeps ended leases, heals the index, measures depth.

Correctness needs none of it: lease calls sweep what they look at. It bounds how long a watcher may see a dead worker's
lease, and how long a lost index entry may hide a run.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from npr_buffer.leasing import Leasing
from npr_buffer.settings import BufferSettings
from npr_buffer.store.gateway import RedisGateway
from npr_buffer.store.run_index import RunIndex
from npr_common import telemetry
from npr_common.errors import NprError
from npr_common.telemetry import names

log = logging.getLogger(__name__)

PING_TIMEOUT_SECONDS = 2.0

HealthReport = Callable[[bool], Awaitable[None]]


@dataclass(frozen=True)
class QueueStats:
    """Depth over all runs."""

    waiting: int
    leased: int
    oldest_waiting_seconds: float
    expired_leases: int


class Keeper:
    """One task, from `run` to its cancellation."""

    def __init__(self, gateway: RedisGateway, leasing: Leasing, index: RunIndex, settings: BufferSettings) -> None:
        self._gateway = gateway
        self._leasing = leasing
        self._index = index
        self._settings = settings
        self._waiting = telemetry.meter().create_gauge(names.METRIC_QUEUE_WAITING)
        self._leased = telemetry.meter().create_gauge(names.METRIC_QUEUE_LEASED)
        self._last_sweep = 0.0
        self._last_heal = 0.0

    async def wait_for_redis(self) -> None:
        """Returns once Redis answers; says whom it waits for."""
        while not await self._alive():
            log.warning("waiting for %s", self._gateway.whom)
            await asyncio.sleep(self._settings.ping_seconds)

    async def run(self, report_health: HealthReport) -> None:
        """Keeps on until cancelled. `report_health` is called at every change, starting from healthy."""
        healthy = True
        while True:
            alive = await self._alive()
            if alive != healthy:
                log.log(
                    logging.INFO if alive else logging.ERROR,
                    "%s %s",
                    self._gateway.whom,
                    "is back" if alive else "is gone",
                )
                await report_health(alive)
                healthy = alive
            if alive:
                await self._do_rounds()
            await asyncio.sleep(self._settings.ping_seconds)

    async def stats(self) -> QueueStats:
        """Depth now; sweeps ended leases on the way."""
        runs = await self._index.runs()
        peeks = await asyncio.gather(*(self._leasing.peek(run_id, generation) for run_id, generation in runs.items()))
        ages = [
            (peek.depth.now_ms - peek.depth.oldest_waiting_ms) / 1000
            for peek in peeks
            if peek.depth.oldest_waiting_ms is not None
        ]
        return QueueStats(
            waiting=sum(peek.depth.waiting for peek in peeks),
            leased=sum(peek.depth.leased for peek in peeks),
            oldest_waiting_seconds=max(ages, default=0.0),
            expired_leases=await self._index.expired_leases(),
        )

    async def _alive(self) -> bool:
        try:
            async with asyncio.timeout(PING_TIMEOUT_SECONDS):
                await self._gateway.command("PING")
        except (NprError, TimeoutError):
            return False
        return True

    async def _do_rounds(self) -> None:
        now = time.monotonic()
        try:
            if now - self._last_heal >= self._settings.heal_seconds:
                self._last_heal = now
                for run_id in await self._index.heal():
                    log.warning("run %s had work and was not in the index; it is again", run_id)
            if now - self._last_sweep >= self._settings.sweep_seconds:
                self._last_sweep = now
                stats = await self.stats()
                self._waiting.set(stats.waiting)
                self._leased.set(stats.leased)
        except NprError as error:  # the next round tries again; the ping decides about health
            log.warning("sweep failed: %s", error.message)
