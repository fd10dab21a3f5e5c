"""The service against real peers: jobs, Generate, policies, and what happens when somebody dies."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from npr.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from npr.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from npr.types.v1 import prompt_pb2, sampling_pb2, trajectory_pb2
from npr_common.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from npr_common.rpc import connect, rpc_errors
from npr_common.testing.servers import running_server
from npr_rollout.service import RolloutService
from npr_rollout.settings import RolloutSettings

LONG = 60.0


def settings(**changes: Any) -> RolloutSettings:
    defaults = {"kv_memory_mib": 8, "lease_wait_seconds": 1.0, "audit_every_step": True, "torch_threads": 1}
    return RolloutSettings(**{**defaults, **changes})


@asynccontextmanager
async def rollout(peers: Any, **changes: Any) -> AsyncIterator[Any]:
    """A stub of a running service."""
    service = RolloutService(settings(**changes), peers.addresses)
    async with running_server(service) as address, connect(address) as channel:
        yield rollout_pb2_grpc.RolloutServiceStub(channel)


def prompt(text: str = "a b c", **fields: Any) -> prompt_pb2.Prompt:
    message = prompt_pb2.ChatMessage(role="user", content=text)
    return prompt_pb2.Prompt(prompt_id=text[:20].strip(), messages=[message], **fields)


def decoding(max_tokens: int = 20, **sampling: Any) -> sampling_pb2.DecodingSpec:
    return sampling_pb2.DecodingSpec(
        sampling=sampling_pb2.Sampling(**{"temperature": 1.0, "seed": 3, **sampling}),
        limits=sampling_pb2.Limits(max_tokens=max_tokens),
        visibility=sampling_pb2.VISIBILITY_PARALLEL,
    )


def job(
    policy: Any, prompts: int = 3, samples: int = 2, verifier: str = "math", **fields: Any
) -> rollout_pb2.SubmitJobRequest:
    return rollout_pb2.SubmitJobRequest(
        request_id=f"job-{uuid.uuid4().hex[:12]}",
        prompts=[prompt(f"a b {chr(99 + i)}", gold="7", verifier=verifier) for i in range(prompts)],
        samples_per_prompt=samples,
        decoding=fields.pop("decoding", decoding()),
        policy=policy,
        **fields,
    )


async def watch_to_end(stub: Any, job_id: str) -> tuple[rollout_pb2.Job, list[trajectory_pb2.ScoredTrajectory]]:
    trajectories, last = [], rollout_pb2.Job()
    async with asyncio.timeout(LONG):
        async for response in stub.WatchJob(rollout_pb2.WatchJobRequest(job_id=job_id, with_trajectories=True)):
            last = response.job
            trajectories.extend(response.trajectories)
    return last, trajectories


async def until(stub: Any, condition: Callable[[rollout_pb2.GetEngineStatusResponse], bool]) -> None:
    """Ask for the engine's status until the condition holds."""
    async with asyncio.timeout(LONG):
        status = await stub.GetEngineStatus(rollout_pb2.GetEngineStatusRequest())
        while not condition(status):
            status = await stub.GetEngineStatus(rollout_pb2.GetEngineStatusRequest())


async def test_a_job_goes_round(peers: Any, publish: Any) -> None:
    policy = publish("round")
    request = job(policy)
    async with rollout(peers) as stub:
        assert (await stub.SubmitJob(request)).job_id == request.request_id
        await stub.SubmitJob(request)  # a repeat adds nothing
        done, trajectories = await watch_to_end(stub, request.request_id)
        listed = await stub.ListJobs(rollout_pb2.ListJobsRequest())
        status = await stub.GetEngineStatus(rollout_pb2.GetEngineStatusRequest(audit=True))
    assert done.state == rollout_pb2.JOB_STATE_COMPLETED
    assert (done.prompts, done.trajectories, done.trajectories_expected) == (3, 6, 6)
    assert sum(done.outcomes.values()) == sum(done.verdicts.values()) == 6
    assert len({item.trajectory.trajectory_id for item in trajectories}) == len(trajectories) == 6
    for item in trajectories:
        check_trajectory(item.trajectory, policy)
        assert item.score.verdict == trajectory_pb2.VERDICT_KIND_INCORRECT
    assert listed.jobs[0].job_id == request.request_id
    assert (status.running, status.pages_used, list(status.audit_problems)) == (0, 0, [])


def check_trajectory(trajectory: trajectory_pb2.Trajectory, policy: Any) -> None:
    response = len(trajectory.token_ids) - trajectory.prompt_length
    assert trajectory.policy == policy
    assert len(trajectory.behavior_log_probs) == len(trajectory.forced) == trajectory.ledger.total_tokens == response
    assert trajectory.outcome != trajectory_pb2.OUTCOME_UNSPECIFIED


