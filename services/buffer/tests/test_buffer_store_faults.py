"""Redis down, full, forgetful or damaged: typed errors, health that follows, index that heals, audit that sees."""

import asyncio

import pytest
import redis.asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.exceptions import AuthenticationError, OutOfMemoryError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from npr.buffer.v1 import buffer_pb2
from npr_buffer.service import GRPC_NAME, BufferService
from npr_buffer.settings import BufferSettings
from npr_buffer.store import keys
from npr_buffer.store.redis_errors import redis_errors
from npr_buffer.testing import make_group, make_scored
from npr_common.errors import FailedPreconditionError, ResourceExhaustedError, UnavailableError
from npr_common.rpc import ServerSettings, connect
from npr_common.rpc.server import RunningServer
from npr_common.testing.servers import running_server

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_health_follows_redis_and_calls_say_whom_they_miss(own_valkey, make_client):
    service = BufferService(BufferSettings(redis_url=own_valkey.url, ping_seconds=0.1))
    running = RunningServer(service, ServerSettings(drain_seconds=5))
    changes: asyncio.Queue[bool] = asyncio.Queue()

    async def report(serving):
        await running.set_serving(serving)
        await changes.put(serving)

    service.report_health_to(report)
    await running.start()
    async with connect(running.address) as channel:
        client = make_client(channel)
        health = health_pb2_grpc.HealthStub(channel)
        asking = health_pb2.HealthCheckRequest(service=GRPC_NAME)
        assert (await health.Check(asking)).status == SERVING
        await client.enqueue(make_group("r", "g"))
        own_valkey.kill()
        with pytest.raises(UnavailableError, match=f"Redis at 127.0.0.1:{own_valkey.port}"):
            await client.lease()
        assert await asyncio.wait_for(changes.get(), 10) is False
        assert (await health.Check(asking)).status == NOT_SERVING
        own_valkey.start()
        assert await asyncio.wait_for(changes.get(), 10) is True
        assert (await health.Check(asking)).status == SERVING
        assert len(await client.lease()) == 1
        waiting = asyncio.create_task(client.lease(wait=4.5))  # below the re-check: needs the new subscription
        await client.lease(wait=0.5)
        await client.enqueue(make_group("r", "h"))
        assert len(await waiting) == 1
    await running.stop()


async def test_a_full_redis_says_so_and_nothing_is_half_done(own_valkey, make_client):
    async with (
        redis.asyncio.Redis.from_url(own_valkey.url) as store,
        running_server(BufferService(BufferSettings(redis_url=own_valkey.url))) as address,
        connect(address) as channel,
    ):
        client = make_client(channel)
        await client.enqueue(make_group("r", "g"))
        await store.config_set("maxmemory", 1)
        for call in (
            lambda: client.enqueue(make_group("r", "h")),
            lambda: client.append("r", make_scored("g", 0)),
        ):
            with pytest.raises(ResourceExhaustedError, match="maxmemory") as refused:
                await call()
            assert refused.value.retry_after_seconds == 5.0
        assert not (await client.audit("r")).problems
        assert await client.states("r") == {"g": "WAITING"}
        await store.config_set("maxmemory", 0)
        assert (await client.append("r", make_scored("g", 0))).appended == 1


@pytest.mark.parametrize(
    ("raised", "expected", "reason"),
    [
        (RedisConnectionError("refused"), UnavailableError, "REDIS_UNAVAILABLE"),
        (AuthenticationError("no"), UnavailableError, "REDIS_AUTHENTICATION"),
        (ResponseError("CLUSTERDOWN it is"), UnavailableError, "REDIS_UNAVAILABLE"),
        (OutOfMemoryError("OOM"), ResourceExhaustedError, "REDIS_OUT_OF_MEMORY"),
        (ResponseError("MISCONF Errors writing to the AOF file"), ResourceExhaustedError, "REDIS_DISK_FULL"),
    ],
)
def test_what_a_failing_redis_means(raised, expected, reason):
    with pytest.raises(expected) as error, redis_errors("Redis at x:1", 5.0):
        raise raised
    assert error.value.reason == reason


