"""The life of the buffer process: wait for Redis, check that it keeps what it acknowledges, serve, drain."""

import asyncio

import grpc

from npr.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from npr_buffer.keeper import HealthReport, Keeper
from npr_buffer.leasing import Leasing
from npr_buffer.servicer import BufferServicer
from npr_buffer.settings import BufferSettings
from npr_buffer.store.gateway import RedisGateway
from npr_buffer.store.run_index import RunIndex
from npr_buffer.store.run_store import RunStore
from npr_buffer.store.wakeups import Wakeups
from npr_buffer.watching import Watching

GRPC_NAME: str = buffer_pb2.DESCRIPTOR.services_by_name["BufferService"].full_name

CANCEL_AGAIN_SECONDS = 0.1


async def _unreported(_serving: bool) -> None:
    """Where nobody asked for health."""


class BufferService:
    """`npr_common.rpc.Service` of the buffer."""

    name = "buffer"
    grpc_names = (GRPC_NAME,)

    def __init__(self, settings: BufferSettings | None = None) -> None:
        self._settings = settings or BufferSettings()
        self._gateway = RedisGateway(self._settings)
        self._index = RunIndex(self._gateway)
        self._wakeups = Wakeups(self._gateway)
        store = RunStore(self._gateway, self._settings)
        recheck = self._settings.recheck_seconds
        self._leasing = Leasing(self._gateway, store, self._index, self._wakeups, recheck)
        self._watching = Watching(store, self._wakeups, recheck)
        self._keeper = Keeper(self._gateway, self._leasing, self._index, self._settings)
        self._servicer = BufferServicer(
            gateway=self._gateway,
            store=store,
            index=self._index,
            leasing=self._leasing,
            watching=self._watching,
            keeper=self._keeper,
        )
        self._report_health: HealthReport = _unreported
        self._tasks: list[asyncio.Task[None]] = []

    def report_health_to(self, report: HealthReport) -> None:
        """`report(False)` is called when Redis stops answering and `report(True)` when it is back."""
        self._report_health = report

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer."""
        buffer_pb2_grpc.add_BufferServiceServicer_to_server(self._servicer, server)

    async def start(self) -> None:
        """Returns once Redis answers. Raises `FailedPreconditionError` when it would forget what it acknowledged."""
        await self._keeper.wait_for_redis()
        if self._settings.require_durable:
            await self._gateway.check_durable()
        self._tasks = [
            asyncio.create_task(self._wakeups.listen()),
            asyncio.create_task(self._keeper.run(self._report_health)),
        ]

    async def drain(self) -> None:
        """Lets waiting calls answer, ends watches, gives back what dropped clients held, and closes Redis."""
        self._watching.drain()
        await self._leasing.drain()
        await asyncio.gather(*(_stop(task) for task in self._tasks))
        await self._gateway.close()


async def _stop(task: asyncio.Task[None]) -> None:
    """Cancels until it is done: redis-py may swallow one cancellation that arrives inside a command."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_AGAIN_SECONDS)
