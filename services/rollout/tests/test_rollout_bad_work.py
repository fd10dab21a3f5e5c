"""Work that can't be done: policies that can't be served, prompts that templates refuse. Nobody else waits for it."""

from __future__ import annotations

import asyncio
import json
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from npr.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from npr.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from npr.types.v1 import policy_pb2, prompt_pb2, sampling_pb2, trajectory_pb2
from npr_common.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, UnavailableError
from npr_common.policy_store import PolicyMetadata
from npr_common.rpc import connect, rpc_errors
from npr_common.testing.servers import running_server
from npr_rollout.policy_loader import LoadedPolicy, PolicyLoader
from npr_rollout.service import RolloutService
from npr_rollout.settings import RolloutSettings
from npr_rollout.shunned import ShunnedPolicies, is_lasting
from npr_rollout.testing.models import tagged_tokenizer, tiny_model

LONG = 60.0
LEASE_SECONDS = 4.0
REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m['content'] }}{% endfor %}"
)


@asynccontextmanager
async def rollout(peers: Any) -> AsyncIterator[Any]:
    settings = RolloutSettings(kv_memory_mib=8, lease_wait_seconds=1.0, lease_seconds=LEASE_SECONDS, torch_threads=1)
    service = RolloutService(settings, peers.addresses)
    async with running_server(service) as address, connect(address) as channel:
        yield rollout_pb2_grpc.RolloutServiceStub(channel)


DECODING = sampling_pb2.DecodingSpec(
    sampling=sampling_pb2.Sampling(temperature=1.0),
    limits=sampling_pb2.Limits(max_tokens=8),
    visibility=sampling_pb2.VISIBILITY_SEQUENTIAL,
)


def job(policy: Any, *texts: str, role: str = "user") -> rollout_pb2.SubmitJobRequest:
    turns = [prompt_pb2.ChatMessage(role=role, content=text) for text in texts or ("a b",)]
    return rollout_pb2.SubmitJobRequest(
        request_id=f"job-{uuid.uuid4().hex[:12]}",
        prompts=[prompt_pb2.Prompt(messages=[turn]) for turn in turns],
        samples_per_prompt=2,
        decoding=DECODING,
        policy=policy,
    )


async def done(stub: Any, job_id: str) -> list[trajectory_pb2.Trajectory]:
    """A job's trajectories, once it is completed."""
    found, last = [], rollout_pb2.Job()
    async with asyncio.timeout(LONG):
        request = rollout_pb2.WatchJobRequest(job_id=job_id, with_trajectories=True)
        async for response in stub.WatchJob(request):
            last = response.job
            found += [item.trajectory for item in response.trajectories]
    assert last.state == rollout_pb2.JOB_STATE_COMPLETED
    return found


def nowhere(store: Any) -> policy_pb2.PolicyRef:
    return policy_pb2.PolicyRef(line="nowhere", digest="0" * 64, manifest_url=f"{store.root_url}/lines/nowhere/0.json")


def unknown_scheme(_: Any) -> policy_pb2.PolicyRef:
    return policy_pb2.PolicyRef(line="scheme", digest="0" * 64, manifest_url="foo://bar")


def folder(store: Any) -> policy_pb2.PolicyRef:
    return policy_pb2.PolicyRef(line="folder", digest="0" * 64, manifest_url=store.root_url)


def _edited(store: Any, line: str, **changes: Any) -> policy_pb2.PolicyRef:
    """A policy whose configuration does not describe its weights."""
    tokenizer = tagged_tokenizer()
    model = tiny_model("qwen3", tokenizer, hidden=32, layers=1)
    files = {"config.json": json.dumps(json.loads(model.config.to_json_string()) | changes).encode()}
    files |= _saved(model, tokenizer, without="config.json")
    return store.publish(line, 0, files, PolicyMetadata(dialect="npr", has_tag_tokens=True, stage="t", step=0))


def _saved(model: Any, tokenizer: Any, without: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as name:
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)
        return {path.name: path.read_bytes() for path in Path(name).iterdir() if path.name != without}


def other_sizes(store: Any) -> policy_pb2.PolicyRef:
    return _edited(store, "sizes", hidden_size=64)


def no_heads(store: Any) -> policy_pb2.PolicyRef:
    return _edited(store, "heads", num_attention_heads=0)


@pytest.mark.parametrize("make_bad", [nowhere, unknown_scheme, folder, other_sizes, no_heads])
async def test_a_policy_that_can_not_be_served_ends_its_own_job_only(peers: Any, publish: Any, make_bad: Any) -> None:
    good, bad = publish(f"beside-{make_bad.__name__}"), make_bad(peers.store)
    async with rollout(peers) as stub:
        with pytest.raises((NotFoundError, InvalidArgumentError, FailedPreconditionError)), rpc_errors():
            await stub.ServePolicy(rollout_pb2.ServePolicyRequest(policy=bad))
        poisoned, sound = job(bad), job(good)
        await stub.SubmitJob(poisoned)
        await stub.SubmitJob(sound)
        for trajectory in await done(stub, poisoned.request_id):
            assert trajectory.outcome == trajectory_pb2.OUTCOME_REFUSED
            assert trajectory.message.startswith("Its policy can't be served: ")
        assert {t.policy.line for t in await done(stub, sound.request_id)} == {good.line}