def test_a_bug_of_ours_is_not_disguised():
    with pytest.raises(ResponseError), redis_errors("Redis at x:1", 5.0):
        raise ResponseError("WRONGTYPE")


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [("appendonly", "no", "REDIS_NOT_DURABLE"), ("maxmemory-policy", "allkeys-lru", "REDIS_EVICTS")],
)
async def test_a_redis_that_forgets_is_refused_at_the_start(own_valkey, option, value, reason):
    async with redis.asyncio.Redis.from_url(own_valkey.url) as store:
        await store.config_set("maxmemory", "1gb")
        await store.config_set(option, value)
    with pytest.raises(FailedPreconditionError) as refused:
        await BufferService(BufferSettings(redis_url=own_valkey.url)).start()
    assert refused.value.reason == reason
    careless = BufferService(BufferSettings(redis_url=own_valkey.url, require_durable=False))
    await careless.start()
    await careless.drain()


async def test_a_lost_index_entry_comes_back(own_valkey, make_client):
    settings = BufferSettings(redis_url=own_valkey.url, ping_seconds=0.05, heal_seconds=0.2)
    async with (
        redis.asyncio.Redis.from_url(own_valkey.url) as store,
        running_server(BufferService(settings)) as address,
        connect(address) as channel,
    ):
        client = make_client(channel)
        await client.enqueue(make_group("r", "g"))
        assert await store.delete(keys.INDEX) == 1
        assert await client.lease() == []
        assert len(await client.lease(wait=4)) == 1


async def test_an_idle_run_leaves_the_index_and_comes_back_with_work(own_valkey, make_client):
    async with (
        redis.asyncio.Redis.from_url(own_valkey.url) as store,
        running_server(BufferService(BufferSettings(redis_url=own_valkey.url))) as address,
        connect(address) as channel,
    ):
        client = make_client(channel)
        await client.enqueue(make_group("r", "g", samples=1))
        await client.append("r", make_scored("g", 0))
        assert await client.lease() == []
        assert await store.zcard(keys.INDEX) == 0
        await client.enqueue(make_group("r", "h"))
        assert len(await client.lease()) == 1


RUN = keys.run_prefix("r")
DAMAGES = {
    "state without its place": (("HSET", f"{RUN}group:w", "state", "READY"), "w is READY"),
    "two states": (("ZADD", f"{RUN}leases", 1, "w"), "w is WAITING; has lease: true"),
    "lease without a group": (("ZADD", f"{RUN}leases", 1, "ghost"), "leases: 1 kept, 0 counted"),
    "listed and gone": (("DEL", f"{RUN}group:w"), "w is listed and not there"),
    "lost from the queue": (("DEL", f"{RUN}queue:"), "queued groups: 0 kept, 1 counted"),
    "wrong count": (("HINCRBY", f"{RUN}counts:train", "READY", 1), "counts 2 READY; there are 1"),
    "wrong open": (("HINCRBY", f"{RUN}meta", "open", 1), "open groups: 3 kept, 2 counted"),
    "ready and incomplete": (("HDEL", f"{RUN}trajectories:g", "1"), "g is READY with 1 of 2 samples"),
    "no summary": (("HDEL", f"{RUN}samples:g", "1"), "sample 1 of group g has no summary"),
    "consumed by nobody": (("HDEL", f"{RUN}group:c", "consumer"), "c is CONSUMED; consumer: false"),
    "bytes that are none": (("HSET", f"{RUN}trajectories:g", "1", b"\xff"), "g/1 are not a trajectory"),
    "somebody else's bytes": (
        ("HSET", f"{RUN}trajectories:g", "1", make_scored("x", 1).SerializeToString()),
        "trajectory x/1 is stored as g/1",
    ),
    "trajectory without a group": (("HSET", f"{RUN}trajectories:ghost", "0", b""), "1 trajectories of group ghost"),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_the_audit_sees(client, valkey_process, damage):
    await client.enqueue(*(make_group("r", group_id) for group_id in "wgc"))
    await client.append("r", *(make_scored(group_id, index) for group_id in "gc" for index in (0, 1)))
    await client.ack("r", "zero/step/0", "c")
    sound = await client.audit("r")
    assert not sound.problems
    assert sound.counts == buffer_pb2.WatchChannelResponse(
        waiting=1, ready=1, consumed=1, trajectories=4, trajectories_expected=6
    )
    command, sentence = DAMAGES[damage]
    async with redis.asyncio.Redis.from_url(valkey_process.url) as store:
        await store.execute_command(*command)
    assert any(sentence in problem for problem in (await client.audit("r")).problems)