async def test_generate_streams_what_the_trajectory_holds(peers: Any, publish: Any) -> None:
    policy = publish("stream")
    async with rollout(peers, policy_line="stream", worker=False) as stub:
        spec = decoding(40, min_p=0.001, raw_log_probs=True)
        call = stub.Generate(rollout_pb2.GenerateRequest(request_id="g", prompt=prompt(), decoding=spec))
        events = [event async for event in call]
    trajectory = events[-1].trajectory
    check_trajectory(trajectory, policy)
    tokens = [token for event in events[:-1] for token in event.tokens.token_ids]
    assert sorted(tokens) == sorted(trajectory.token_ids[trajectory.prompt_length :])
    raw = [value for event in events[:-1] for value in event.tokens.raw_log_probs]
    assert sorted(raw) == sorted(trajectory.raw_log_probs)
    assert len(raw) == len(tokens)


async def test_leaving_a_stream_gives_every_page_back(peers: Any, publish: Any) -> None:
    publish("leave")
    async with rollout(peers, policy_line="leave", worker=False) as stub:
        spec = decoding(900)
        spec.visibility = sampling_pb2.VISIBILITY_SEQUENTIAL
        spec.sampling.temperature = 50.0  # EOS stays unlikely
        call = stub.Generate(rollout_pb2.GenerateRequest(prompt=prompt(), decoding=spec))
        await anext(aiter(call))
        call.cancel()
        await until(stub, lambda status: status.running == 0)
        status = await stub.GetEngineStatus(rollout_pb2.GetEngineStatusRequest(audit=True))
    assert (status.pages_used, list(status.audit_problems)) == (0, [])


async def test_a_job_with_an_unknown_verifier_is_refused_with_those_there_are(peers: Any, publish: Any) -> None:
    request = job(publish("verifiers"))
    request.prompts[1].verifier = "chess"
    async with rollout(peers, worker=False) as stub:
        with pytest.raises(InvalidArgumentError, match=r"named 'chess'; choose one of .*math") as caught, rpc_errors():
            await stub.SubmitJob(request)
        with pytest.raises(NotFoundError), rpc_errors():
            await stub.GetJob(rollout_pb2.GetJobRequest(job_id=request.request_id))
    assert set(caught.value.field_violations) == {"prompts[1].verifier"}


async def test_a_verifier_is_believed_while_the_reward_service_is_away(peers: Any, publish: Any) -> None:
    request = job(publish("away"), verifier="chess")
    away = replace(peers, addresses=peers.addresses.model_copy(update={"reward_address": "127.0.0.1:1"}))
    async with rollout(away, worker=False) as stub:
        assert (await stub.SubmitJob(request)).job_id == request.request_id


async def test_a_job_without_a_verifier_is_not_judged(peers: Any, publish: Any) -> None:
    async with rollout(peers) as stub:
        request = job(publish("alone"), verifier="")
        await stub.SubmitJob(request)
        done, _ = await watch_to_end(stub, request.request_id)
    assert dict(done.verdicts) == {"not_judged": 6}


async def test_bad_requests_say_what_to_do(peers: Any, publish: Any) -> None:
    policy = publish("bad")
    async with rollout(peers, worker=False) as stub:
        with pytest.raises(FailedPreconditionError, match="npr serve-policy RUN"), rpc_errors():
            async for _ in stub.Generate(rollout_pb2.GenerateRequest(prompt=prompt(), decoding=decoding())):
                pass
        with pytest.raises(NotFoundError), rpc_errors():
            await stub.GetJob(rollout_pb2.GetJobRequest(job_id="never"))
        with pytest.raises(InvalidArgumentError) as caught, rpc_errors():
            await stub.SubmitJob(rollout_pb2.SubmitJobRequest(request_id="no spaces, please", policy=policy))
        assert {"request_id", "prompts", "samples_per_prompt"} <= caught.value.field_violations.keys()
    async with rollout(peers, policy_line="bad", worker=False) as stub:
        with pytest.raises(InvalidArgumentError, match="context"), rpc_errors():
            request = rollout_pb2.GenerateRequest(prompt=prompt("a " * 2000), decoding=decoding())
            async for _ in stub.Generate(request):
                pass


