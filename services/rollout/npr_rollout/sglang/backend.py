"""The backend for GPU pods: an SGLang server decodes, in a process of its own, or on a host of its own.

Invariants:
- One server, one policy at a time: weights are changed with nothing in flight, and the cache is flushed with them.
- Which weights a server has, it says itself, and whether it sleeps: they are loaded unless it bears the policy's stamp.
- A policy is served only after the server says to its canary's prompt what it must. One that fails leaves the policy
  before it to be loaded again, whose files stay until then.
- A server that is gone, or that has stopped to answer while a policy was loaded, is started again by whoever needs it
  next; one that others run is waited for. One that ends again and again while it starts is no accident: that is said to
  whoever needs it as what can't be served.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, GenerationConfig

from npr.types.v1 import policy_pb2
from npr_common.errors import DataLossError, FailedPreconditionError, UnavailableError
from npr_common.tokenizers import eos_ids
from npr_rollout.backend import BetweenSteps
from npr_rollout.canary import tolerance
from npr_rollout.engine.kv_pool import KvShape
from npr_rollout.policy_loader import LoadedPolicy, PolicyLoader
from npr_rollout.serving import Serving
from npr_rollout.settings import RolloutSettings
from npr_rollout.sglang.client import SERVER_ENDED, wait_until_healthy
from npr_rollout.sglang.engine import SglangEngine
from npr_rollout.sglang.limits import ServerLimits
from npr_rollout.sglang.server import RemoteServer, ServedModel, Server, SglangServer, check_setup
from npr_rollout.sglang.settings import SglangSettings
from npr_rollout.sglang.transport import Transport
from npr_rollout.sglang.weights import PARTIAL, make_weights
from npr_rollout.swap import Build

log = logging.getLogger(__name__)

_MIB = 1 << 20
_HOPELESS_STARTS = 3

ASLEEP = "asleep"
"""Stamp of a server that has given back its memory."""

_ABOUT_FILES = frozenset({"_name_or_path", "transformers_version"})
"""What a model's configuration says of its files, not of the model."""


