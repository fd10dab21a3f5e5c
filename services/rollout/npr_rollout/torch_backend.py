"""The portable backend: the policy in this process, decoded by the engine of `engine/`."""

from __future__ import annotations

from functools import partial

import torch

from npr.types.v1 import policy_pb2
from npr_common.errors import FailedPreconditionError, NprError
from npr_common.threads import in_own_thread
from npr_rollout.backend import BetweenSteps
from npr_rollout.canary import CanaryCheck
from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.engine import Engine
from npr_rollout.engine.model_runner import kv_shape
from npr_rollout.policy_loader import LoadedPolicy, PolicyLoader
from npr_rollout.serving import Serving
from npr_rollout.settings import RolloutSettings
from npr_rollout.swap import Build

_MIB = 1 << 20


class TorchBackend:
    """A policy is checked by the very kernels that will decode with it, beside whatever is served."""

    name = "torch"
    can_serve_two = True

    def __init__(self, loader: PolicyLoader, settings: RolloutSettings) -> None:
        self._loader = loader
        self._settings = settings

    async def prepare(self, ref: policy_pb2.PolicyRef, between_steps: BetweenSteps) -> Build:
        """See `EngineBackend`: the model is loaded, and its canary forward run on pages of its own."""
        policy = await self._loader.load(ref)
        try:
            config = engine_config(policy, self._settings)
            check = await in_own_thread(CanaryCheck, policy, config)
        except NprError:
            raise
        except Exception as error:  # whatever its sizes make of the engine, also where memory is short
            message = f"Policy {ref.line}@{ref.version} can't be served here: {type(error).__name__}: {error}"
            raise FailedPreconditionError(message) from error
        await between_steps(check.run)
        return partial(_serving, policy, config)

    async def check_setup(self) -> None:
        """See `EngineBackend`: what its settings can say wrong is found when they are read."""

    def check_can_sleep(self) -> None:
        """See `EngineBackend`: it always can."""

    async def sleep(self) -> None:
        """See `EngineBackend`: the engine's memory went with it, but for what the allocator keeps."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    async def close(self) -> None:
        """Nothing outlives an engine."""


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
