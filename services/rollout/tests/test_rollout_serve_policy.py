"""ServePolicy on a real service process with real peers: each mode, what it refuses, and what jobs make of it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from npr.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from npr.types.v1 import policy_pb2, prompt_pb2, sampling_pb2, trajectory_pb2
from npr_common.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    rpc_errors,
)
from npr_common.rpc import connect

LONG = 60.0
SETTINGS = {
    "NPR_ROLLOUT_KV_MEMORY_MIB": "8",
    "NPR_ROLLOUT_AUDIT_EVERY_STEP": "true",
    "NPR_ROLLOUT_TORCH_THREADS": "1",
    "NPR_ROLLOUT_LEASE_WAIT_SECONDS": "1",
}
Stub = Any


@pytest.fixture(scope="module")
def address(peers: Any) -> Iterator[str]:
    """The service as a process, which these tests share; each serves policies of its own."""
    process = peers.rollout_process(SETTINGS)
    process.start()
    yield process.address
    assert process.stop() == 0


@pytest.fixture
async def stub(address: str) -> AsyncIterator[Stub]:
    async with connect(address) as channel:
        yield rollout_pb2_grpc.RolloutServiceStub(channel)


async def serve(stub: Stub, policy: policy_pb2.PolicyRef, in_flight: int = 0) -> rollout_pb2.ServePolicyResponse:
    request = rollout_pb2.ServePolicyRequest(request_id=uuid.uuid4().hex, policy=policy, in_flight=in_flight)
    with rpc_errors():
        return await stub.ServePolicy(request, timeout=LONG)


async def status(stub: Stub) -> rollout_pb2.GetEngineStatusResponse:
    return await stub.GetEngineStatus(rollout_pb2.GetEngineStatusRequest(audit=True))


async def until(stub: Stub, condition: Callable[[rollout_pb2.GetEngineStatusResponse], bool]) -> None:
    async with asyncio.timeout(LONG):
        while not condition(await status(stub)):
            pass


def long_decoding(tokens: int = 900) -> sampling_pb2.DecodingSpec:
    return sampling_pb2.DecodingSpec(
        sampling=sampling_pb2.Sampling(temperature=0.0),  # the policy of seed 0 then never says EOS
        limits=sampling_pb2.Limits(max_tokens=tokens),
        visibility=sampling_pb2.VISIBILITY_SEQUENTIAL,
    )


def prompt(text: str) -> prompt_pb2.Prompt:
    return prompt_pb2.Prompt(messages=[prompt_pb2.ChatMessage(role="user", content=text)])


async def generate(stub: Stub, tokens: int, started: asyncio.Event | None = None) -> list[Any]:
    request = rollout_pb2.GenerateRequest(prompt=prompt("a b c"), decoding=long_decoding(tokens))
    events = []
    async for event in stub.Generate(request, timeout=LONG):
        events.append(event)
        if started is not None:
            started.set()
    return events


async def mid_decode(stub: Stub, count: int = 3) -> list[asyncio.Task[list[Any]]]:
    """Generations that have got their first tokens."""
    started = [asyncio.Event() for _ in range(count)]
    tasks = [asyncio.create_task(generate(stub, 900, event)) for event in started]
    await asyncio.gather(*(event.wait() for event in started))
    return tasks


def check_stamps(events: list[Any], policy: policy_pb2.PolicyRef) -> trajectory_pb2.Trajectory:
    assert {event.tokens.policy_version for event in events[:-1]} == {policy.version}
    trajectory: trajectory_pb2.Trajectory = events[-1].trajectory
    assert trajectory.policy == policy
    return trajectory


async def check_sound(stub: Stub, policy: policy_pb2.PolicyRef) -> None:
    now = await status(stub)
    assert now.policy == policy
    assert (now.running, now.pages_used, list(now.audit_problems)) == (0, 0, [])


@pytest.mark.parametrize("mode", [0, *rollout_pb2.InFlight.values()[1:]])
async def test_every_token_is_stamped_by_the_policy_that_decoded_it(stub: Stub, publish: Any, mode: int) -> None:
    old, new = (publish(f"stamps{mode}", version, seed=seed) for version, seed in ((3, 0), (4, 4)))
    await serve(stub, old)
    before = await mid_decode(stub)
    answer = await serve(stub, new, mode)
    if mode == rollout_pb2.IN_FLIGHT_FINISH_ON_OLD:
        assert not any(task.done() for task in before)
    check_stamps(await generate(stub, 20), new)
    aborts = mode == rollout_pb2.IN_FLIGHT_ABORT
    assert (answer.previous, answer.aborted) == (old, 3 if aborts else 0)
    for events in await asyncio.gather(*before):
        trajectory = check_stamps(events, old)
        assert (trajectory.outcome == trajectory_pb2.OUTCOME_ABORTED) == aborts
        assert ("Another policy" in trajectory.message) == aborts
    await check_sound(stub, new)


async def test_the_policy_that_is_served_is_answered_at_once(stub: Stub, publish: Any) -> None:
    policy = publish("again")
    await serve(stub, policy)
    tasks = await mid_decode(stub, 1)
    answer = await serve(stub, policy, rollout_pb2.IN_FLIGHT_ABORT)
    assert (answer.previous, answer.aborted) == (policy, 0)
    assert not tasks[0].done()
    check_stamps(await tasks[0], policy)


async def test_what_can_not_be_served_leaves_what_is(stub: Stub, peers: Any, publish: Any) -> None:
    good = publish("good")
    await serve(stub, good)
    missing = policy_pb2.PolicyRef(line="none", digest="0" * 64, manifest_url=good.manifest_url.replace("good", "none"))
    with pytest.raises(NotFoundError):
        await serve(stub, missing, rollout_pb2.IN_FLIGHT_ABORT)
    with pytest.raises(InvalidArgumentError):
        await serve(stub, policy_pb2.PolicyRef(line="good"))
    with pytest.raises(InvalidArgumentError, match="FINISH_ON_OLD"):
        await serve(stub, publish("good", 1), 77)
    rotten = publish("rotten", seed=11)
    blob = peers.store.manifest(rotten).files["model.safetensors"]
    flip_a_bit(peers.folder / "policies" / "blobs" / blob)
    with pytest.raises(DataLossError, match=r"model\.safetensors is corrupt"):
        await serve(stub, rotten, rollout_pb2.IN_FLIGHT_ABORT)
    check_stamps(await generate(stub, 20), good)
    await check_sound(stub, good)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("mode", rollout_pb2.InFlight.values()[1:])
async def test_right_hashes_are_not_enough(stub: Stub, publish: Any, mode: int) -> None:
    """The files are what was published, but they don't say what they should: nobody who decodes notices."""
    good, wrong = publish(f"sings{mode}"), publish(f"silent{mode}", seed=1, canary_of=2)
    await serve(stub, good)
    tasks = await mid_decode(stub, 2)
    with pytest.raises(DataLossError, match=f"policy silent{mode} version 0 fails its canary forward") as caught:
        await serve(stub, wrong, mode)
    assert caught.value.reason == "CANARY"
    assert float(caught.value.metadata["deviation"]) > float(caught.value.metadata["tolerance"])
    for events in await asyncio.gather(*tasks):
        assert check_stamps(events, good).outcome != trajectory_pb2.OUTCOME_ABORTED
    check_stamps(await generate(stub, 20), good)
    await check_sound(stub, good)


