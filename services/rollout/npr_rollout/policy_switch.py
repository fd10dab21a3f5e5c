"""From the name of a policy to an engine that serves it.

Invariants:
- A policy is served only after the backend has fetched and checked it; until then the one before it is served,
  undisturbed.
- One swap at a time, from loading to the end. A second call for the same policy waits for the first; a call for another
  one is refused.
- Cancelling a call leaves what is served as it is, unless the exchange of the engines has begun.
- While the engine sleeps, only who means to wake it does: work for a policy waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from npr.types.v1 import policy_pb2
from npr_common.errors import FailedPreconditionError, NprError, UnavailableError
from npr_common.telemetry import meter, names
from npr_rollout.backend import EngineBackend
from npr_rollout.engine_thread import EngineThread
from npr_rollout.swap import InFlight, Swapped

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _UnderWay:
    """The swap to a policy, from loading it to serving it; to none, where the engine goes to sleep."""

    ref: policy_pb2.PolicyRef | None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    begun_at: float = field(default_factory=time.monotonic)


class PolicySwitch:
    """Changes what the engine serves."""

    def __init__(self, engine: EngineThread, backend: EngineBackend) -> None:
        self._engine = engine
        self._backend = backend
        self._under_way: _UnderWay | None = None
        self._awake = asyncio.Event()
        self._awake.set()
        self._trouble = ""
        self._swaps = meter().create_counter(names.METRIC_ENGINE_SWAPS)

    @property
    def asleep(self) -> bool:
        """Whether the engine has given back its memory."""
        return not self._awake.is_set()

    @property
    def backend_name(self) -> str:
        """What the engine that decodes is called in the settings."""
        return self._backend.name

    @property
    def condition(self) -> str:
        """What those who wait for a policy wait for, or why the last one that was wanted is not served; else empty."""
        under_way = self._under_way
        if under_way is None or under_way.ref is None:
            return self._trouble
        begun = f"{_name(under_way.ref)} is being loaded, since {time.monotonic() - under_way.begun_at:.0f} s"
        return f"{begun}; before: {self._trouble}" if self._trouble else begun

    async def settled(self) -> None:
        """Returns when no swap is under way, and the engine is awake."""
        while self._under_way is not None or self.asleep:
            await (self._under_way.ended if self._under_way is not None else self._awake).wait()

    async def sleep(self, in_flight: InFlight = InFlight.DRAIN) -> int:
        """Give back the memory, and take no work until `serve` wakes the engine; how many requests were aborted.

        Raises:
            FailedPreconditionError: a policy is being loaded, the requests in flight are to be finished on it, or the
                memory is not this service's to give back.
        """
        if in_flight is InFlight.FINISH_ON_OLD:
            raise FailedPreconditionError(
                "What is in flight needs the memory: finish it first (DRAIN), or end it (ABORT)."
            )
        self._backend.check_can_sleep()
        if self._under_way is not None:
            await self._wait_for(self._under_way, None)
        if self.asleep:
            return 0
        async with self._alone(None):
            self._awake.clear()
            try:
                swapped = await self._engine.replace(None, in_flight)
                await self._backend.sleep()
            except BaseException:
                self._awake.set()
                raise
        log.info("the engine sleeps, %d requests aborted", swapped.aborted)
        return swapped.aborted

    async def serve(
        self, ref: policy_pb2.PolicyRef, in_flight: InFlight = InFlight.DRAIN, *, wake: bool = False
    ) -> Swapped:
        """Serve a policy; returns when it is served. At once, if it is already.

        Args:
            wake: whether the engine is to be woken for it.

        Raises:
            UnavailableError: the engine sleeps.
            NotFoundError: the policy is not in the store.
            DataLossError: its files are not what they were, or its canary forward is not what it shall be.
            FailedPreconditionError: the engine can't serve it, or another swap is under way.
        """
        while self._under_way is not None:
            await self._wait_for(self._under_way, ref)
        if self.asleep and not wake:
            raise UnavailableError("The engine sleeps; ServePolicy wakes it.")
        served = self._engine.policy
        if served is not None and served.digest == ref.digest:
            return Swapped(served, 0)
        async with self._alone(ref):
            try:
                swapped = await self._swap(ref, in_flight)
            except BaseException as error:
                if isinstance(error, NprError):
                    self._trouble = f"{_name(ref)} can't be served: {error.message}"
                if self.asleep:
                    await self._sleep_on()
                raise
            self._awake.set()
            self._trouble = ""
            return swapped

    async def _sleep_on(self) -> None:
        """Give back what was taken on the way to a policy that is not served; if it is, for all that, be awake."""
        if await self._engine.between_steps(lambda: self._engine.policy) is None:
            await self._backend.sleep()
        else:
            self._awake.set()

    @staticmethod
    async def _wait_for(under_way: _UnderWay, ref: policy_pb2.PolicyRef | None) -> None:
        """Wait for a swap that does what is wanted too."""
        if _digest(under_way.ref) != _digest(ref):
            doing = (
                f"Policy {_name(under_way.ref)} is being loaded" if under_way.ref is not None else "It goes to sleep"
            )
            raise FailedPreconditionError(f"{doing}; wait for it.", reason="SWAP_UNDER_WAY")
        await under_way.ended.wait()

    @asynccontextmanager
    async def _alone(self, ref: policy_pb2.PolicyRef | None) -> AsyncIterator[None]:
        self._under_way = under_way = _UnderWay(ref)
        try:
            yield
        finally:
            self._under_way = None
            under_way.ended.set()

    async def _swap(self, ref: policy_pb2.PolicyRef, in_flight: InFlight) -> Swapped:
        if in_flight is InFlight.FINISH_ON_OLD and not self._backend.can_serve_two:
            raise FailedPreconditionError(
                "This engine serves one policy at a time: finish what is in flight first (DRAIN), or end it (ABORT).",
                reason="ONE_POLICY_AT_A_TIME",
            )
        await self._engine.check_can_swap()
        build = await self._backend.prepare(ref, self._engine.between_steps)
        swapped = await self._engine.replace(build, in_flight)
        self._swaps.add(1, {"in_flight": in_flight.name.lower()})
        log.info("serving %s (%s), %d requests aborted", _name(ref), ref.digest[:12], swapped.aborted)
        return swapped


def _digest(ref: policy_pb2.PolicyRef | None) -> str:
    return ref.digest if ref is not None else ""


def _name(ref: policy_pb2.PolicyRef) -> str:
    return f"{ref.line}@{ref.version}"
