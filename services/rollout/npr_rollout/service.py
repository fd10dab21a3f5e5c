"""The rollout service: engine thread, policy, worker and RPCs, put together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable

import grpc

from npr.buffer.v1 import buffer_pb2_grpc
from npr.reward.v1 import reward_pb2_grpc
from npr.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from npr_common.config import Addresses
from npr_common.errors import InternalError, NprError
from npr_common.policy_store import PolicyStore
from npr_common.rpc import connect
from npr_rollout.backend import EngineBackend
from npr_rollout.engine_thread import EngineThread
from npr_rollout.jobs import Jobs
from npr_rollout.metrics import observe_engine
from npr_rollout.outbox import Outbox
from npr_rollout.policy_loader import PolicyLoader
from npr_rollout.policy_switch import PolicySwitch
from npr_rollout.servicer import RolloutServicer
from npr_rollout.settings import BackendKind, RolloutSettings
from npr_rollout.sglang.backend import SglangBackend
from npr_rollout.torch_backend import TorchBackend
from npr_rollout.worker import Worker

log = logging.getLogger(__name__)

_GIVE_BACK_SECONDS = 5.0

HealthReport = Callable[[bool], Awaitable[None]]


class RolloutService:
    """What `npr_common.rpc.run` serves. Healthy once it can take work; a policy is loaded when work names it.

    It is unhealthy while its engine is down, which is until a policy is loaded again.
    """

    name = "rollout"
    grpc_names = (rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name,)

    def __init__(self, settings: RolloutSettings | None = None, addresses: Addresses | None = None) -> None:
        self._settings = settings or RolloutSettings()
        self._addresses = addresses or Addresses()
        store = PolicyStore(self._addresses.policy_store_url, self._addresses.cache_dir / "rollout")
        self._loader = PolicyLoader(store, self._settings.device, self._settings.dtype)
        make_backend = SglangBackend if self._settings.backend is BackendKind.SGLANG else TorchBackend
        self._backend: EngineBackend = make_backend(self._loader, self._settings)
        self._engine = EngineThread(self._settings.torch_threads, self._engine_health_changed)
        self._switch = PolicySwitch(self._engine, self._backend)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._health: asyncio.Queue[bool] = asyncio.Queue()
        self._report_health: HealthReport = _unreported
        self._channels: list[grpc.aio.Channel] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._worker: Worker | None = None
        self._fault: InternalError | None = None

    def report_health_to(self, report: HealthReport) -> None:
        """See `npr_common.rpc.server.ReportsHealth`."""
        self._report_health = report

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer and connects to the peers."""
        buffer_channel, reward_channel = (
            connect(self._addresses.buffer_address),
            connect(self._addresses.reward_address),
        )
        self._channels = [buffer_channel, reward_channel]
        buffer: buffer_pb2_grpc.BufferServiceAsyncStub = buffer_pb2_grpc.BufferServiceStub(buffer_channel)
        reward: reward_pb2_grpc.RewardServiceAsyncStub = reward_pb2_grpc.RewardServiceStub(reward_channel)
        self._outbox = Outbox(buffer, reward, self._settings.peer_wait_seconds)
        self._worker = Worker(self._engine, buffer, self._outbox, self._switch, self._settings)
        jobs = Jobs(buffer, reward, self._settings.peer_wait_seconds)
        servicer = RolloutServicer(self._engine, self._switch, jobs, self._worker.worker_id, self._settings.max_waiting)
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server)

    async def start(self) -> None:
        """Loads the policy line that is to be served from the start, and begins to take work.

        Raises:
            WrongSettingsError: the backend can't serve with its settings.
        """
        self._loop = asyncio.get_running_loop()
        await self._backend.check_setup()
        self._engine.start()
        observe_engine(self._engine)
        if self._settings.policy_line:
            await self._switch.serve(await self._loader.latest(self._settings.policy_line))
        assert self._worker is not None
        self._tasks.append(asyncio.create_task(self._outbox.run(), name="outbox"))
        self._tasks.append(asyncio.create_task(self._tell_health(), name="health"))
        if self._settings.worker:
            self._tasks.append(asyncio.create_task(self._worker.run(), name="worker"))
        for task in self._tasks:
            task.add_done_callback(self._end_process_on_fault)

    async def drain(self) -> None:
        """Stops leasing, gives back what is being decoded, and ends. Raises the fault that made it end, if one did."""
        assert self._worker is not None
        for task in reversed(self._tasks[1:]):
            task.cancel()
        await asyncio.gather(*self._tasks[1:], return_exceptions=True)
        with contextlib.suppress(NprError, TimeoutError):  # leases that can't be given back end by themselves
            async with asyncio.timeout(_GIVE_BACK_SECONDS):
                await self._worker.give_back()
        await self._engine.stop()
        await self._backend.close()
        await self._outbox.flush()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()
        if self._fault is not None:
            raise self._fault

    def _engine_health_changed(self, healthy: bool) -> None:
        """Called in the engine's thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._health.put_nowait, healthy)

    def _end_process_on_fault(self, task: asyncio.Task[None]) -> None:
        """A service that takes no work must not look healthy: it ends, and whoever runs it starts it again."""
        if not task.cancelled():
            log.critical("the %s ended; stopping the process", task.get_name(), exc_info=task.exception())
            self._fault = InternalError(f"The {task.get_name()} ended: {task.exception()}")
            os.kill(os.getpid(), signal.SIGTERM)

    async def _tell_health(self) -> None:
        while True:
            await self._report_health(await self._health.get())


async def _unreported(healthy: bool) -> None:
    """Until a server runs the service, nobody asks for its health."""
