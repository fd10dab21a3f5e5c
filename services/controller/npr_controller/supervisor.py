"""Drives all runs from one leader.

Invariants: a run is driven exactly while its state is RUNNING and this replica leads; at most one driver a run; a
driver that fails leaves the run FAILED with one sentence; a driver that could not even write that is started again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from tenacity import AsyncRetrying, before_sleep_log, retry_if_exception_type, wait_random

from npr_common.rpc import NprError
from npr_controller.state import STORE_ERRORS, EventKind, RunState, RunStore, StateChangedError, keys
from npr_controller.state.journal import Journal
from npr_controller.state.leader import LeaderLease
from npr_controller.tasks import end

log = logging.getLogger(__name__)

# Notices wake the supervisor; this bounds how long a lost one goes unseen.
_RECHECK_SECONDS = 5.0

Drive = Callable[[Journal], Coroutine[Any, Any, None]]


class Supervisor:
    """Leads when it can; starts, watches and cancels drivers."""

    def __init__(self, store: RunStore, lease: LeaderLease, drive: Drive, retry_seconds: float = 1.0) -> None:
        self._store = store
        self._lease = lease
        self._drive = drive
        self._retry_seconds = retry_seconds
        self._drivers: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Leads whenever it can, until cancelled; waits for a Redis that is away or full."""
        patiently = AsyncRetrying(
            retry=retry_if_exception_type(STORE_ERRORS),
            wait=wait_random(0, self._retry_seconds),
            before_sleep=before_sleep_log(log, logging.WARNING),
        )
        async for attempt in patiently:
            with attempt:
                await self._lead_again_and_again()

    async def _lead_again_and_again(self) -> None:
        while True:
            await self._lease.acquire()
            log.info("this controller leads")
            try:
                await self._lead()
            finally:
                await self._cancel_drivers(list(self._drivers))
            log.warning("this controller leads no more")

    async def _lead(self) -> None:
        """Tends the runs until the lease is lost."""
        tasks = {asyncio.create_task(self._lease.keep()), asyncio.create_task(self._tend())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await end(tasks)

    async def _tend(self) -> None:
        async with self._store.listen(keys.NOTICES) as notices:
            while True:
                await self._reconcile()
                waking = asyncio.create_task(notices.wait(_RECHECK_SECONDS))
                try:
                    await asyncio.wait({waking, *self._drivers.values()}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await end([waking])

    async def _reconcile(self) -> None:
        """Makes the drivers those of the runs that are RUNNING."""
        for run_id in [run_id for run_id, task in self._drivers.items() if task.done()]:
            self._drivers.pop(run_id).result()
        running = await self._store.running()
        await self._cancel_drivers([run_id for run_id in self._drivers if run_id not in running])
        for run_id in running:
            if run_id not in self._drivers:
                self._drivers[run_id] = asyncio.create_task(self._drive_run(run_id), name=f"run {run_id}")

    async def _drive_run(self, run_id: str) -> None:
        journal = await Journal.open(self._store, run_id, self._lease.token)
        try:
            await self._drive(journal)
        except StateChangedError as error:
            log.info("run %s: %s", run_id, error.message)  # stopped, or another controller's now
        except STORE_ERRORS:
            raise
        except NprError as error:
            await self._fail(journal, error.message)
        except Exception as error:
            log.exception("run %s: unexpected error", run_id)
            await self._fail(journal, f"{type(error).__name__}: {error}; the controller's log has the traceback")

    async def _fail(self, journal: Journal, sentence: str) -> None:
        log.error("run %s failed: %s", journal.run.run_id, sentence)
        with contextlib.suppress(StateChangedError):  # stopped, or another's, in the meantime: its word stands
            await journal.record(EventKind.FAILED, sentence, state=RunState.FAILED, error=sentence)

    async def _cancel_drivers(self, run_ids: list[str]) -> None:
        await end([self._drivers.pop(run_id) for run_id in run_ids])
