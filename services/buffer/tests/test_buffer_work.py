"""Enqueue, lease, renew, return: order, idempotency, policies, fairness, waiting, backpressure."""

import asyncio
import time

import pytest

from npr.buffer.v1 import buffer_pb2
from npr.types.v1 import policy_pb2
from npr_buffer.leasing import LeaseAsk, Leasing
from npr_buffer.settings import BufferSettings
from npr_buffer.store.gateway import RedisGateway
from npr_buffer.store.run_index import RunIndex
from npr_buffer.store.run_store import RunStore
from npr_buffer.store.wakeups import Wakeups
from npr_buffer.testing import keys_of, make_group, make_policy, make_scored
from npr_common.errors import InvalidArgumentError, ResourceExhaustedError, rpc_errors


def ids(leased):
    return [one.group.group_id for one in leased]


async def test_groups_are_leased_by_priority_then_age(client):
    await client.enqueue(*(make_group("r", f"g{i}", priority=i % 2) for i in range(6)))
    assert ids(await client.lease(6)) == ["g1", "g3", "g5", "g0", "g2", "g4"]


async def test_extreme_priorities_keep_their_order(client):
    await client.enqueue(
        make_group("r", "low", priority=-(2**31)), make_group("r", "mid"), make_group("r", "high", priority=2**31 - 1)
    )
    assert ids(await client.lease(3)) == ["high", "mid", "low"]


async def test_a_leased_group_says_what_is_missing_and_when_the_lease_ends(client):
    group = make_group("r", "g", samples=4)
    await client.enqueue(group)
    await client.append("r", make_scored("g", 2))
    (leased,) = await client.lease(seconds=30)
    assert leased.group == group
    assert list(leased.missing_sample_indices) == [0, 1, 3]
    assert 28 < leased.expires_at.ToMilliseconds() / 1000 - time.time() <= 30


async def test_enqueue_is_idempotent_by_request_and_by_group(client):
    groups = [make_group("r", "a"), make_group("r", "b")]
    first = await client.enqueue(*groups, request_id="q")
    assert (first.added, first.duplicates) == (2, 0)
    assert await client.enqueue(*groups, request_id="q") == first
    again = await client.enqueue(make_group("r", "a", samples=9), make_group("r", "c"))
    assert (again.added, again.duplicates) == (1, 1)
    assert [leased.group.sample_count for leased in await client.lease(9)] == [2, 2, 2]


async def test_a_full_run_is_refused_whole_and_says_when_to_retry(client):
    await client.enqueue(*(make_group("r", f"g{i}", samples=1) for i in range(49)))
    with pytest.raises(ResourceExhaustedError) as refused:
        await client.enqueue(make_group("r", "x"), make_group("r", "y"))
    assert refused.value.reason == "RUN_FULL"
    assert refused.value.retry_after_seconds == 5.0
    assert len(await client.states("r")) == 49
    await client.discard("r", "room", "g0")
    assert (await client.enqueue(make_group("r", "x"), make_group("r", "y"))).added == 2
    assert (await client.enqueue(make_group("other", "x"))).added == 1


async def test_a_repeated_lease_request_gets_the_same_leases_while_they_live(client):
    await client.enqueue(*(make_group("r", f"g{i}") for i in range(4)))
    await client.enqueue(make_group("other", "o"))
    first = await client.lease(2, request_id="q")
    assert await client.lease(2, request_id="q") == first
    assert ids(await client.lease(9)) == ["g2", "g3", "o"]
    with rpc_errors():
        await client.stub.ReturnGroups(buffer_pb2.ReturnGroupsRequest(worker_id="w1", groups=keys_of(first)))
    assert ids(await client.lease(2, request_id="q")) == ids(first)
    assert ids(await client.lease(2, request_id="q")) == ids(first)


async def test_all_groups_of_an_answer_need_the_same_policy(client):
    one, two = make_policy(1), make_policy(2)
    await client.enqueue(
        make_group("r", "a", policy=one), make_group("r", "b", policy=two), make_group("r", "c", policy=one)
    )
    await client.enqueue(make_group("other", "d", policy=one), make_group("other", "e"))
    assert ids(await client.lease(9)) == ["a", "c", "d"]
    assert ids(await client.lease(9)) == ["b"]
    assert ids(await client.lease(9)) == ["e"]


