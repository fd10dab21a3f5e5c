"""The engine in a thread of its own, for asyncio.

Invariants:
- Only this thread touches the engine; others send it commands, which it runs between two steps.
- A policy is replaced when nothing is on its way. Requests that come meanwhile wait for the new one.
- A fault of the engine is told to everyone who waits, and ends that engine, never the thread: the next policy that is
  loaded gets a new one.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch

from npr_common.errors import FailedPreconditionError, InternalError, NprError, UnavailableError
from npr_rollout.engine.engine import Engine, EngineStatus
from npr_rollout.engine.request import Event, FinishedEvent, Request, Result
from npr_rollout.policy_loader import LoadedPolicy

log = logging.getLogger(__name__)

T = TypeVar("T")
Sink = Callable[[Event | NprError], None]
MakeRequest = Callable[[LoadedPolicy], Request]


@dataclass(frozen=True)
class Serving:
    """A policy and the engine that serves it."""

    policy: LoadedPolicy
    engine: Engine


@dataclass(frozen=True)
class _Submission:
    make_request: MakeRequest
    sink: Sink
    accepted: Future[Request]


@dataclass(frozen=True)
class _Replacement:
    build: Callable[[], Serving]
    done: Future[None]


class EngineThread:
    """Submits, streams and aborts across the thread's border."""

    def __init__(self, torch_threads: int | None = None) -> None:
        self._torch_threads = torch_threads
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="npr-engine", daemon=True)
        self._stopped = False
        self._serving: Serving | None = None
        self._replacement: _Replacement | None = None
        self._held: list[_Submission] = []
        self._sinks: dict[str, Sink] = {}
        self._past = EngineStatus.zero()

    # --- from asyncio ---

    @property
    def policy(self) -> LoadedPolicy | None:
        """What is served."""
        serving = self._serving
        return serving.policy if serving is not None else None

    @property
    def in_flight(self) -> int:
        """Requests on their way."""
        return len(self._sinks) + len(self._held)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its current step; whoever waits gets UNAVAILABLE."""
        await asyncio.wrap_future(self._call(self._stop))
        await asyncio.to_thread(self._thread.join)

    async def replace(self, build: Callable[[], Serving]) -> None:
        """Serve what `build` makes, as soon as nothing is on its way. `build` runs in the engine's thread."""
        done: Future[None] = Future()
        self._commands.put(lambda: self._set_replacement(_Replacement(build, done)))
        await asyncio.wrap_future(done)

    async def stream(self, make_request: MakeRequest) -> AsyncGenerator[Event]:
        """Events of one request, made for the policy that serves it; closing the iterator aborts it.

        Raises:
            InvalidArgumentError: the request can't be right.
            FailedPreconditionError: no policy is loaded.
            InternalError: the engine failed.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event | NprError] = asyncio.Queue()
        submission = _Submission(
            make_request, lambda event: _deliver(loop, events, event), accepted := Future[Request]()
        )
        self._commands.put(lambda: self._submit(submission))
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
                self._commands.put(lambda: self._withdraw(submission))

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
        return await asyncio.wrap_future(self._call(lambda: self._status(audit)))

    def status_now(self, timeout_seconds: float) -> EngineStatus:
        """The counts, for callers outside of asyncio. Raises TimeoutError when the engine is busy for longer."""
        return self._call(lambda: self._status(False)).result(timeout_seconds)[0]

    # --- in the thread ---

    def _call(self, function: Callable[[], T]) -> Future[T]:
        if not self._thread.is_alive():
            raise UnavailableError("The rollout worker has stopped.")
        future: Future[T] = Future()
        self._commands.put(lambda: future.set_result(function()))
        return future

    def _run(self) -> None:
        if self._torch_threads is not None:
            torch.set_num_threads(self._torch_threads)
        while not self._stopped:
            self._obey(wait=self._serving is None or self._serving.engine.idle)
            self._replace_if_idle()
            if self._serving is not None and not self._stopped:
                self._step(self._serving)

    def _obey(self, *, wait: bool) -> None:
        """Run all commands; with `wait`, at least one."""
        if wait and self._replacement is None:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _step(self, serving: Serving) -> None:
        try:
            events = serving.engine.step()
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            self._fail(error)
            return
        for event in events:
            finished = isinstance(event, FinishedEvent)
            name = event.result.request_id if isinstance(event, FinishedEvent) else event.request_id
            sink = self._sinks.pop(name, None) if finished else self._sinks.get(name)
            if sink is not None:
                sink(event)

    def _fail(self, error: Exception) -> None:
        log.critical("the engine failed; the policy has to be loaded again", exc_info=error)
        if self._serving is not None:
            self._past = self._past.plus(self._serving.engine.status())
        self._serving = None
        fault = InternalError(f"The engine failed: {type(error).__name__}: {error}", reason="ENGINE_FAILED")
        self._tell_all(fault)

    def _tell_all(self, fault: NprError) -> None:
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(fault)
        held, self._held = self._held, []
        for submission in held:
            _reject(submission.accepted, fault)

    def _stop(self) -> None:
        self._stopped = True
        self._tell_all(UnavailableError("The rollout worker is stopping; try again elsewhere."))

    def _set_replacement(self, replacement: _Replacement) -> None:
        if self._replacement is not None:
            _reject(replacement.done, FailedPreconditionError("Another policy is being loaded; wait for it."))
        else:
            self._replacement = replacement

    def _replace_if_idle(self) -> None:
        replacement = self._replacement
        if replacement is None or (self._serving is not None and not self._serving.engine.idle):
            return
        if self._serving is not None:
            self._past = self._past.plus(self._serving.engine.status())
        self._serving, self._replacement = None, None  # free its memory before the next one takes as much
        try:
            self._serving = replacement.build()
        except Exception as error:  # noqa: BLE001 - the caller gets it, whatever it is
            _reject(replacement.done, error)
        else:
            replacement.done.set_result(None)
        held, self._held = self._held, []
        for submission in held:
            self._submit(submission)

    def _submit(self, submission: _Submission) -> None:
        if self._replacement is not None:
            self._held.append(submission)
            return
        if not submission.accepted.set_running_or_notify_cancel():
            return
        try:
            if self._stopped or self._serving is None:
                raise FailedPreconditionError("No policy is loaded; wait until the service is healthy.")
            request = submission.make_request(self._serving.policy)
            self._serving.engine.submit(request)
        except NprError as error:
            submission.accepted.set_exception(error)
            return
        self._sinks[request.request_id] = submission.sink
        submission.accepted.set_result(request)

    def _withdraw(self, submission: _Submission) -> None:
        if submission in self._held:
            self._held.remove(submission)
        accepted = submission.accepted
        if accepted.done() and not accepted.cancelled() and accepted.exception() is None:
            name = accepted.result().request_id
            if self._sinks.pop(name, None) is not None and self._serving is not None:
                self._serving.engine.abort(name)

    def _status(self, audit: bool) -> tuple[EngineStatus, tuple[str, ...]]:
        if self._serving is None:
            return self._past.plus(EngineStatus.zero()), ()
        engine = self._serving.engine
        return self._past.plus(engine.status()), engine.audit() if audit else ()


def _deliver(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Event | NprError], event: Event | NprError) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(events.put_nowait, event)


def _reject(future: Future[T], error: Exception) -> None:
    """Unless the one who waited has left."""
    if future.running() or future.set_running_or_notify_cancel():
        future.set_exception(error)
