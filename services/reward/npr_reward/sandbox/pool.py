"""A fixed number of sandbox workers behind a bounded queue.

Invariants:
- Every admitted job gets a verdict, or its caller is cancelled; a job that fails twice is unscorable.
- No more than `max_waiting` verdicts are pending; whoever comes then is told when to come again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from npr_common.errors import ResourceExhaustedError
from npr_reward.sandbox.job import Job
from npr_reward.sandbox.limits import Limits
from npr_reward.sandbox.worker import Worker, WorkerFailure, fork_server
from npr_reward.verdict import Verdict
from npr_reward.verifiers import BUILT_IN

log = logging.getLogger(__name__)

_ATTEMPTS = 2
_TYPICAL_SECONDS = 0.005  # a verdict of an honest answer: what a refused caller's waiting time is estimated from


class SandboxPool:
    """Judges jobs on `size` processes, each job under `limits`."""

    def __init__(
        self,
        *,
        size: int | None = None,
        limits: Limits | None = None,
        max_waiting: int = 8192,
        verifier_paths: Sequence[str] = BUILT_IN,
    ) -> None:
        """Starts nothing yet. `size` defaults to the number of cores this process may use."""
        context = fork_server()
        count = size or len(os.sched_getaffinity(0))
        self._workers = [Worker(context, limits or Limits(), verifier_paths) for _ in range(count)]
        self._idle: asyncio.Queue[Worker] = asyncio.Queue()
        self._max_waiting = max_waiting
        self._waiting = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def waiting(self) -> int:
        """Admitted jobs without a verdict."""
        return self._waiting

    @property
    def pids(self) -> tuple[int, ...]:
        """The live sandbox processes."""
        return tuple(worker.pid for worker in self._workers if worker.pid is not None)

    async def start(self) -> None:
        """Starts every process, the fork server first. Raises WorkerFailure when the sandbox can't run here."""
        for worker in self._workers:
            await worker.start()
            self._idle.put_nowait(worker)

    def close(self) -> None:
        """Kills every process."""
        for worker in self._workers:
            worker.kill()

    @contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """Holds places in the queue for `count` jobs. Raises ResourceExhaustedError when there are not so many."""
        if self._waiting + count > self._max_waiting:
            raise ResourceExhaustedError(
                f"{self._waiting} verdicts are pending and {count} more pass the limit of {self._max_waiting}; "
                "send smaller batches, try again later, or add reward replicas",
                reason="VERDICTS_PENDING",
                retry_after_seconds=max(0.1, self._waiting * _TYPICAL_SECONDS / len(self._workers)),
            )
        self._take(count)
        try:
            yield
        finally:
            self._take(-count)

    async def emptied(self) -> None:
        """Returns when no verdict is pending."""
        await self._empty.wait()

    async def judge(self, job: Job) -> Verdict:
        """The verdict on a job that has been admitted; unscorable when two processes in a row fail on it."""
        failure = WorkerFailure("never tried")
        for _ in range(_ATTEMPTS):
            worker = await self._idle.get()
            try:
                return await worker.judge(job)
            except WorkerFailure as error:
                log.warning("verifier %s failed: %s", job.verifier, error)
                failure = error
            finally:
                self._idle.put_nowait(worker)
        return Verdict.unscorable(f"the verifier failed {_ATTEMPTS} times: {failure}")

    def _take(self, places: int) -> None:
        self._waiting += places
        if self._waiting:
            self._empty.clear()
        else:
            self._empty.set()