async def test_the_preferred_policy_comes_first_within_its_priority_only(client):
    one, two = make_policy(1), make_policy(2)
    await client.enqueue(
        make_group("r", "old", policy=one),
        make_group("r", "preferred", policy=two),
        make_group("r", "urgent", policy=one, priority=1),
    )
    assert ids(await client.lease(prefer=two)) == ["urgent"]
    assert ids(await client.lease(prefer=two)) == ["preferred"]
    assert ids(await client.lease(prefer=two)) == ["old"]


async def test_only_preferred_takes_that_policy_or_none(client):
    await client.enqueue(make_group("r", "stranger", policy=make_policy(1), priority=9), make_group("r", "free"))
    assert ids(await client.lease(9, prefer=make_policy(2), only=True)) == ["free"]
    assert await client.lease(9, prefer=make_policy(2), only=True) == []
    assert await client.lease(9, only=True) == []


async def test_avoided_policies_are_passed_over_and_keep_their_place(client):
    one, two = make_policy(1), make_policy(2)
    await client.enqueue(make_group("r", "bad", policy=one, priority=9), make_group("r", "free", priority=1))
    await client.enqueue(make_group("other", "good", policy=two))
    assert ids(await client.lease(9, avoid=[one, policy_pb2.PolicyRef()])) == ["good"]
    assert ids(await client.lease(9, avoid=[one])) == ["free"]
    assert await client.lease(9, avoid=[one]) == []
    assert ids(await client.lease(9)) == ["bad"]
    with pytest.raises(InvalidArgumentError, match="avoid_policies"):
        await client.lease(avoid=[one] * 257)


async def test_runs_are_served_oldest_head_first_whatever_their_size(client):
    await client.enqueue(make_group("big", "b0"))
    await asyncio.sleep(0.003)  # ages are whole milliseconds of Redis' clock
    await client.enqueue(make_group("small", "s0"))
    await asyncio.sleep(0.003)
    await client.enqueue(*(make_group("big", f"b{i}") for i in range(1, 20)))
    assert [ids(await client.lease()) for _ in range(3)] == [["b0"], ["s0"], ["b1"]]


async def test_a_higher_priority_in_a_younger_run_goes_first(client):
    await client.enqueue(make_group("a", "a0"))
    await client.enqueue(make_group("b", "b0", priority=1))
    assert ids(await client.lease(2)) == ["b0", "a0"]


async def test_a_returned_group_takes_its_place_again(client):
    await client.enqueue(*(make_group("r", f"g{i}") for i in range(3)))
    leased = await client.lease(2)
    stranger = buffer_pb2.ReturnGroupsRequest(worker_id="somebody", groups=keys_of(leased))
    assert (await client.stub.ReturnGroups(stranger)).returned == 0
    mine = buffer_pb2.ReturnGroupsRequest(worker_id="w1", groups=keys_of(leased))
    assert (await client.stub.ReturnGroups(mine)).returned == 2
    assert (await client.stub.ReturnGroups(mine)).returned == 0
    assert ids(await client.lease(9)) == ["g0", "g1", "g2"]


async def test_an_ended_lease_is_leased_again_and_its_holder_learns_it(client):
    await client.enqueue(make_group("r", "g"), make_group("r", "h"))
    mine = await client.lease(2, seconds=1)
    renewal = buffer_pb2.RenewLeasesRequest(worker_id="w1", groups=keys_of(mine)[1:], lease_seconds=60)
    assert not (await client.stub.RenewLeases(renewal)).lost_groups
    started = time.monotonic()
    assert ids(await client.lease(9, worker="w2", wait=20)) == ["g"]
    assert 0.5 < time.monotonic() - started < 3  # woken by the lease's end, not by the re-check
    renewal = buffer_pb2.RenewLeasesRequest(worker_id="w1", groups=keys_of(mine), lease_seconds=60)
    assert list((await client.stub.RenewLeases(renewal)).lost_groups) == keys_of(mine)[:1]
    stats = await client.stats()
    assert (stats.leased_groups, stats.waiting_groups, stats.expired_leases) == (2, 0, 1)


