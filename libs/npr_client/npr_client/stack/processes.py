"""Processes named by pid and start time, so that a recycled pid is never taken for the process that had it before."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import psutil
from pydantic import BaseModel, ConfigDict

STACK_VARIABLE = "NPR_STACK_ID"
COMPONENT_VARIABLE = "NPR_STACK_COMPONENT"
# The kernel tells start times in ticks since boot, and the boot time in whole seconds that a clock adjustment may move.
START_TIME_TOLERANCE_SECONDS = 2.0
POLL_SECONDS = 0.2


class ProcessIdentity(BaseModel):
    """A process of this boot: its pid and when it started (seconds since the epoch)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int
    started_at: float

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """The process that has this pid now.

        Raises:
            psutil.NoSuchProcess: there is none.
        """
        return cls(pid=pid, started_at=psutil.Process(pid).create_time())

    def same_as(self, other: ProcessIdentity | None) -> bool:
        """Whether both name one process; start times read at two moments may differ a little."""
        return other is not None and self.pid == other.pid and self._started_with(other.started_at)

    def _started_with(self, started_at: float) -> bool:
        return abs(self.started_at - started_at) <= START_TIME_TOLERANCE_SECONDS

    def process(self) -> psutil.Process | None:
        """A handle on the process; None when it is gone, is a zombie, or its pid is another's now."""
        try:
            process = psutil.Process(self.pid)
            same = self._started_with(process.create_time())
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    def alive(self) -> bool:
        return self.process() is not None

    @property
    def uptime_seconds(self) -> float:
        return max(0.0, time.time() - self.started_at)

    def signal(self, number: int) -> None:
        """Signals the process; nothing happens when it is gone. psutil checks the start time once more."""
        process = self.process()
        if process is None:
            return
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            return


async def wait_for_exit(identity: ProcessIdentity) -> None:
    """Returns when the process is gone. It need not be a child; a child is reaped by its owner."""
    if hasattr(os, "pidfd_open"):
        await _wait_by_descriptor(identity)
        return
    while identity.alive():  # noqa: ASYNC110 - where there are no pidfds, nothing tells of another's child
        await asyncio.sleep(POLL_SECONDS)


async def _wait_by_descriptor(identity: ProcessIdentity) -> None:
    """A pidfd becomes readable when its process ends: no polling."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _resolve, ended)
    try:
        # The pid may have become another's before the descriptor was opened.
        if identity.alive():
            await ended
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def marked_processes(stack_id: str, component: str | None = None) -> Iterator[ProcessIdentity]:
    """Living processes, less this one, that carry a stack's mark in their environment, of one component or of all.

    They find what was started just before its starter was killed, and what a killed service left behind.
    """
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            environment = process.environ()
            if environment.get(STACK_VARIABLE) != stack_id or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if component is None or environment.get(COMPONENT_VARIABLE) == component:
                yield ProcessIdentity(pid=process.pid, started_at=process.create_time())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
