"""The service on an SGLang server: jobs, swaps of policies, a server that dies."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil
import pytest

from npr.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from npr.types.v1 import sampling_pb2, trajectory_pb2
from npr_common.errors import DataLossError, FailedPreconditionError, InternalError
from npr_common.rpc import connect
from npr_common.testing.servers import running_server
from npr_rollout.service import RolloutService
from npr_rollout.settings import BackendKind, RolloutSettings
from npr_rollout.testing.calls import LONG, check_sound, generate, prompt, serve
from npr_rollout.testing.sglang_servers import OwnServers

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

DECODING = sampling_pb2.DecodingSpec(
    sampling=sampling_pb2.Sampling(temperature=1.0, seed=3),
    limits=sampling_pb2.Limits(max_tokens=30),
    visibility=sampling_pb2.VISIBILITY_PARALLEL,
)

SETTINGS = {"DEVICE": "cpu", "ATTENTION_BACKEND": "torch_native", "POOL_TOKENS": "4096", "SILENCE_SECONDS": "10"}


@pytest.fixture
async def stub(peers: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    if "NPR_SGLANG_PYTHON" not in os.environ:
        pytest.skip("NPR_SGLANG_PYTHON names no Python with SGLang")
    for name, value in SETTINGS.items():
        monkeypatch.setenv(f"NPR_SGLANG_{name}", value)
    settings = RolloutSettings(backend=BackendKind.SGLANG, lease_wait_seconds=1.0)
    service = RolloutService(settings, peers.addresses)
    async with running_server(service) as address, connect(address) as channel:
        yield rollout_pb2_grpc.RolloutServiceStub(channel)


async def until(
    stub: Any, condition: Callable[[rollout_pb2.GetEngineStatusResponse], bool]
) -> rollout_pb2.GetEngineStatusResponse:
    """Ask for the engine's status until the condition holds."""
    async with asyncio.timeout(LONG):
        status = await stub.GetEngineStatus(rollout_pb2.GetEngineStatusRequest(audit=True))
        while not condition(status):
            status = await stub.GetEngineStatus(rollout_pb2.GetEngineStatusRequest(audit=True))
    return status


async def test_a_job_and_swaps_of_its_policy(stub: Any, publish: Any) -> None:
    first, second, wrong = publish("s"), publish("s", 1, seed=1), publish("silent", seed=1, canary_of=2)
    await serve(stub, first)
    job = rollout_pb2.SubmitJobRequest(
        request_id=f"job-{uuid.uuid4().hex[:12]}",
        prompts=[prompt(c) for c in "abcd"],
        samples_per_prompt=3,
        decoding=DECODING,
        policy=first,
    )
    await stub.SubmitJob(job)
    found = []
    async with asyncio.timeout(LONG):
        async for response in stub.WatchJob(rollout_pb2.WatchJobRequest(job_id=job.request_id, with_trajectories=True)):
            found += [item.trajectory for item in response.trajectories]
    assert len(found) == 12
    for trajectory in found:
        assert trajectory.policy == first
        assert len(trajectory.behavior_log_probs) == len(trajectory.token_ids) - trajectory.prompt_length

    with pytest.raises(FailedPreconditionError, match="one policy at a time"):
        await serve(stub, second, rollout_pb2.IN_FLIGHT_FINISH_ON_OLD)
    with pytest.raises(DataLossError, match="canary"):
        await serve(stub, wrong)
    before = await generate(stub)
    assert before.policy == first
    drained = asyncio.create_task(generate(stub, 300))
    await asyncio.sleep(0)
    await serve(stub, second, rollout_pb2.IN_FLIGHT_DRAIN)
    assert (await drained).policy in (first, second)
    after = await generate(stub)
    assert after.policy == second
    assert list(after.raw_log_probs) != pytest.approx(list(before.raw_log_probs), abs=1e-3)
    await serve(stub, first, rollout_pb2.IN_FLIGHT_ABORT)
    again = await generate(stub)
    assert list(again.raw_log_probs) == pytest.approx(list(before.raw_log_probs), abs=1e-4)
    await check_sound(stub)


async def test_a_server_that_dies_is_started_again(stub: Any, publish: Any) -> None:
    policy = publish("dies")
    servers = OwnServers()
    await serve(stub, policy)
    before = await generate(stub)
    assert before.outcome == trajectory_pb2.OUTCOME_TRUNCATED
    waiting = asyncio.create_task(generate(stub, 900))
    await until(stub, lambda status: status.running == 1)
    (server,) = servers.running()
    os.killpg(server, signal.SIGKILL)
    with pytest.raises(InternalError):
        await waiting
    after = await generate(stub)
    assert list(after.token_ids) == list(before.token_ids)
    await check_sound(stub)


async def test_a_server_that_falls_silent_is_started_again(stub: Any, publish: Any) -> None:
    """Its front answers still, and says that it is well."""
    policy = publish("silent-server")
    servers = OwnServers()
    await serve(stub, policy)
    before = await generate(stub)
    waiting = asyncio.create_task(generate(stub, 900))
    await until(stub, lambda status: status.running == 1)
    (server,) = servers.running()
    (scheduler,) = [child for child in psutil.Process(server).children() if "scheduler" in child.name()]
    scheduler.suspend()
    with pytest.raises(InternalError, match="said nothing for 10 s"):
        await waiting
    after = await generate(stub)
    assert list(after.token_ids) == list(before.token_ids)
    await check_sound(stub)