async def test_a_waiting_lease_wakes_when_work_comes(client):
    waiting = asyncio.create_task(client.lease(wait=30))
    quiet = await client.lease(wait=0.2)
    assert quiet == []
    assert not waiting.done()
    started = time.monotonic()
    await client.enqueue(make_group("r", "g"))
    assert ids(await waiting) == ["g"]
    assert time.monotonic() - started < 1.0


class SlowGateway(RedisGateway):
    """Holds the answer of `lease` back until `release` is set; `taken` says that Redis has done it."""

    def __init__(self, settings):
        super().__init__(settings)
        self.taken, self.release = asyncio.Event(), asyncio.Event()

    async def run_script(self, name, run_id, arguments):
        reply = await super().run_script(name, run_id, arguments)
        if name == "lease":
            self.taken.set()
            await self.release.wait()
        return reply


async def test_what_a_client_had_taken_when_it_left_waits_again(client, valkey_process):
    await client.enqueue(make_group("r", "g"))
    settings = BufferSettings(redis_url=valkey_process.url)
    gateway = SlowGateway(settings)
    leasing = Leasing(gateway, RunStore(gateway, settings), RunIndex(gateway), Wakeups(gateway), recheck_seconds=5)
    call = asyncio.create_task(leasing.lease(LeaseAsk("q", "w", max_groups=1, lease_ms=60_000), wait_seconds=0))
    await gateway.taken.wait()
    assert await client.states("r") == {"g": "LEASED"}
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    gateway.release.set()
    await leasing.drain()
    assert await client.states("r") == {"g": "WAITING"}
    await gateway.close()


async def test_queue_stats_count_all_runs(client):
    await client.enqueue(make_group("a", "g"), make_group("a", "h"))
    await client.enqueue(make_group("b", "g"))
    await client.lease()
    stats = await client.stats()
    assert (stats.waiting_groups, stats.leased_groups) == (2, 1)
    assert 0 < stats.oldest_waiting_seconds < 5


@pytest.mark.parametrize(
    ("request_message", "field"),
    [
        (buffer_pb2.LeaseGroupsRequest(worker_id="w", max_groups=1, lease_seconds=9), "request_id"),
        (buffer_pb2.LeaseGroupsRequest(request_id="q", max_groups=1, lease_seconds=9), "worker_id"),
        (buffer_pb2.LeaseGroupsRequest(request_id="q", worker_id="w", lease_seconds=9), "max_groups"),
        (buffer_pb2.LeaseGroupsRequest(request_id="q", worker_id="w", max_groups=1), "lease_seconds"),
        (
            buffer_pb2.LeaseGroupsRequest(
                request_id="q", worker_id="w", max_groups=1, lease_seconds=9, wait_seconds=float("nan")
            ),
            "wait_seconds",
        ),
    ],
)
async def test_a_bad_lease_names_its_field(client, request_message, field):
    with pytest.raises(InvalidArgumentError) as refused, rpc_errors():
        await client.stub.LeaseGroups(request_message)
    assert set(refused.value.field_violations) == {field}


@pytest.mark.parametrize(
    ("group", "field"),
    [
        (make_group("{r}", "g"), "groups[0].run_id"),
        (make_group("r", ""), "groups[0].group_id"),
        (make_group("r", "g", channel="a b"), "groups[0].channel"),
        (make_group("r", "g", samples=0), "groups[0].sample_count"),
        (buffer_pb2.Group(run_id="r", group_id="g", channel="c", sample_count=1), "groups[0].prompt"),
    ],
)
async def test_a_bad_group_names_its_field(client, group, field):
    with pytest.raises(InvalidArgumentError) as refused:
        await client.enqueue(group)
    assert set(refused.value.field_violations) == {field}


async def test_an_enqueue_is_one_run_and_at_most_4096_groups(client):
    with pytest.raises(InvalidArgumentError):
        await client.enqueue(make_group("a", "g"), make_group("b", "g"))
    with pytest.raises(InvalidArgumentError):
        await client.enqueue(*(make_group("a", f"g{i}") for i in range(4097)))
