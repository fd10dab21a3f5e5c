"""LeaseGroups over all runs: which run is served, and how a worker waits.

Fair across runs: among heads of equal priority the preferred policy goes first, then the group that was enqueued first,
whichever run it is in. All groups of one answer need the same policy. A waiting call sleeps until pub/sub says that
work came, a lease is about to end, or the re-check interval passes; it never polls in a loop.
"""

import asyncio
import json
import logging
import time
from dataclasses import dataclass, replace

from npr_buffer.store import keys
from npr_buffer.store.gateway import RedisGateway
from npr_buffer.store.records import Lease, LeaseReply, Peek
from npr_buffer.store.run_index import RunIndex
from npr_buffer.store.run_store import RunStore
from npr_buffer.store.wakeups import Wakeups, wait_for
from npr_common.errors import NprError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseAsk:
    """What a worker asks for. `prefer` and `need` are policy keys, or `ANY_POLICY`; `avoid` names those passed over."""

    request_id: str
    worker_id: str
    max_groups: int
    lease_ms: int
    prefer: str = keys.ANY_POLICY
    only_preferred: bool = False
    need: str = keys.ANY_POLICY
    avoid: tuple[str, ...] = ()

    @property
    def filters(self) -> list[str | bytes | int]:
        """Script arguments: prefer, only, need, avoid."""
        return [self.prefer, int(self.only_preferred), self.need, json.dumps(self.avoid)]


@dataclass(frozen=True)
class Round:
    """One look at all runs."""

    leases: tuple[Lease, ...]
    next_lease_end_seconds: float | None


class Leasing:
    """Chooses runs and takes leases from them."""

    def __init__(
        self, gateway: RedisGateway, store: RunStore, index: RunIndex, wakeups: Wakeups, recheck_seconds: float
    ) -> None:
        self._gateway = gateway
        self._store = store
        self._index = index
        self._wakeups = wakeups
        self._recheck_seconds = recheck_seconds
        self._draining = False
        self._giving_back: set[asyncio.Task[None]] = set()

    async def lease(self, ask: LeaseAsk, wait_seconds: float) -> tuple[Lease, ...]:
        """Leases of up to `max_groups` groups; waits up to `wait_seconds` for the first one."""
        deadline = time.monotonic() + wait_seconds
        with self._wakeups.work() as came:
            while True:
                came.clear()
                found = await self._look_or_give_back(ask)
                left = deadline - time.monotonic()
                if found.leases or left <= 0 or self._draining:
                    return found.leases
                until = [left, self._recheck_seconds]
                if found.next_lease_end_seconds is not None:
                    until.append(found.next_lease_end_seconds + 0.001)  # leases end on whole milliseconds
                await wait_for(came, min(until))

    async def drain(self) -> None:
        """Makes waiting calls answer with what is there, and finishes giving back what dropped clients had taken."""
        self._draining = True
        self._wakeups.wake_all()
        await asyncio.gather(*self._giving_back)

    async def peek(self, run_id: str, generation: int, ask: LeaseAsk | None = None) -> Peek:
        """Sweeps the run's ended leases, forgets it where it is idle, and says what a lease would find."""
        ask = ask or LeaseAsk("", "", 0, 0)
        peek = Peek.parse(await self._gateway.run_script("peek", run_id, [ask.request_id, *ask.filters]))
        await self._index.note_expired(peek.depth.expired)
        if peek.depth.idle:
            await self._index.forget_idle(run_id, generation)
        return peek

    async def _look_or_give_back(self, ask: LeaseAsk) -> Round:
        """One look; a client that leaves meanwhile must not keep groups until their leases end."""
        looking = asyncio.create_task(self._look(ask))
        try:
            return await asyncio.shield(looking)
        except asyncio.CancelledError:
            task = asyncio.create_task(self._give_back(ask, looking))
            self._giving_back.add(task)
            task.add_done_callback(self._giving_back.discard)
            raise

    async def _give_back(self, ask: LeaseAsk, looking: "asyncio.Task[Round]") -> None:
        try:
            for lease in (await looking).leases:
                await self._store.give_back(lease.group.run_id, ask.worker_id, [lease.group.group_id])
                await self._index.touch(lease.group.run_id)
        except NprError as error:
            log.warning("leases of a client that left stay until they end: %s", error.message)

    async def _look(self, ask: LeaseAsk) -> Round:
        runs = await self._index.runs()
        ends: list[float] = []
        if len(runs) > 1:
            candidates = await self._ranked(runs, ask, ends)
        else:
            candidates = list(runs)  # nothing to choose from: save the round trip
        leases: tuple[Lease, ...] = ()
        for run_id in candidates:
            reply = await self._take(run_id, runs[run_id], replace(ask, max_groups=ask.max_groups - len(leases)))
            if reply.depth.next_lease_end_seconds is not None:
                ends.append(reply.depth.next_lease_end_seconds)
            leases += reply.leases
            if len(leases) >= ask.max_groups:
                break
            if reply.policy is not None:
                ask = replace(ask, need=reply.policy)
        return Round(leases, min(ends, default=None))

    async def _ranked(self, runs: dict[str, int], ask: LeaseAsk, ends: list[float]) -> list[str]:
        """Runs to serve, best head first; only those that hold the request's leases where it was answered before."""
        peeks = await asyncio.gather(*(self.peek(run_id, generation, ask) for run_id, generation in runs.items()))
        by_run = dict(zip(runs, peeks, strict=True))
        ends += [end for peek in peeks if (end := peek.depth.next_lease_end_seconds) is not None]
        holders = [run_id for run_id, peek in by_run.items() if peek.holds_request]
        heads = {run_id: peek.head for run_id, peek in by_run.items() if peek.head is not None}
        return holders or sorted(heads, key=heads.__getitem__)

    async def _take(self, run_id: str, generation: int, ask: LeaseAsk) -> LeaseReply:
        arguments = [ask.request_id, ask.worker_id, ask.max_groups, ask.lease_ms, *ask.filters]
        reply = LeaseReply.parse(await self._gateway.run_script("lease", run_id, arguments))
        await self._index.note_expired(reply.depth.expired)
        if reply.depth.idle:
            await self._index.forget_idle(run_id, generation)
        return reply
