"""Many workers and two rival consumers, while Valkey and the buffer are killed: nothing lost, nothing used twice."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
import redis.asyncio

from npr.buffer.v1 import buffer_pb2
from npr_buffer.testing import keys_of, make_group, make_scored
from npr_common.errors import FailedPreconditionError
from npr_common.rpc import call_durably, connect
from npr_common.testing.processes import service_process

GROUPS, SAMPLES, WORKERS = 60, 2, 6


@pytest.fixture
def own_buffer(own_valkey, tmp_path):
    """A buffer process to kill."""
    with service_process("npr_buffer", tmp_path, {"NPR_BUFFER_REDIS_URL": own_valkey.url}) as process:
        yield process


async def keep_every_write(valkey):
    """What an answer promises holds only where each write reaches the file before it."""
    async with redis.asyncio.Redis.from_url(valkey.url) as store:
        await store.config_set("appendfsync", "always")


async def durably(call: Callable[[], Awaitable]):
    return await call_durably(call, whom="the buffer", deadline_seconds=60)


class Chaos:
    """The run under test and what its clients were told."""

    def __init__(self, client, seed):
        self.client = client
        self.random = random.Random(seed)
        self.consumed: dict[str, str] = {}
        self.all_consumed = asyncio.Event()
        self.refused_acks = 0

    async def work(self, name):
        """A worker that renews, returns, repeats itself, is late, and dies with its leases."""
        serial = 0
        while not self.all_consumed.is_set():
            serial += 1
            leased = await durably(
                lambda n=serial: self.client.lease(3, worker=name, seconds=1, wait=0.5, request_id=f"{name}/{n}")
            )
            fate = self.random.random()
            if fate < 0.15:
                continue  # dies: its leases end by themselves
            if fate < 0.25:
                request = buffer_pb2.ReturnGroupsRequest(worker_id=name, groups=keys_of(leased))
                await durably(lambda r=request: self.client.stub.ReturnGroups(r))
                continue
            if fate < 0.35:
                await asyncio.sleep(1.1)  # too late: somebody else has the group by now
            for one in leased:
                await self.answer(one)

    async def answer(self, leased):
        missing = list(leased.missing_sample_indices)
        wanted = missing if self.random.random() < 0.7 else missing[:1]
        scored = [make_scored(leased.group.group_id, index, reward=self.random.random()) for index in wanted]
        for _ in range(self.random.choice((1, 1, 2))):
            await durably(lambda: self.client.append("r", *scored))

    async def consume(self, name):
        """A learner that acknowledges random batches of READY groups, against a rival that wants the same."""
        step = 0
        while len(self.consumed) < GROUPS:
            states = await durably(lambda: self.client.states("r"))
            ready = [group_id for group_id, state in states.items() if state == "READY"]
            if not ready:
                await self.something_changes()
                continue
            batch = self.random.sample(ready, min(len(ready), 4))
            consumer, step = f"{name}/step/{step}", step + 1
            try:
                await durably(lambda c=consumer, b=batch: self.client.ack("r", c, *b))
            except FailedPreconditionError:
                self.refused_acks += 1
                continue
            for group_id in batch:
                assert group_id not in self.consumed
                self.consumed[group_id] = consumer
        self.all_consumed.set()

    async def something_changes(self):
        """Reads the watch until the second message, or until the service that streams it dies."""

        async def second_message():
            seen = 0
            async for _ in self.client.stub.WatchChannel(buffer_pb2.WatchChannelRequest(run_id="r", channel="train")):
                seen += 1
                if seen == 2:
                    return

        await durably(second_message)

    async def consumed_at_least(self, count):
        while len(self.consumed) < count:
            await self.something_changes()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [1, 2])
async def test_whatever_is_killed_every_group_is_consumed_exactly_once(own_valkey, own_buffer, make_client, seed):
    await keep_every_write(own_valkey)
    async with connect(own_buffer.address) as channel:
        client = make_client(channel)
        chaos = Chaos(client, seed)
        groups = [make_group("r", f"g{i}", samples=SAMPLES, priority=i % 3) for i in range(GROUPS)]
        first = await durably(lambda: client.enqueue(*groups, request_id="q"))

        async def kill_things():
            await chaos.consumed_at_least(GROUPS // 4)
            own_valkey.kill()
            own_valkey.start()
            await keep_every_write(own_valkey)
            await chaos.consumed_at_least(GROUPS // 2)
            own_buffer.kill()
            await asyncio.to_thread(own_buffer.start)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kill_things())
            for rival in ("zero", "npr"):
                tasks.create_task(chaos.consume(rival))
            for number in range(WORKERS):
                tasks.create_task(chaos.work(f"w{number}"))

        assert await client.enqueue(*groups, request_id="q") == first
        audit = await client.audit("r")
        assert list(audit.problems) == []
        assert audit.counts.consumed == len(chaos.consumed) == GROUPS
        assert audit.counts.trajectories == audit.counts.trajectories_expected == GROUPS * SAMPLES
        listed = await client.stub.ListGroups(buffer_pb2.ListGroupsRequest(run_id="r"))
        assert {group.group_id: group.consumer for group in listed.groups} == chaos.consumed
