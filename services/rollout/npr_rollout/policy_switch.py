"""From the name of a policy to an engine that serves it.

Invariants:
- A policy is served only after its files' hashes and a canary forward have been checked, by the very kernels that will
  decode with it; until then the one before it is served, undisturbed.
- One swap at a time, from loading to the end. A second call for the same policy waits for the first; a call for another
  one is refused.
- Cancelling a call leaves what is served as it is, unless the exchange of the engines has begun.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial

from npr.types.v1 import policy_pb2
from npr_common.errors import FailedPreconditionError, NprError
from npr_common.telemetry import meter, names
from npr_common.threads import in_own_thread
from npr_rollout.canary import CanaryCheck
from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.engine import Engine
from npr_rollout.engine.model_runner import kv_shape
from npr_rollout.engine_thread import EngineThread
from npr_rollout.policy_loader import LoadedPolicy, PolicyLoader
from npr_rollout.serving import Serving
from npr_rollout.settings import RolloutSettings
from npr_rollout.swap import InFlight, Swapped

log = logging.getLogger(__name__)

_MIB = 1 << 20


@dataclass(frozen=True, eq=False)
class _UnderWay:
    """The swap to a policy, from loading it to serving it."""

    ref: policy_pb2.PolicyRef
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class PolicySwitch:
    """Changes what the engine serves."""

    def __init__(self, engine: EngineThread, loader: PolicyLoader, settings: RolloutSettings) -> None:
        self._engine = engine
        self._loader = loader
        self._settings = settings
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
        await self._engine.check_can_swap()
        policy = await self._loader.load(ref)
        config = await self._check(policy)
        swapped = await self._engine.replace(partial(_serving, policy, config), in_flight)
        self._swaps.add(1, {"in_flight": in_flight.name.lower()})
        log.info("serving %s (%s), %d requests aborted", _name(ref), ref.digest[:12], swapped.aborted)
        return swapped

    async def _check(self, policy: LoadedPolicy) -> EngineConfig:
        """The canary forward, on pages of its own, which are free again afterwards; the engine's sizes."""
        try:
            config = engine_config(policy, self._settings)
            check = await in_own_thread(CanaryCheck, policy, config)
        except NprError:
            raise
        except Exception as error:  # whatever its sizes make of the engine, also where memory is short
            message = f"Policy {_name(policy.ref)} can't be served here: {type(error).__name__}: {error}"
            raise FailedPreconditionError(message) from error
        await self._engine.between_steps(check.run)
        return config


def engine_config(policy: LoadedPolicy, settings: RolloutSettings) -> EngineConfig:
    """The engine's sizes for a policy."""
    page_bytes = kv_shape(policy.model, settings.kv_dtype).bytes_per_token * settings.page_size
    return EngineConfig(
        page_size=settings.page_size,
        pages=max(2, settings.kv_memory_mib * _MIB // page_bytes),
        max_running=settings.max_running,
        prefill_tokens=settings.prefill_tokens,
        attention=settings.attention,
        kv_dtype=settings.kv_dtype,
        max_branches=settings.max_branches,
        max_blocks=settings.max_blocks,
        audit_every_step=settings.audit_every_step,
    )


def _serving(policy: LoadedPolicy, config: EngineConfig) -> Serving:
    engine = Engine(policy.model, policy.tokenizer, policy.dialect, config, policy_version=int(policy.ref.version))
    return Serving(policy, engine)


def _name(ref: policy_pb2.PolicyRef) -> str:
    return f"{ref.line}@{ref.version}"
