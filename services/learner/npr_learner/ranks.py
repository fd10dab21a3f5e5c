"""Where the learner computes: operations on stages, run by one process or by many.

Invariants:
- An operation is a function of a process's stages, and runs on every process of the world alike.
- One operation runs at a time. It is never abandoned: whoever stops waiting for it asks it to stop, and waits until it
  has.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from npr_common.errors import CancelledError, ResourceExhaustedError
from npr_learner.gradient import Observer
from npr_learner.stages import Stages

T = TypeVar("T")

Operation = Callable[[Stages, Observer], T]
"""What every process runs; it can be pickled."""


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


class Ranks(Protocol):
    """The processes of a world, from outside."""

    async def run(self, operation: Operation[T]) -> T:
        """The operation's result; if the caller is cancelled, it still runs to its end first."""
        ...

    def stream(self, operation: Operation[T]) -> AsyncGenerator[Update | Result[T], None]:
        """What the operation tells its observer, then its result; if the caller leaves, it is asked to stop.

        Raises:
            ResourceExhaustedError: a device's memory is full.
            UnavailableError: a process has ended; the next operation gets new ones.
        """
        ...

    async def close(self) -> None:
        """Ends the processes."""
        ...


class ThisProcess:
    """A world of one: operations run in a thread, so that gRPC stays live while the learner learns."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")

    async def run(self, operation: Operation[T]) -> T:
        """See `Ranks`."""
        loop = asyncio.get_running_loop()
        return await to_its_end(loop.run_in_executor(self._executor, operation, self._stages, _nobody))

    async def stream(self, operation: Operation[T]) -> AsyncGenerator[Update | Result[T], None]:
        """See `Ranks`."""
        loop = asyncio.get_running_loop()
        updates: asyncio.Queue[Update | None] = asyncio.Queue()
        stopped = threading.Event()

        def observe(done: int, total: int, metrics: Mapping[str, float]) -> None:
            if stopped.is_set():
                raise caller_has_left()
            loop.call_soon_threadsafe(updates.put_nowait, Update(done, total, metrics))

        future = loop.run_in_executor(self._executor, within_memory, operation, self._stages, observe)
        future.add_done_callback(lambda _: updates.put_nowait(None))
        try:
            while (update := await updates.get()) is not None:
                yield update
            yield Result(await future)
        finally:
            stopped.set()
            await asyncio.wait([future])

    async def close(self) -> None:
        """See `Ranks`."""
        self._executor.shutdown()


async def to_its_end(work: Awaitable[T]) -> T:
    """What the work returns; if the caller is cancelled, it still runs to its end first."""
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise


def caller_has_left() -> CancelledError:
    """What an observer raises to stop an operation."""
    return CancelledError("the caller has left")


def within_memory(operation: Operation[T], stages: Stages, observe: Observer) -> T:
    """The operation's result. Raises ResourceExhaustedError where the device's memory is full."""
    try:
        return operation(stages, observe)
    except torch.OutOfMemoryError as error:
        raise ResourceExhaustedError(
            "the device's memory is full: lower micro_batch_tokens, set gradient_checkpointing or cpu_offload, "
            "or learn on more workers",
            reason="DEVICE_MEMORY_FULL",
        ) from error


def _nobody(done: int, total: int, metrics: Mapping[str, float]) -> None:
    """An observer of operations that are not watched."""
