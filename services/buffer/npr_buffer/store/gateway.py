"""The connection to Redis: scripts by name, commands, typed errors. Everything else in the package goes through it.

Every script may be repeated (ids make it idempotent), so the client retries a dropped connection once or twice; after
that the caller gets UNAVAILABLE.
"""

from collections.abc import Awaitable, Sequence
from importlib.resources import files
from typing import Any, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import Pipeline, PubSub
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.commands.core import AsyncScript

from npr_buffer.settings import BufferSettings
from npr_buffer.store.keys import run_prefix
from npr_buffer.store.redis_errors import redis_errors
from npr_common.errors import FailedPreconditionError

T = TypeVar("T")

RUN_SCRIPTS = (
    "enqueue",
    "peek",
    "lease",
    "renew",
    "return_groups",
    "append",
    "ack",
    "discard",
    "summaries",
    "audit",
    "delete_run",
)
INDEX_SCRIPTS = ("touch_run", "forget_run")


class RedisGateway:
    """One pool of connections and the registered scripts. Raises only typed errors."""

    def __init__(self, settings: BufferSettings) -> None:
        pool = BlockingConnectionPool.from_url(
            settings.redis_url,
            protocol=2,  # scripts answer in RESP2's types: ints, bytes, lists, nil
            max_connections=settings.redis_connections,
            timeout=settings.redis_timeout_seconds,
            socket_timeout=settings.redis_timeout_seconds,
            socket_connect_timeout=min(2.0, settings.redis_timeout_seconds),
            retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), retries=2),
        )
        self._redis: Redis = Redis.from_pool(pool)
        self._retry_seconds = settings.full_retry_seconds
        at = pool.connection_kwargs
        self.whom = f"Redis at {at.get('host', at.get('path', 'localhost'))}:{at.get('port', '')}"
        self._scripts = _register(self._redis)

    async def run_script(self, name: str, run_id: str, arguments: Sequence[str | bytes | int]) -> Any:
        """Result of a script on one run, as redis-py gives it."""
        return await self._guarded(self._scripts[name](keys=[run_prefix(run_id)], args=arguments))

    async def index_script(self, name: str, keys: Sequence[str], arguments: Sequence[str | int]) -> Any:
        """Result of a script on the index of runs."""
        return await self._guarded(self._scripts[name](keys=list(keys), args=arguments))

    async def command(self, *parts: str | bytes | int) -> Any:
        """Result of one command that reads, or that is atomic by itself."""
        return await self._guarded(self._redis.execute_command(*parts))  # type: ignore[no-untyped-call]

    async def pipeline(self, commands: Sequence[tuple[str | bytes | int, ...]]) -> list[Any]:
        """Results of commands sent together (not atomic)."""
        pipe: Pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        return await self._guarded(pipe.execute())

    async def scan(self, pattern: str) -> list[bytes]:
        """Every key that matches; walks the whole key space in small steps."""

        async def walk() -> list[bytes]:
            return [key async for key in self._redis.scan_iter(match=pattern, count=1000)]

        return await self._guarded(walk())

    def pubsub(self) -> PubSub:
        """A subscription that reads for as long as it takes."""
        return self._redis.pubsub()

    async def check_durable(self) -> None:
        """Raises `FailedPreconditionError` when this Redis would forget what it acknowledged."""
        info = await self._guarded(self._redis.info())
        if not info.get("aof_enabled"):
            raise FailedPreconditionError(
                f"{self.whom} has no append-only file: start it with `--appendonly yes`, or set"
                " NPR_BUFFER_REQUIRE_DURABLE=false to accept that a restart loses the runs",
                reason="REDIS_NOT_DURABLE",
            )
        if info.get("maxmemory") and info.get("maxmemory_policy") != "noeviction":
            raise FailedPreconditionError(
                f"{self.whom} evicts keys ({info['maxmemory_policy']}): set `maxmemory-policy noeviction`, or set"
                " NPR_BUFFER_REQUIRE_DURABLE=false to accept that runs lose work",
                reason="REDIS_EVICTS",
            )

    async def close(self) -> None:
        """Closes idle connections; a call that is still in flight keeps its own."""
        await self._redis.connection_pool.disconnect(inuse_connections=False)

    async def _guarded(self, reply: Awaitable[T]) -> T:
        with redis_errors(self.whom, self._retry_seconds):
            return await reply


def _register(redis: Redis) -> dict[str, AsyncScript]:
    folder = files("npr_buffer.store") / "lua"
    prelude = (folder / "_run.lua").read_text("utf-8")
    sources = {name: f"{prelude}\n{(folder / f'{name}.lua').read_text('utf-8')}" for name in RUN_SCRIPTS}
    sources |= {name: (folder / f"{name}.lua").read_text("utf-8") for name in INDEX_SCRIPTS}
    return {name: redis.register_script(source) for name, source in sources.items()}