async def test_a_policy_from_before_there_were_canaries_is_served(stub: Stub, publish: Any) -> None:
    old_style = publish("old-style", canary=False)
    await serve(stub, old_style)
    await check_sound(stub, old_style)


async def test_a_caller_that_leaves_mid_swap_changes_nothing(stub: Stub, publish: Any) -> None:
    old, new = publish("leaves"), publish("leaves", 1, seed=1)
    await serve(stub, old)
    tasks = await mid_decode(stub)
    call = stub.ServePolicy(rollout_pb2.ServePolicyRequest(policy=new))
    await until_swapping(stub, old)
    waiting = asyncio.create_task(generate(stub, 20))
    call.cancel()
    for events in await asyncio.gather(*tasks):
        check_stamps(events, old)
    check_stamps(await waiting, old)
    await check_sound(stub, old)
    assert (await serve(stub, new)).previous == old


async def until_swapping(stub: Stub, served: policy_pb2.PolicyRef) -> None:
    """Until a swap to another policy is under way: from then on what is served now is no answer any more."""
    async with asyncio.timeout(LONG):
        while True:
            try:
                await serve(stub, served)
            except FailedPreconditionError:
                return


async def test_swaps_at_the_same_time(stub: Stub, publish: Any) -> None:
    first, one, other = (publish("crowd", version, seed=version) for version in range(3))
    await serve(stub, first)
    tasks = await mid_decode(stub)
    calls = [asyncio.create_task(serve(stub, policy)) for policy in (one, other, one)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(answers[1], FailedPreconditionError)
    assert answers[1].reason == "SWAP_UNDER_WAY"
    assert [answer.previous.version for answer in (answers[0], answers[2])] == [0, 1]  # the repeat finds it served
    for events in await asyncio.gather(*tasks):
        check_stamps(events, first)
    await check_sound(stub, one)


def job(policy: policy_pb2.PolicyRef) -> rollout_pb2.SubmitJobRequest:
    return rollout_pb2.SubmitJobRequest(
        request_id=f"job-{uuid.uuid4().hex[:12]}",
        prompts=[prompt(text) for text in ("a b", "b c", "c d")],
        samples_per_prompt=3,
        decoding=long_decoding(900),
        policy=policy,
    )


@pytest.mark.parametrize("mode", rollout_pb2.InFlight.values()[1:])
async def test_a_job_is_decoded_by_its_own_policy_whatever_is_swapped(stub: Stub, publish: Any, mode: int) -> None:
    mine, other = publish(f"job{mode}"), publish(f"job{mode}", 1, seed=1)
    request = job(mine)
    await stub.SubmitJob(request)
    await until(stub, lambda now: now.policy == mine and now.running == 9)
    answer = await serve(stub, other, mode)
    assert answer.previous == mine
    assert (answer.aborted > 0) == (mode == rollout_pb2.IN_FLIGHT_ABORT)
    trajectories, last = [], rollout_pb2.Job()
    async with asyncio.timeout(LONG):
        watch = rollout_pb2.WatchJobRequest(job_id=request.request_id, with_trajectories=True)
        async for response in stub.WatchJob(watch):
            last = response.job
            trajectories += [scored.trajectory for scored in response.trajectories]
    assert last.state == rollout_pb2.JOB_STATE_COMPLETED
    assert len({trajectory.trajectory_id for trajectory in trajectories}) == len(trajectories) == 9
    for trajectory in trajectories:
        assert trajectory.policy == mine
        assert trajectory.outcome not in (trajectory_pb2.OUTCOME_ABORTED, trajectory_pb2.OUTCOME_UNSPECIFIED)
    # What was given back was leased again, for which the worker has changed the policy back.
    await check_sound(stub, mine if mode == rollout_pb2.IN_FLIGHT_ABORT else other)


async def test_a_service_that_is_killed_mid_swap_comes_back(peers: Any, publish: Any, tmp_path: Path) -> None:
    own = {"NPR_ROLLOUT_POLICY_LINE": "healthy", "NPR_CACHE_DIR": str(tmp_path)}
    process = peers.rollout_process({**SETTINGS, **own})
    publish("healthy")
    await asyncio.to_thread(process.start)
    async with connect(process.address) as channel:
        stub: Stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        served = publish("healthy", 1, seed=1)
        await serve(stub, served)
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=LONG)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        tasks = await mid_decode(stub)
        swap = asyncio.create_task(serve(stub, publish("healthy", 2, seed=2)))
        await until_swapping(stub, served)
        process.kill()
        answers = await asyncio.gather(swap, *tasks, return_exceptions=True)
        assert all(isinstance(answer, grpc.aio.AioRpcError | UnavailableError) for answer in answers)
    await asyncio.to_thread(process.start)
    async with connect(process.address) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        assert (await status(stub)).policy.version == 2
        check_stamps(await generate(stub, 20), (await status(stub)).policy)
    assert await asyncio.to_thread(process.stop) == 0
