"""Calls of the rollout service, as its tests make them."""

from __future__ import annotations

import asyncio
from typing import Any

from npr.rollout.v1 import rollout_pb2
from npr.types.v1 import policy_pb2, prompt_pb2, sampling_pb2, trajectory_pb2
from npr_common.rpc import rpc_errors

LONG = 240.0
"""Seconds that a call may take; a server that has to be started takes half a minute."""


def prompt(text: str = "a b c") -> prompt_pb2.Prompt:
    """A user's turn."""
    return prompt_pb2.Prompt(messages=[prompt_pb2.ChatMessage(role="user", content=text)])


def greedy(tokens: int) -> sampling_pb2.DecodingSpec:
    """Goes round in circles, and so to its limit, with a random model."""
    return sampling_pb2.DecodingSpec(
        sampling=sampling_pb2.Sampling(temperature=0.0, raw_log_probs=True),
        limits=sampling_pb2.Limits(max_tokens=tokens),
        visibility=sampling_pb2.VISIBILITY_SEQUENTIAL,
    )


async def serve(stub: Any, policy: policy_pb2.PolicyRef, mode: int = 0) -> rollout_pb2.ServePolicyResponse:
    """Serve a policy; `mode` is an `InFlight`. Raises the service's typed errors."""
    with rpc_errors():
        request = rollout_pb2.ServePolicyRequest(policy=policy, in_flight=mode)  # type: ignore[arg-type]
        answer: rollout_pb2.ServePolicyResponse = await stub.ServePolicy(request, timeout=LONG)
        return answer


async def generate(stub: Any, tokens: int = 20, started: asyncio.Event | None = None) -> trajectory_pb2.Trajectory:
    """A greedy trajectory; `started` is set with its first tokens. Raises the service's typed errors."""
    request = rollout_pb2.GenerateRequest(prompt=prompt(), decoding=greedy(tokens))
    with rpc_errors():
        async for event in stub.Generate(request, timeout=LONG):
            if started is not None:
                started.set()
            if event.HasField("trajectory"):
                trajectory: trajectory_pb2.Trajectory = event.trajectory
                return trajectory
    raise AssertionError("no trajectory")


async def mid_decode(stub: Any, tokens: int) -> asyncio.Task[trajectory_pb2.Trajectory]:
    """A generation that has got its first tokens."""
    started = asyncio.Event()
    task = asyncio.create_task(generate(stub, tokens, started))
    async with asyncio.timeout(LONG):
        await started.wait()
    return task


async def check_sound(stub: Any) -> None:
    """At idle nothing is held and nothing is lost."""
    async with asyncio.timeout(LONG):
        while True:
            told = await stub.GetEngineStatus(rollout_pb2.GetEngineStatusRequest(audit=True))
            if told.running == 0 and told.pages_used == 0:
                break
    assert list(told.audit_problems) == []
