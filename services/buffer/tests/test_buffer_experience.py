"""Append, read, list, watch, acknowledge, discard, get, audit, delete."""

import asyncio
import time

import grpc
import pytest

from npr.buffer.v1 import buffer_pb2
from npr.types.v1 import trajectory_pb2
from npr_buffer.testing import make_group, make_policy, make_scored
from npr_common.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, rpc_errors


async def ready(client, *group_ids, version=0, channel="train"):
    """Enqueues and completes groups of two samples."""
    await client.enqueue(*(make_group("r", group_id, channel=channel) for group_id in group_ids))
    scored = [make_scored(group_id, index, version=version) for group_id in group_ids for index in (0, 1)]
    await client.append("r", *scored)


async def test_a_group_is_ready_when_every_sample_is_there(client):
    await client.enqueue(make_group("r", "g"), make_group("r", "h"))
    await client.lease(1)
    first = await client.append("r", make_scored("g", 1), make_scored("h", 0))
    assert (first.appended, first.duplicates, list(first.ready_group_ids)) == (2, 0, [])
    assert await client.states("r") == {"g": "LEASED", "h": "WAITING"}
    second = await client.append("r", make_scored("g", 0), make_scored("g", 1))
    assert (second.appended, second.duplicates, list(second.ready_group_ids)) == (1, 1, ["g"])
    assert await client.states("r") == {"g": "READY", "h": "WAITING"}
    assert (await client.stats()).leased_groups == 0


async def test_the_first_append_wins(client):
    await client.enqueue(make_group("r", "g"))
    await client.append("r", make_scored("g", 0, reward=1.0))
    again = await client.append("r", make_scored("g", 0, reward=-1.0), make_scored("g", 1), make_scored("g", 1))
    assert (again.appended, again.duplicates) == (1, 2)
    (group,) = await client.read("r", "g")
    assert [scored.score.reward for scored in group.trajectories] == [1.0, 1.0]


async def test_a_late_sample_completes_a_group_that_waits_again(client):
    await client.enqueue(make_group("r", "g", samples=1), make_group("r", "h"))
    assert list((await client.append("r", make_scored("g", 0))).ready_group_ids) == ["g"]
    assert [leased.group.group_id for leased in await client.lease(9)] == ["h"]


async def test_another_policy_is_refused_and_nothing_is_stored(client):
    await client.enqueue(make_group("r", "g", policy=make_policy(3)), make_group("r", "free"))
    for wrong in (make_scored("g", 0, version=4), make_scored("g", 0, version=3, line="other")):
        with pytest.raises(FailedPreconditionError, match="group\\(s\\) g "):
            await client.append("r", make_scored("free", 0), wrong)
    forged = make_scored("g", 0, version=3)
    forged.trajectory.policy.digest = "f" * 64
    with pytest.raises(FailedPreconditionError):
        await client.append("r", forged)
    assert (await client.audit("r")).counts.trajectories == 0
    assert (await client.append("r", make_scored("g", 0, version=3))).appended == 1


async def test_bad_appends_are_refused_whole(client):
    await client.enqueue(make_group("r", "g"))
    with pytest.raises(NotFoundError, match="nobody"):
        await client.append("r", make_scored("g", 0), make_scored("nobody", 0))
    with pytest.raises(InvalidArgumentError, match="sample_index"):
        await client.append("r", make_scored("g", 0), make_scored("g", 2))
    misnamed = make_scored("g", 0)
    misnamed.trajectory.trajectory_id = "g/1"
    with pytest.raises(InvalidArgumentError, match="trajectory_id"):
        await client.append("r", misnamed)
    with pytest.raises(InvalidArgumentError):
        await client.append("r", *(make_scored("g", index) for index in range(257)))
    assert (await client.audit("r")).counts.trajectories == 0


async def test_groups_are_read_whole_in_the_order_asked_for(client):
    await ready(client, "g", "h")
    await client.ack("r", "zero/step/0", "g")
    for _ in range(2):
        groups = await client.read("r", "h", "g")
        assert [read.group for read in groups] == [make_group("r", "h"), make_group("r", "g")]
        assert list(groups[0].trajectories) == [make_scored("h", 0), make_scored("h", 1)]


