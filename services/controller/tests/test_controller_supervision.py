"""Leading and leaving: a replica leaves at any moment, and another one leads at once."""

import asyncio
import time

import pytest

from npr_common.testing.valkey import ValkeyProcess
from npr_controller.state import EventKind, EventRecord, RunRecord, RunStore, StateChangedError, connect_redis
from npr_controller.state.journal import Journal
from npr_controller.state.leader import LeaderLease
from npr_controller.supervisor import Supervisor
from npr_controller.tasks import end


async def _nothing(_: Journal) -> None:
    """No run is driven here."""


@pytest.mark.parametrize("milliseconds", range(0, 20, 2))
async def test_a_supervisor_ends_whenever_it_is_told_to(valkey: ValkeyProcess, milliseconds: int) -> None:
    """redis-py can swallow a cancellation while it connects; the end must come all the same."""
    store = RunStore(connect_redis(valkey.url))
    lease = LeaderLease(store, 1.0)
    task = asyncio.create_task(Supervisor(store, lease, _nothing).run())
    await asyncio.sleep(milliseconds / 1000)
    async with asyncio.timeout(2):
        await end([task])
    await lease.release()
    await store.redis.aclose()


async def test_a_released_lease_wakes_the_next_leader_and_a_lost_one_ends(valkey: ValkeyProcess) -> None:
    store = RunStore(connect_redis(valkey.url))
    first, second = LeaderLease(store, 30.0), LeaderLease(store, 0.3)
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done, "one leads at a time"
    started = time.monotonic()
    await first.release()
    await asyncio.wait_for(waiting, timeout=5)
    assert time.monotonic() - started < 5
    async with asyncio.timeout(5):
        await first.keep()  # returns at once: the lease is another's
        third = LeaderLease(store, 1.0)
        await third.acquire()  # the second one never renews
    await third.release()
    await store.redis.aclose()


async def test_a_deposed_leader_can_write_nothing(valkey: ValkeyProcess) -> None:
    store = RunStore(connect_redis(valkey.url))
    run = RunRecord(run_id="deposed", recipe="none", created_at=1.0, updated_at=1.0)
    await store.create(run, EventRecord(at=1.0, kind=EventKind.CREATED, run=run))
    old, new = LeaderLease(store, 5.0), LeaderLease(store, 5.0)
    await old.acquire()
    journal = await Journal.open(store, "deposed", old.token)
    await journal.record(EventKind.STAGE_STARTED, stage="zero")
    await old.release()
    await new.acquire()
    with pytest.raises(StateChangedError):
        await journal.record(EventKind.STAGE_STARTED, stage="beta")
    assert (await store.get("deposed")).stage == "zero"
    assert [sequence for sequence, _ in await store.events("deposed", 0)] == [1, 2]
    await new.release()
    await store.redis.delete(*[key async for key in store.redis.scan_iter("*deposed*")])
    await store.redis.zrem("npr:{controller}:runs", "deposed")
    await store.redis.aclose()
