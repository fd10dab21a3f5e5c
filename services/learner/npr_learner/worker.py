"""One thread for all computation, so that gRPC stays live while the learner learns.

Invariant: a function that runs in the thread is never abandoned: whoever stops waiting for it asks it to stop, and
waits until it has.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from npr_common.errors import CancelledError, ResourceExhaustedError
from npr_learner.gradient import Observer

T = TypeVar("T")


@dataclass(frozen=True)
class Update:
    """A piece of work is done."""

    done: int
    total: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Result(Generic[T]):
    """All work is done."""

    value: T


class Worker:
    """Runs functions one after the other."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")

    async def run(self, function: Callable[[], T]) -> T:
        """The function's result; if the caller is cancelled, it still runs to its end first."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, function)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise

    async def stream(self, function: Callable[[Observer], T]) -> AsyncIterator[Update | Result[T]]:
        """What the function tells its observer, then its result.

        Raises:
            ResourceExhaustedError: the device's memory is full.
        """
        loop = asyncio.get_running_loop()
        updates: asyncio.Queue[Update | None] = asyncio.Queue()
        stopped = threading.Event()

        def observe(done: int, total: int, metrics: Mapping[str, float]) -> None:
            if stopped.is_set():
                raise CancelledError("the caller has left")
            loop.call_soon_threadsafe(updates.put_nowait, Update(done, total, metrics))

        future = loop.run_in_executor(self._executor, _within_memory(function), observe)
        future.add_done_callback(lambda _: updates.put_nowait(None))
        try:
            while (update := await updates.get()) is not None:
                yield update
            yield Result(await future)
        finally:
            stopped.set()
            await asyncio.wait([future])


def _within_memory(function: Callable[[Observer], T]) -> Callable[[Observer], T]:
    def guarded(observe: Observer) -> T:
        try:
            return function(observe)
        except torch.OutOfMemoryError as error:
            raise ResourceExhaustedError(
                "the device's memory is full: lower micro_batch_tokens or set gradient_checkpointing",
                reason="DEVICE_MEMORY_FULL",
            ) from error

    return guarded