class SglangBackend:
    """See the module's docstring."""

    name = "sglang"
    can_serve_two = False

    def __init__(self, loader: PolicyLoader, rollout: RolloutSettings, settings: SglangSettings | None = None) -> None:
        self._loader = loader
        self._rollout = rollout
        self._settings = settings or SglangSettings.from_environment()
        self._running: _Running | None = None
        self._served: policy_pb2.PolicyRef | None = None
        self._changing = threading.Lock()
        self._failed_starts = 0  # in a row

    async def check_setup(self) -> None:
        """See `EngineBackend`. A server that others run is taken for well set up."""
        if not self._settings.url:
            await asyncio.to_thread(check_setup, self._settings)

    def check_can_sleep(self) -> None:
        """See `EngineBackend`. A server that others run can't be ended to that end."""
        if self._settings.url and not self._settings.memory_saver:
            raise FailedPreconditionError(
                "The SGLang server is not this service's to end: start it with --enable-memory-saver, and say so with "
                "NPR_SGLANG_MEMORY_SAVER=true."
            )

    async def prepare(self, ref: policy_pb2.PolicyRef, between_steps: BetweenSteps) -> Build:
        """See `EngineBackend`. The first policy starts the server; others are loaded when they are due."""
        policy = await self._loader.fetch(ref, keep=self._served)
        model = _Model(policy)
        if self._running is None:
            await asyncio.to_thread(self._start, policy, model)
        return partial(self._serve, policy, model)

    async def close(self) -> None:
        """End the server."""
        await asyncio.to_thread(self._end)

    async def sleep(self) -> None:
        """See `EngineBackend`. A server without the memory saver is ended; the next policy starts it again."""
        await asyncio.to_thread(self._sleep)

    # --- in the engine's thread, with nothing in flight ---

    def _serve(self, policy: LoadedPolicy, model: _Model) -> Serving:
        with self._changing:
            running = self._running
            self._served = None
            if running is None or not running.can_load(model):
                running = self._restart(policy, model)
            try:
                running.transport.clear()  # an engine that failed has left its own
                running.make_serve(policy)
                _check_canary(policy, model, running.transport, self._settings)
                limits = running.limits(model, self._rollout)
            except UnavailableError:
                self._end_running()
                raise
            self._served = policy.ref
        engine = SglangEngine(
            running.transport,
            policy.tokenizer,
            policy.dialect,
            limits,
            eos=model.eos,
            policy_version=int(policy.ref.version),
        )
        return Serving(policy, engine)

    def _start(self, policy: LoadedPolicy, model: _Model) -> None:
        with self._changing:
            if self._running is None:
                self._restart(policy, model)

    def _restart(self, policy: LoadedPolicy, model: _Model) -> _Running:
        self._end_running()
        try:
            self._running = _Running(policy, model, sized(self._settings, self._rollout, model))
        except UnavailableError as error:
            self._failed_starts += 1
            if self._failed_starts < _HOPELESS_STARTS or error.reason != SERVER_ENDED:
                raise
            raise FailedPreconditionError(error.message, reason="SERVER_DOES_NOT_START") from error
        self._failed_starts = 0
        return self._running

    def _sleep(self) -> None:
        with self._changing:
            if self._running is None:
                return
            if not self._settings.memory_saver:
                self._end_running()
                return
            try:
                self._running.sleep()
            except UnavailableError:
                self._end_running()
                if self._settings.url:  # what it holds is not known
                    raise

    def _end(self) -> None:
        with self._changing:
            self._end_running()

    def _end_running(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.end()


class _Model:
    """What a policy's files say of its model."""

    def __init__(self, policy: LoadedPolicy) -> None:
        assert policy.folder is not None
        config = AutoConfig.from_pretrained(str(policy.folder), local_files_only=True).get_text_config()
        self.context = int(config.max_position_embeddings)
        self.vocab_size = int(config.vocab_size)
        self.dtype: torch.dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        self.config = config
        self.eos = eos_ids(policy.tokenizer, _generation_config(policy.folder))
        self.built_as = {name: value for name, value in config.to_dict().items() if name not in _ABOUT_FILES}


class _Running:
    """A server that runs, and the wire to it."""

    def __init__(self, policy: LoadedPolicy, model: _Model, settings: SglangSettings) -> None:
        assert policy.folder is not None
        self._built_as = model.built_as
        self._settings = settings
        dtype = str(_dtype(settings.dtype, model)).removeprefix("torch.")
        served = ServedModel(policy.folder, model.context, dtype, _stamp(policy))
        self._server: Server = RemoteServer(settings.url) if settings.url else SglangServer(served, settings)
        self.transport = Transport(self._server.url, settings.silence_seconds)
        self._weights = make_weights(
            settings.weights, self.transport, settings.tensor_parallel, settings.group_backend, settings.group_address
        )
        try:
            self.transport.ask(
                lambda client: wait_until_healthy(client, lambda: self._server.is_alive, settings.start_seconds)
            )
        except BaseException as error:
            self.end()
            if isinstance(error, UnavailableError) and error.reason == SERVER_ENDED:
                why = f"{error.message} It says: {self._server.last_words}"
                raise UnavailableError(why, reason=SERVER_ENDED) from error
            raise

    def can_load(self, model: _Model) -> bool:
        """Whether it lives, and differs from what the model needs in nothing but weights."""
        if not self._server.is_alive or self._built_as != model.built_as:
            return False
        return self.transport.ask(lambda client: client.is_healthy())  # it may have died just now

    def make_serve(self, policy: LoadedPolicy) -> None:
        """Serve a policy's weights, if they are not served already. Raises as `Weights.load`."""
        assert policy.folder is not None
        served = self._stamp()
        if served == ASLEEP:
            self.transport.ask(lambda client: client.resume_memory())
            self.transport.ask(lambda client: client.mark(PARTIAL))
        if served != _stamp(policy):
            self._weights.load(policy.folder, _stamp(policy))

    def limits(self, model: _Model, rollout: RolloutSettings) -> ServerLimits:
        """Its sizes."""
        limits = ServerLimits.told(
            self.transport.ask(lambda client: client.info()),
            context=model.context,
            vocab_size=model.vocab_size,
            max_running=rollout.max_running,
            max_branches=rollout.max_branches,
            max_blocks=rollout.max_blocks,
        )
        if limits.longest < model.context:
            log.warning(
                "no trajectory gets longer than %d tokens, by a pool of %d and inputs of %d; the model knows %d",
                *(limits.longest, limits.pool_tokens, limits.input_tokens, model.context),
            )
        return limits

    def sleep(self) -> None:
        """Give back the memory but keep the process. Raises UnavailableError when the server does not answer."""
        if self._stamp() == ASLEEP:
            return
        self.transport.ask(lambda client: client.flush())
        self.transport.ask(lambda client: client.mark(PARTIAL))
        self.transport.ask(lambda client: client.release_memory())
        self.transport.ask(lambda client: client.mark(ASLEEP))

    def _stamp(self) -> str:
        return self.transport.ask(lambda client: client.weight_version())

    def end(self) -> None:
        """Leave the server, and end it if it was started here."""
        self.transport.close()
        self._server.end()


def sized(settings: SglangSettings, rollout: RolloutSettings, model: _Model) -> SglangSettings:
    """Settings with a pool that is as large as that of the engine in this process, on a CPU, where none was chosen.

    A server takes a share of all memory. On a GPU that is there for it; a CPU's is everybody's.
    """
    if settings.device != "cpu" or settings.pool_tokens or settings.memory_fraction:
        return settings
    shape = KvShape.of(model.config, _dtype(settings.dtype, model), torch.device("cpu"))
    return settings.model_copy(update={"pool_tokens": max(1, rollout.kv_memory_mib * _MIB // shape.bytes_per_token)})


def _stamp(policy: LoadedPolicy) -> str:
    """What a server with this policy's weights says that it has."""
    return f"{policy.ref.line}@{policy.ref.version}:{policy.ref.digest[:16]}"


def _check_canary(policy: LoadedPolicy, model: _Model, transport: Transport, settings: SglangSettings) -> None:
    canary = policy.canary
    if canary is None:
        return
    if max(*canary.token_ids, *canary.likeliest) >= model.vocab_size:
        raise DataLossError(f"The canary of policy {policy.ref.line} is not of its model.", reason="CANARY")
    said = transport.ask(lambda client: client.log_probs(canary.token_ids, canary.likeliest))
    off = float(np.abs(np.asarray(said) - np.asarray(canary.log_probs)).max())
    allowed = tolerance(_dtype(settings.dtype, model))
    if not off <= allowed:
        raise DataLossError(
            f"policy {policy.ref.line} version {policy.ref.version} fails its canary forward: log-probabilities are up "
            f"to {off:.3g} off what was published with it, {allowed} is allowed",
            reason="CANARY",
            metadata={"deviation": f"{off:.6g}", "tolerance": str(allowed)},
        )


def _dtype(name: str, model: _Model) -> torch.dtype:
    dtype = model.dtype if name == "auto" else getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FailedPreconditionError(f"NPR_SGLANG_DTYPE is {name!r}: name a torch dtype such as bfloat16")
    return dtype


def _generation_config(folder: Path) -> Any:
    """A policy's generation settings; None without any."""
    has_any = (folder / "generation_config.json").exists()
    return GenerationConfig.from_pretrained(str(folder), local_files_only=True) if has_any else None
