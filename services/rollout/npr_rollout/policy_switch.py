"""From the name of a policy to an engine that serves it.

Invariants:
- A policy is served only after the backend has fetched and checked it; until then the one before it is served,
  undisturbed.
- One swap at a time, from loading to the end. A second call for the same policy waits for the first; a call for another
  one is refused.
- Cancelling a call leaves what is served as it is, unless the exchange of the engines has begun.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from npr.types.v1 import policy_pb2
from npr_common.errors import FailedPreconditionError
from npr_common.telemetry import meter, names
from npr_rollout.backend import EngineBackend
from npr_rollout.engine_thread import EngineThread
from npr_rollout.swap import InFlight, Swapped

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _UnderWay:
    """The swap to a policy, from loading it to serving it."""

    ref: policy_pb2.PolicyRef
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class PolicySwitch:
    """Changes what the engine serves."""

    def __init__(self, engine: EngineThread, backend: EngineBackend) -> None:
        self._engine = engine
        self._backend = backend
        self._under_way: _UnderWay | None = None
        self._swaps = meter().create_counter(names.METRIC_ENGINE_SWAPS)

    async def settled(self) -> None:
        """Returns when no swap is under way."""
        while self._under_way is not None:
            await self._under_way.ended.wait()

    async def serve(self, ref: policy_pb2.PolicyRef, in_flight: InFlight = InFlight.DRAIN) -> Swapped:
        """Serve a policy; returns when it is served. At once, if it is already.

        Raises:
            NotFoundError: the policy is not in the store.
            DataLossError: its files are not what they were, or its canary forward is not what it shall be.
            FailedPreconditionError: the engine can't serve it, or another swap is under way.
        """
        while (under_way := self._under_way) is not None:
            if under_way.ref.digest != ref.digest:
                raise FailedPreconditionError(
                    f"Policy {_name(under_way.ref)} is being loaded; wait for it.", reason="SWAP_UNDER_WAY"
                )
            await under_way.ended.wait()
        served = self._engine.policy
        if served is not None and served.digest == ref.digest:
            return Swapped(served, 0)
        self._under_way = under_way = _UnderWay(ref)
        try:
            return await self._swap(ref, in_flight)
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


def _name(ref: policy_pb2.PolicyRef) -> str:
    return f"{ref.line}@{ref.version}"
