"""The service's side of one sandbox process.

Invariants:
- One job at a time. A process is used again only after it answered: a deadline, a death or a cancelled caller kills it.
- A dead process is replaced when the next job comes, so a `Worker` never runs out.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess

from npr_reward.sandbox.child import READY, serve
from npr_reward.sandbox.job import Job, decode_verdict
from npr_reward.sandbox.limits import Limits
from npr_reward.verdict import Verdict

_START_SECONDS = 60.0


class WorkerFailure(Exception):
    """A job ended without a verdict."""


class DeadlinePassed(WorkerFailure):
    """The process was killed at the job's deadline."""


class ProcessDied(WorkerFailure):
    """The process ended by itself: out of memory, an exception in the verifier, or somebody's kill."""


def fork_server() -> ForkServerContext:
    """The context whose server has the verifiers loaded; the first process that it starts starts the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["npr_reward.sandbox.preload"])
    return context


class Worker:
    """A sandbox process and its successors."""

    def __init__(self, context: ForkServerContext, limits: Limits, verifier_paths: Sequence[str]) -> None:
        self._context = context
        self._limits = limits
        self._verifier_paths = tuple(verifier_paths)
        self._process: ForkServerProcess | None = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int | None:
        """The process that judges now, if one lives."""
        return self._process.pid if self._process is not None and self._process.is_alive() else None

    async def start(self) -> None:
        """Makes sure that a live process waits for a job. Raises WorkerFailure when none can be started."""
        if self.pid is not None:
            return
        self.kill()
        # Here and not in the thread below: the fork server is to end with this thread, which lasts as long as the loop.
        forkserver.ensure_running()
        try:
            connection = await asyncio.to_thread(self._spawn)
            ready = await _receive(connection, _START_SECONDS) == READY
        except BaseException:
            self.kill()
            raise
        if not ready:
            self.kill()
            raise ProcessDied("a sandbox process said something else than that it is ready")

    async def judge(self, job: Job) -> Verdict:
        """The verdict on `job`. Raises DeadlinePassed or ProcessDied; the process is then gone."""
        await self.start()
        answered = False
        try:
            payload = await self._ask(job.encode())
            answered = True
        finally:
            if not answered:
                self.kill()
        return decode_verdict(payload)

    def kill(self) -> None:
        """Ends the process at once, whatever it is doing."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._connection = self._process = None

    def _spawn(self) -> Connection:
        ours, theirs = self._context.Pipe()
        self._connection = ours
        self._process = self._context.Process(
            target=serve, args=(theirs, self._limits, self._verifier_paths), name="npr-sandbox", daemon=True
        )
        self._process.start()
        theirs.close()
        return ours

    async def _ask(self, payload: bytes) -> bytes:
        assert self._connection is not None
        try:
            self._connection.send_bytes(payload)
        except OSError as error:
            raise ProcessDied("the sandbox process was gone") from error
        return await _receive(self._connection, self._limits.deadline_seconds)


async def _receive(connection: Connection, deadline_seconds: float) -> bytes:
    """The next message. Raises DeadlinePassed or ProcessDied."""
    try:
        async with asyncio.timeout(deadline_seconds):
            await _readable(connection)
        return connection.recv_bytes()
    except TimeoutError as error:
        raise DeadlinePassed(f"no verdict within {deadline_seconds:g} s") from error
    except (EOFError, OSError) as error:
        raise ProcessDied("the sandbox process ended before its verdict") from error


async def _readable(connection: Connection) -> None:
    """Returns when a message, or the end of the pipe, can be read."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection.fileno())
