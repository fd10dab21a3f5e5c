"""The RPCs of `npr.rollout.v1.RolloutService`: check the request, do it, answer. The proto is the contract."""
# ruff: noqa: N802 - the proto names the methods

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from npr.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from npr_common.errors import InvalidArgumentError, ResourceExhaustedError
from npr_common.schema.detokenizer import Detokenizer
from npr_common.telemetry import current_traceparent
from npr_rollout.encoding import EncodedPrompt
from npr_rollout.engine_thread import EngineThread
from npr_rollout.jobs import Jobs
from npr_rollout.messages import Decoding, Origin, check_policy_ref, deadline_after, trajectory_message
from npr_rollout.policy_loader import LoadedPolicy, PolicyStamp
from npr_rollout.policy_switch import PolicySwitch
from npr_rollout.record.outcomes import ForkRefusal
from npr_rollout.record.request import FinishedEvent, Request, TokensEvent
from npr_rollout.swap import InFlight
from npr_rollout.traces import record_trajectory

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]

_INTERACTIVE_PRIORITY = 1 << 20  # somebody is waiting for it
_RETRY_SECONDS = 1.0
_DEFAULT_PAGE = 100


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Stateless between calls."""

    def __init__(
        self, engine: EngineThread, switch: PolicySwitch, jobs: Jobs, worker_id: str, max_waiting: int
    ) -> None:
        self._engine = engine
        self._switch = switch
        self._jobs = jobs
        self._worker_id = worker_id
        self._max_waiting = max_waiting

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        if self._engine.in_flight >= self._max_waiting:
            raise ResourceExhaustedError(
                f"{self._max_waiting} requests are on their way; try again later.", retry_after_seconds=_RETRY_SECONDS
            )
        decoding = Decoding.parse(request.decoding, default_refusal=ForkRefusal.SERIALIZE)
        deadline = deadline_after(context.time_remaining())
        served: list[PolicyStamp] = []
        prompt = await EncodedPrompt.of(request.prompt, self._engine)

        def make(policy: LoadedPolicy) -> Request:
            served.append(policy.stamp)
            ids = prompt.ids(policy.tokenizer)
            name = f"generate/{request.request_id}/{uuid.uuid4().hex}"
            return decoding.request(name, ids, priority=_INTERACTIVE_PRIORITY, deadline=deadline, stream=True)

        events = self._engine.stream(make)
        texts: dict[tuple[int, int], Detokenizer] = {}
        try:
            async for event in events:
                if isinstance(event, TokensEvent):
                    yield rollout_pb2.GenerateResponse(tokens=_chunk(event, served[0], texts))
                else:
                    yield rollout_pb2.GenerateResponse(trajectory=_trajectory(event, request, served[0]))
        finally:
            await events.aclose()

    async def SubmitJob(self, request: rollout_pb2.SubmitJobRequest, context: Context) -> rollout_pb2.SubmitJobResponse:
        return rollout_pb2.SubmitJobResponse(job_id=await self._jobs.submit(request))

    async def GetJob(self, request: rollout_pb2.GetJobRequest, context: Context) -> rollout_pb2.GetJobResponse:
        return rollout_pb2.GetJobResponse(job=await self._jobs.get(request.job_id))

    async def WatchJob(
        self, request: rollout_pb2.WatchJobRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.WatchJobResponse]:
        async for response in self._jobs.watch(request.job_id, with_trajectories=request.with_trajectories):
            yield response

    async def CancelJob(self, request: rollout_pb2.CancelJobRequest, context: Context) -> rollout_pb2.CancelJobResponse:
        return rollout_pb2.CancelJobResponse(job=await self._jobs.cancel(request.job_id))

    async def ListJobs(self, request: rollout_pb2.ListJobsRequest, context: Context) -> rollout_pb2.ListJobsResponse:
        return rollout_pb2.ListJobsResponse(jobs=await self._jobs.newest(request.page_size or _DEFAULT_PAGE))

    async def GetEngineStatus(
        self, request: rollout_pb2.GetEngineStatusRequest, context: Context
    ) -> rollout_pb2.GetEngineStatusResponse:
        status, problems = await self._engine.status(audit=request.audit)
        return rollout_pb2.GetEngineStatusResponse(
            policy=self._engine.policy,
            running=status.running,
            waiting=status.waiting,
            pages_total=status.pages_total,
            pages_used=status.pages_used,
            steps=status.steps,
            tokens=status.tokens,
            fork_refusals={reason.name.lower(): count for reason, count in status.fork_refusals.items()},
            forks=status.forks,
            joins=status.joins,
            audit_problems=problems,
            worker_id=self._worker_id,
            preemptions=status.preemptions,
            evictions=status.evictions,
            pages_cached=status.pages_cached,
            scheduling_seconds=status.scheduling_seconds,
            forward_seconds=status.forward_seconds,
            sampling_seconds=status.sampling_seconds,
            kv_tokens_read=status.kv_tokens_read,
            kv_tokens_attended=status.kv_tokens_attended,
            joins_by_text=status.joins_by_text,
            asleep=self._switch.asleep,
            server=status.server,
            backend=self._switch.backend_name,
            condition=self._switch.condition,
        )

    async def ServePolicy(
        self, request: rollout_pb2.ServePolicyRequest, context: Context
    ) -> rollout_pb2.ServePolicyResponse:
        check_policy_ref(request.policy)
        swapped = await self._switch.serve(request.policy, _in_flight(request.in_flight), wake=True)
        return rollout_pb2.ServePolicyResponse(previous=swapped.previous, aborted=swapped.aborted)

    async def Sleep(self, request: rollout_pb2.SleepRequest, context: Context) -> rollout_pb2.SleepResponse:
        return rollout_pb2.SleepResponse(aborted=await self._switch.sleep(_in_flight(request.in_flight)))


def _in_flight(value: int) -> InFlight:
    try:
        return InFlight(value or InFlight.DRAIN.value)
    except ValueError as error:
        message = f"in_flight is {value}; it is one of {', '.join(mode.name for mode in InFlight)}."
        raise InvalidArgumentError(message, field_violations={"in_flight": message}) from error


def _chunk(
    event: TokensEvent, policy: PolicyStamp, texts: dict[tuple[int, int], Detokenizer]
) -> rollout_pb2.TokenChunk:
    text = texts.setdefault((event.block, event.branch), Detokenizer(policy.tokenizer))
    return rollout_pb2.TokenChunk(
        block_index=event.block,
        branch_index=event.branch,
        token_ids=event.token_ids,
        log_probs=event.log_probs,
        raw_log_probs=event.raw_log_probs,
        forced=event.forced,
        position=event.position,
        policy_version=policy.ref.version,
        text="".join(text.feed(token) for token in event.token_ids),
    )


def _trajectory(event: FinishedEvent, request: rollout_pb2.GenerateRequest, policy: PolicyStamp) -> Any:
    origin = Origin(request.request_id or "generate", 0, request.prompt)
    traceparent = record_trajectory(event.result, origin.trajectory_id, origin.group_id, current_traceparent())
    return trajectory_message(event.result, origin, policy.ref, policy.tokenizer, traceparent)
