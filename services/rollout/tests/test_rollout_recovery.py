"""The service after a fault of its engine: it serves again by itself, or says that it can't until it is helped."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from npr.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from npr.types.v1 import prompt_pb2, sampling_pb2, trajectory_pb2
from npr_common.errors import FailedPreconditionError, InternalError, rpc_errors
from npr_common.rpc import connect
from npr_common.testing.servers import running_server
from npr_rollout.engine.sampling import RandomSampler
from npr_rollout.service import RolloutService
from npr_rollout.settings import RolloutSettings

LONG = 60.0
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Faults:
    """Makes the steps of all engines fail, from one of them on, for some of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first, self.count, self.steps = 0, 0, 0
        sample = RandomSampler.sample

        def faulty(sampler: RandomSampler, *arguments: Any) -> Any:
            self.steps += 1
            if self.first <= self.steps < self.first + self.count:
                raise RuntimeError("a cosmic ray")
            return sample(sampler, *arguments)

        monkeypatch.setattr(RandomSampler, "sample", faulty)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


@asynccontextmanager
async def rollout(peers: Any, **changes: Any) -> AsyncIterator[grpc.aio.Channel]:
    settings = RolloutSettings(
        **{"kv_memory_mib": 8, "lease_wait_seconds": 1.0, "audit_every_step": True, "torch_threads": 1, **changes}
    )
    async with running_server(RolloutService(settings, peers.addresses)) as address, connect(address) as channel:
        yield channel


def prompt(text: str) -> prompt_pb2.Prompt:
    return prompt_pb2.Prompt(messages=[prompt_pb2.ChatMessage(role="user", content=text)])


def decoding(tokens: int) -> sampling_pb2.DecodingSpec:
    return sampling_pb2.DecodingSpec(
        sampling=sampling_pb2.Sampling(temperature=0.0),  # the policy of seed 0 then never says EOS
        limits=sampling_pb2.Limits(max_tokens=tokens),
        visibility=sampling_pb2.VISIBILITY_SEQUENTIAL,
    )


async def generate(stub: Any) -> trajectory_pb2.Trajectory:
    request = rollout_pb2.GenerateRequest(prompt=prompt("a b c"), decoding=decoding(20))
    with rpc_errors():
        events = [event async for event in stub.Generate(request, timeout=LONG)]
    return events[-1].trajectory


async def until_health(channel: grpc.aio.Channel, status: int) -> None:
    async with asyncio.timeout(LONG):
        async for change in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
            if change.status == status:
                return


async def test_a_job_goes_on_after_a_fault(peers: Any, publish: Any, faults: Faults) -> None:
    faults.first, faults.count = 30, 1
    request = rollout_pb2.SubmitJobRequest(
        request_id=f"job-{uuid.uuid4().hex[:12]}",
        prompts=[prompt("a b"), prompt("b c")],
        samples_per_prompt=3,
        decoding=decoding(60),
        policy=publish("struck"),
    )
    async with rollout(peers) as channel:
        stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
        await stub.SubmitJob(request)
        watch = rollout_pb2.WatchJobRequest(job_id=request.request_id, with_trajectories=True)
        async with asyncio.timeout(LONG):
            responses = [response async for response in stub.WatchJob(watch)]
        status = await stub.GetEngineStatus(rollout_pb2.GetEngineStatusRequest(audit=True))
    trajectories = [scored.trajectory for response in responses for scored in response.trajectories]
    assert responses[-1].job.state == rollout_pb2.JOB_STATE_COMPLETED
    assert len({trajectory.trajectory_id for trajectory in trajectories}) == len(trajectories) == 6
    assert {trajectory.outcome for trajectory in trajectories} == {trajectory_pb2.OUTCOME_TRUNCATED}
    assert faults.steps > 60
    assert (status.policy, status.pages_used, list(status.audit_problems)) == (request.policy, 0, [])


async def test_an_engine_that_fails_again_is_down_and_unhealthy_until_a_policy_is_served(
    peers: Any, publish: Any, faults: Faults
) -> None:
    policy = publish("down")
    faults.first, faults.count = 1, 2
    async with rollout(peers, policy_line="down", worker=False) as channel:
        stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
        for _ in range(2):
            await until_health(channel, SERVING)
            with pytest.raises(InternalError, match="a cosmic ray"):
                await generate(stub)
        await until_health(channel, NOT_SERVING)
        with pytest.raises(FailedPreconditionError, match=r"The engine failed: RuntimeError: a cosmic ray"):
            await generate(stub)
        assert not (await stub.GetEngineStatus(rollout_pb2.GetEngineStatusRequest())).HasField("policy")
        answer = await stub.ServePolicy(rollout_pb2.ServePolicyRequest(policy=policy), timeout=LONG)
        assert not answer.HasField("previous")
        await until_health(channel, SERVING)
        assert (await generate(stub)).policy == policy
