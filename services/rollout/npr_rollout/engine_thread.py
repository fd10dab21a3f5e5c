"""The engines in a thread of their own, for asyncio.

Invariants:
- Only this thread touches an engine; others send it commands, which it runs between two steps.
- Whoever waits gets an answer: a result, or the fault or the stop that took its place. A command that is sent when the
  thread has ended is refused at once.
- Nothing that a command raises ends the thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from npr.types.v1 import policy_pb2
from npr_common.errors import InternalError, NprError, UnavailableError
from npr_rollout.engines import Engines
from npr_rollout.record.request import Event, FinishedEvent, Result
from npr_rollout.serving import MakeRequest, Serving, Submission
from npr_rollout.status import EngineStatus
from npr_rollout.swap import Build, InFlight, Swap, Swapped

__all__ = ["EngineThread", "MakeRequest", "Serving"]

T = TypeVar("T")
Command = Callable[[], None]


class EngineThread:
    """Submits, streams, aborts and swaps across the thread's border."""

    def __init__(
        self, torch_threads: int | None = None, report_health: Callable[[bool], None] = lambda healthy: None
    ) -> None:
        """`report_health` is called in the thread when the engine is down, and when one serves again."""
        self._torch_threads = torch_threads
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="npr-engine", daemon=True)
        self._engines = Engines(report_health)
        self._stopping = False
        self._obeys = False  # between the start and the end of the thread
        self._sending = threading.Lock()  # nothing is sent once the thread has looked for the last time

    # --- from asyncio ---

    @property
    def policy(self) -> policy_pb2.PolicyRef | None:
        """What new requests are decoded with."""
        return self._engines.policy

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer; None when nothing is served."""
        return self._engines.tokenizer

    @property
    def in_flight(self) -> int:
        """Requests on their way."""
        return self._engines.in_flight

    @property
    def recoveries(self) -> int:
        """How often the engine was made again after a fault."""
        return self._engines.recoveries

    def start(self) -> None:
        """Start the thread."""
        self._obeys = True
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its current step; whoever waits gets UNAVAILABLE."""
        await self.between_steps(self._stop)
        await asyncio.to_thread(self._thread.join)

    async def between_steps(self, function: Callable[[], T]) -> T:
        """Run a function in the thread, between two steps; its result, or what it raised."""
        return await asyncio.wrap_future(self._call(function))

    async def check_can_swap(self) -> None:
        """Raises FailedPreconditionError while another swap is under way or an old engine still finishes."""
        await self.between_steps(self._engines.check_can_swap)

    async def replace(self, build: Build | None, in_flight: InFlight = InFlight.DRAIN) -> Swapped:
        """Serve what `build` makes, which is called in the thread; with None, nothing: then no engine is in memory.

        Cancelling the call before that leaves all as it is.

        Raises:
            FailedPreconditionError: another swap is under way, or the engine can't be made; what was served still is.
        """
        done: Future[Swapped] = Future()
        self._send(lambda: self._engines.request_swap(Swap(build, in_flight, done)))
        return await asyncio.wrap_future(done)

    async def stream(self, make_request: MakeRequest) -> AsyncGenerator[Event]:
        """Events of one request, made for the policy that serves it; closing the iterator aborts it.

        Raises:
            InvalidArgumentError: the request can't be right.
            FailedPreconditionError: no policy is loaded.
            InternalError: the engine failed.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event | NprError] = asyncio.Queue()
        submission = Submission(make_request, lambda event: _deliver(loop, events, event), accepted := Future[None]())
        self._send(lambda: self._engines.submit(submission))
        finished = False
        try:
            await asyncio.wrap_future(accepted)
            while not finished:
                event = await events.get()
                if isinstance(event, NprError):
                    finished = True
                    raise event
                finished = isinstance(event, FinishedEvent)
                yield event
        finally:
            if not finished:
                with contextlib.suppress(UnavailableError):  # a thread that has ended decodes nothing
                    self._send(lambda: self._engines.withdraw(submission))

    async def decode(self, make_request: MakeRequest) -> Result:
        """The result of one request; cancelling the call aborts it. Raises as `stream` does."""
        events = self.stream(make_request)
        try:
            async for event in events:
                if isinstance(event, FinishedEvent):
                    return event.result
        finally:
            await events.aclose()
        raise InternalError("A request ended without a result.")

    async def status(self, *, audit: bool = False) -> tuple[EngineStatus, tuple[str, ...]]:
        """Counts since the thread started, and the audit's problems when asked for."""
        return await self.between_steps(lambda: self._engines.status(audit=audit))

    def status_now(self, timeout_seconds: float) -> EngineStatus:
        """The counts, for callers outside of asyncio. Raises TimeoutError when the engine is busy for longer."""
        return self._call(lambda: self._engines.status(audit=False)).result(timeout_seconds)[0]

    # --- across the border ---

    def _call(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function()
            except Exception as error:  # noqa: BLE001 - it belongs to the one who called
                future.set_exception(error)
            else:
                future.set_result(result)

        self._send(command)
        return future

    def _send(self, command: Command) -> None:
        with self._sending:
            if not self._obeys:
                raise UnavailableError("The rollout worker has stopped.")
            self._commands.put(command)

    # --- in the thread ---

    def _run(self) -> None:
        if self._torch_threads is not None:
            torch.set_num_threads(self._torch_threads)
        while not self._stopping:
            self._obey(wait=not self._engines.busy)
            self._engines.advance()
        with self._sending:
            self._obeys = False
        self._obey(wait=False)  # what was sent meanwhile is refused

    def _obey(self, *, wait: bool) -> None:
        """Run all commands; with `wait`, at least one."""
        if wait:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _stop(self) -> None:
        self._stopping = True
        self._engines.stop()


def _deliver(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Event | NprError], event: Event | NprError) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(events.put_nowait, event)