async def test_a_prompt_that_is_too_long_ends_typed_in_a_job(peers: Any, publish: Any) -> None:
    request = job(publish("long"), prompts=1)
    request.prompts.append(prompt("b " * 2000, gold="7", verifier="math"))
    async with rollout(peers) as stub:
        await stub.SubmitJob(request)
        done, trajectories = await watch_to_end(stub, request.request_id)
    assert done.outcomes["refused"] == 2
    refused = [t.trajectory for t in trajectories if t.trajectory.outcome == trajectory_pb2.OUTCOME_REFUSED]
    assert all("context" in trajectory.message for trajectory in refused)


async def test_each_group_is_decoded_by_the_policy_it_names(peers: Any, publish: Any) -> None:
    policies = [publish("switch", version, seed=version) for version in range(3)]
    requests = [job(policy, prompts=2) for policy in policies]
    async with rollout(peers) as stub:
        for request in requests:
            await stub.SubmitJob(request)
        for request, policy in zip(requests, policies, strict=True):
            _, trajectories = await watch_to_end(stub, request.request_id)
            assert len(trajectories) == 4
            assert {t.trajectory.policy.version for t in trajectories} == {policy.version}


async def test_a_killed_buffer_is_waited_for(peers: Any, publish: Any) -> None:
    request = job(publish("killed"), prompts=6, samples=4, decoding=decoding(60))
    async with rollout(peers) as stub:
        await stub.SubmitJob(request)
        peers.buffer.kill()
        await asyncio.to_thread(peers.buffer.start)
        done, trajectories = await watch_to_end(stub, request.request_id)
    assert done.state == rollout_pb2.JOB_STATE_COMPLETED
    assert len({item.trajectory.trajectory_id for item in trajectories}) == 24


async def test_a_restarted_service_finds_its_jobs(peers: Any, publish: Any) -> None:
    request = job(publish("restart"), prompts=4)
    async with rollout(peers, worker=False) as stub:
        await stub.SubmitJob(request)
        assert (await stub.GetJob(rollout_pb2.GetJobRequest(job_id=request.request_id))).job.trajectories == 0
    async with rollout(peers) as stub:
        done, _ = await watch_to_end(stub, request.request_id)
    assert done.state == rollout_pb2.JOB_STATE_COMPLETED


async def test_draining_gives_the_work_back(peers: Any, publish: Any) -> None:
    spec = decoding(900, temperature=50.0)
    spec.visibility = sampling_pb2.VISIBILITY_SEQUENTIAL
    request = job(publish("drain"), prompts=2, decoding=spec)
    async with rollout(peers) as stub:
        await stub.SubmitJob(request)
        await until(stub, lambda status: status.running > 0)
    async with connect(peers.addresses.buffer_address) as channel:
        listing = buffer_pb2.ListGroupsRequest(run_id="jobs", channel=request.request_id)
        groups = (await buffer_pb2_grpc.BufferServiceStub(channel).ListGroups(listing)).groups
    assert {group.state for group in groups} == {buffer_pb2.GROUP_STATE_WAITING}
    async with rollout(peers, worker=False) as stub:
        cancelled = await stub.CancelJob(rollout_pb2.CancelJobRequest(job_id=request.request_id))
    assert cancelled.job.state == rollout_pb2.JOB_STATE_CANCELLED


async def test_a_killed_reward_service_is_waited_for(peers: Any, publish: Any) -> None:
    request = job(publish("judge"), prompts=3)
    peers.reward.kill()
    async with rollout(peers) as stub:
        await stub.SubmitJob(request)
        await until(stub, lambda status: status.tokens > 0)
        await asyncio.to_thread(peers.reward.start)
        done, trajectories = await watch_to_end(stub, request.request_id)
    assert done.verdicts == {"incorrect": 6}
    assert len(trajectories) == 6


async def test_a_killed_rollout_process_loses_nothing(peers: Any, publish: Any) -> None:
    request = job(publish("crash"), prompts=8, samples=8, decoding=decoding(200))
    process = peers.rollout_process({"NPR_ROLLOUT_LEASE_SECONDS": "3", "NPR_ROLLOUT_MAX_RUNNING": "4"})
    await asyncio.to_thread(process.start)
    async with connect(process.address) as channel:
        stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
        await stub.SubmitJob(request)
        await until(stub, lambda status: status.running > 0)
    process.kill()
    await asyncio.to_thread(process.start)
    async with connect(process.address) as channel:
        done, trajectories = await watch_to_end(rollout_pb2_grpc.RolloutServiceStub(channel), request.request_id)
    assert done.state == rollout_pb2.JOB_STATE_COMPLETED
    assert len({item.trajectory.trajectory_id for item in trajectories}) == len(trajectories) == 64
    assert await asyncio.to_thread(process.stop) == 0