async def test_reading_names_what_is_not_there_or_not_ready(client):
    await ready(client, "g")
    await client.enqueue(make_group("r", "early"))
    with pytest.raises(NotFoundError, match="nobody"):
        await client.read("r", "g", "nobody")
    with pytest.raises(FailedPreconditionError, match="early \\(WAITING\\)"):
        await client.read("r", "g", "early")


async def test_listing_pages_through_a_channel_in_enqueue_order(client):
    await ready(client, "g0", "g1", channel="a")
    await client.enqueue(*(make_group("r", f"g{i}", channel="ab"[i % 2]) for i in range(2, 7)))
    pages, token = [], ""
    while True:
        page = await client.stub.ListGroups(
            buffer_pb2.ListGroupsRequest(run_id="r", channel="a", page_size=2, page_token=token)
        )
        pages.append([group.group_id for group in page.groups])
        token = page.next_page_token
        if not token:
            break
    assert pages == [["g0", "g1"], ["g2", "g4"], ["g6"]]
    everything = await client.stub.ListGroups(buffer_pb2.ListGroupsRequest(run_id="r", without_samples=True))
    assert [group.group_id for group in everything.groups] == [f"g{i}" for i in range(7)]
    assert not any(group.samples for group in everything.groups)
    with pytest.raises(InvalidArgumentError), rpc_errors():
        await client.stub.ListGroups(buffer_pb2.ListGroupsRequest(run_id="r", page_token="x"))


async def test_a_summary_has_the_numbers_by_which_groups_are_chosen(client):
    await client.enqueue(make_group("r", "g", samples=12))
    await client.append("r", *(make_scored("g", index, reward=index) for index in reversed(range(12))))
    await client.discard("r", "no spread", "g")
    (summary,) = (await client.stub.ListGroups(buffer_pb2.ListGroupsRequest(run_id="r"))).groups
    assert (summary.prompt_id, summary.sample_count, summary.discard_reason) == ("prompt-of-g", 12, "no spread")
    assert [sample.reward for sample in summary.samples] == list(range(12))
    assert summary.samples[1] == buffer_pb2.SampleSummary(
        sample_index=1,
        verdict=trajectory_pb2.VERDICT_KIND_CORRECT,
        reward=1.0,
        outcome=trajectory_pb2.OUTCOME_COMPLETED,
        total_tokens=8,
        critical_path_tokens=6,
        forked_blocks=1,
        branches=3,
    )


async def test_a_watch_says_every_change_and_ends_when_nothing_is_left(client):
    await client.enqueue(make_group("r", "g"), make_group("r", "h"), make_group("r", "x", channel="other"))
    stream = client.stub.WatchChannel(buffer_pb2.WatchChannelRequest(run_id="r", channel="train"))

    async def following():
        counts = await asyncio.wait_for(stream.read(), 3)  # below the re-check interval: pub/sub must have brought it
        return (counts.waiting, counts.leased, counts.ready, counts.discarded, counts.trajectories)

    assert await following() == (2, 0, 0, 0, 0)
    await client.lease()
    assert await following() == (1, 1, 0, 0, 0)
    await client.append("r", make_scored("g", 0))
    assert await following() == (1, 1, 0, 0, 1)
    await client.append("r", make_scored("g", 1))
    assert await following() == (1, 0, 1, 0, 2)
    await client.discard("r", "enough", "h")
    assert await following() == (0, 0, 1, 1, 2)
    assert await asyncio.wait_for(stream.read(), 3) is grpc.aio.EOF


async def test_a_burst_of_changes_is_few_messages(client):
    await client.enqueue(*(make_group("r", f"g{i}", samples=1) for i in range(40)))
    stream = aiter(client.stub.WatchChannel(buffer_pb2.WatchChannelRequest(run_id="r", channel="train")))
    assert (await anext(stream)).waiting == 40
    started = time.monotonic()
    for i in range(40):
        await client.append("r", make_scored(f"g{i}", 0))
    bursts = 2 + (time.monotonic() - started) / 0.1
    seen = [counts async for counts in stream]
    assert seen[-1].ready == 40
    assert len(seen) <= bursts