async def test_a_run_whose_policy_is_away_waits_and_lets_others_pass(peers: Any, publish: Any) -> None:
    good, run = publish("passes"), f"run-{uuid.uuid4().hex[:8]}"
    groups = [
        buffer_pb2.Group(
            group_id=f"{run}-{i}",
            run_id=run,
            channel="c",
            prompt=prompt_pb2.Prompt(token_ids=[1, 2]),
            sample_count=1,
            decoding=DECODING,
            policy=nowhere(peers.store),
            priority=9,
        )
        for i in range(20)
    ]
    async with rollout(peers) as stub, connect(peers.addresses.buffer_address) as channel:
        buffer: Any = buffer_pb2_grpc.BufferServiceStub(channel)
        await buffer.EnqueueGroups(buffer_pb2.EnqueueGroupsRequest(request_id=run, groups=groups))
        request = job(good)
        await stub.SubmitJob(request)
        assert len(await done(stub, request.request_id)) == 2
        listed = await buffer.ListGroups(buffer_pb2.ListGroupsRequest(run_id=run, channel="c"))
        assert {group.state for group in listed.groups} <= {
            buffer_pb2.GROUP_STATE_WAITING,
            buffer_pb2.GROUP_STATE_LEASED,
        }
        await buffer.DeleteRun(buffer_pb2.DeleteRunRequest(run_id=run))


async def test_a_job_must_name_its_policy_as_it_was_published(peers: Any) -> None:
    async with rollout(peers) as stub:
        for blank in (policy_pb2.PolicyRef(), policy_pb2.PolicyRef(line="x", digest="0" * 64)):
            with pytest.raises(InvalidArgumentError, match="manifest_url"), rpc_errors():
                await stub.SubmitJob(job(blank))


async def test_a_prompt_that_the_chat_template_refuses_is_refused(peers: Any) -> None:
    tokenizer = tagged_tokenizer()
    tokenizer.chat_template = REFUSES_SYSTEM
    model = tiny_model("qwen3", tokenizer, hidden=32, layers=1)
    metadata = PolicyMetadata(dialect="npr", has_tag_tokens=True, stage="t", step=0)
    policy = peers.store.publish("template", 0, _saved(model, tokenizer, without=""), metadata)
    async with rollout(peers) as stub:
        request = job(policy, "a", "b", role="system")
        await stub.SubmitJob(request)
        for trajectory in await done(stub, request.request_id):
            assert trajectory.outcome == trajectory_pb2.OUTCOME_REFUSED
            assert "no system" in trajectory.message


def test_a_policy_is_shunned_longer_each_time_until_it_is_served() -> None:
    now = 0.0
    shunned = ShunnedPolicies(clock=lambda: now)
    bad, other = policy_pb2.PolicyRef(line="bad"), policy_pb2.PolicyRef(line="other", version=3)
    shunned.shun(bad)
    assert shunned.now() == [bad]
    now = 4.0
    assert shunned.now() == []
    shunned.shun(bad)
    shunned.shun(other)
    now = 9.0
    assert shunned.now() == [bad]
    shunned.forgive(bad)
    shunned.shun(bad)
    now = 13.5
    assert shunned.now() == []


def test_what_passes_by_itself_is_no_reason_to_shun() -> None:
    assert is_lasting(NotFoundError("gone"))
    assert is_lasting(FailedPreconditionError("no such model"))
    assert not is_lasting(FailedPreconditionError("another is being loaded", reason="SWAP_UNDER_WAY"))
    assert not is_lasting(UnavailableError("the store is away"))


async def test_a_lease_lives_while_its_policy_is_being_loaded(
    peers: Any, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load, load = asyncio.Event(), PolicyLoader.load

    async def late(loader: PolicyLoader, ref: policy_pb2.PolicyRef) -> LoadedPolicy:
        await may_load.wait()
        return await load(loader, ref)

    monkeypatch.setattr(PolicyLoader, "load", late)
    policy = publish("late")
    async with rollout(peers) as stub, connect(peers.addresses.buffer_address) as channel:
        buffer: Any = buffer_pb2_grpc.BufferServiceStub(channel)
        before = await buffer.GetQueueStats(buffer_pb2.GetQueueStatsRequest())
        waiting = job(policy)
        await stub.SubmitJob(waiting)
        async with asyncio.timeout(LONG):
            while not (await buffer.GetQueueStats(buffer_pb2.GetQueueStatsRequest())).leased_groups:
                pass
        await asyncio.sleep(1.5 * LEASE_SECONDS)  # longer than a lease lives by itself
        status = await stub.GetEngineStatus(rollout_pb2.GetEngineStatusRequest())
        assert status.condition.startswith("late@0 is being loaded, since ")
        may_load.set()
        assert len(await done(stub, waiting.request_id)) == 2
        after = await buffer.GetQueueStats(buffer_pb2.GetQueueStatsRequest())
        assert after.expired_leases == before.expired_leases
        assert not (await stub.GetEngineStatus(rollout_pb2.GetEngineStatusRequest())).condition