async def test_a_watch_of_an_empty_channel_ends_at_once(client):
    request = buffer_pb2.WatchChannelRequest(run_id="r", channel="nothing")
    counts = [counts async for counts in client.stub.WatchChannel(request)]
    assert counts == [buffer_pb2.WatchChannelResponse()]


async def test_acknowledging_is_all_or_nothing_and_once(client):
    await ready(client, "a", "b")
    await client.enqueue(make_group("r", "early"))
    with pytest.raises(FailedPreconditionError, match="early \\(WAITING\\)"):
        await client.ack("r", "zero/step/1", "a", "early")
    with pytest.raises(NotFoundError, match="nobody"):
        await client.ack("r", "zero/step/1", "a", "nobody")
    with pytest.raises(FailedPreconditionError, match="version"):
        await client.ack("r", "zero/step/1", "a", "b", version=7)
    assert set((await client.states("r", "train")).values()) == {"READY", "WAITING"}
    await client.ack("r", "zero/step/1", "a", "b")
    await client.ack("r", "zero/step/1", "a", "b")
    with pytest.raises(FailedPreconditionError, match="a \\(CONSUMED by zero/step/1\\)"):
        await client.ack("r", "zero/step/2", "a")
    with pytest.raises(FailedPreconditionError, match="CONSUMED"):
        await client.discard("r", "late", "b")
    assert dict((await client.audit("r")).consumed_by) == {"zero/step/1": 2}


async def test_a_group_of_mixed_versions_is_never_consumed(client):
    await client.enqueue(make_group("r", "g"))
    await client.append("r", make_scored("g", 0, version=1), make_scored("g", 1, version=2))
    for version in (1, 2):
        with pytest.raises(FailedPreconditionError, match="g \\(mixed\\)"):
            await client.ack("r", "zero/step/0", "g", version=version)


async def test_discarding_takes_groups_from_workers_and_keeps_the_first_reason(client):
    await client.enqueue(make_group("r", "g"), make_group("r", "h"))
    await client.lease()
    await client.discard("r", "first", "g", "h")
    await client.discard("r", "second", "g")
    with pytest.raises(NotFoundError):
        await client.discard("r", "first", "nobody")
    assert await client.lease(9) == []
    late = await client.append("r", make_scored("g", 0), make_scored("g", 1))
    assert (late.appended, list(late.ready_group_ids)) == (2, [])
    listed = await client.stub.ListGroups(buffer_pb2.ListGroupsRequest(run_id="r"))
    assert [group.discard_reason for group in listed.groups] == ["first", "first"]
    assert not (await client.audit("r")).problems


async def test_one_trajectory_by_id(client):
    await ready(client, "zero/train/3/p7")
    request = buffer_pb2.GetTrajectoryRequest(run_id="r", trajectory_id="zero/train/3/p7/1")
    found = await client.stub.GetTrajectory(request)
    assert found.trajectory == make_scored("zero/train/3/p7", 1)
    assert found.group == make_group("r", "zero/train/3/p7")
    for absent in ("zero/train/3/p7/2", "nobody/0", "x"):
        with pytest.raises(NotFoundError), rpc_errors():
            await client.stub.GetTrajectory(buffer_pb2.GetTrajectoryRequest(run_id="r", trajectory_id=absent))


async def test_deleting_a_run_leaves_nothing_and_no_memory_of_its_requests(client):
    await client.enqueue(make_group("r", "g"), make_group("r", "h"), request_id="q")
    await client.enqueue(make_group("other", "g"))
    await client.lease(1)
    await client.append("r", make_scored("g", 0), make_scored("g", 1))
    for _ in range(2):
        await client.stub.DeleteRun(buffer_pb2.DeleteRunRequest(run_id="r"))
    assert await client.states("r") == {}
    assert (await client.audit("r")) == buffer_pb2.AuditRunResponse(counts=buffer_pb2.WatchChannelResponse())
    with pytest.raises(NotFoundError):
        await client.append("r", make_scored("h", 0))
    assert (await client.stats()).waiting_groups == 1
    assert (await client.enqueue(make_group("r", "g"), request_id="q")).added == 1
