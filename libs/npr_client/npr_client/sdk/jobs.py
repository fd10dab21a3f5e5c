"""Jobs: many prompts, rolled out by the workers, scored and kept."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence

from npr.reward.v1 import reward_pb2
from npr.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from npr.types.v1 import policy_pb2, prompt_pb2
from npr_client.sdk.channels import Channels
from npr_client.sdk.decoding import DecodingOptions

SERVICE = "rollout"


def new_id(kind: str) -> str:
    """A fresh id such as `job-3f9a0c2b71de`."""
    return f"{kind}-{uuid.uuid4().hex[:12]}"


class Jobs:
    """Job calls of the rollout service."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    @property
    def _stub(self) -> rollout_pb2_grpc.RolloutServiceAsyncStub:
        return rollout_pb2_grpc.RolloutServiceStub(self._channels.to(SERVICE))

    async def submit(
        self,
        prompts: Sequence[prompt_pb2.Prompt],
        decoding: DecodingOptions,
        *,
        samples_per_prompt: int = 1,
        job_id: str | None = None,
        priority: int = 0,
        policy: policy_pb2.PolicyRef | None = None,
    ) -> str:
        """Queues a job for `policy`, or for whichever is served, and returns its id. Idempotent by `job_id`."""
        request = rollout_pb2.SubmitJobRequest(
            request_id=job_id or new_id("job"),
            prompts=prompts,
            samples_per_prompt=samples_per_prompt,
            decoding=decoding.to_proto(),
            reward_rule=reward_pb2.REWARD_RULE_ACCURACY,
            priority=priority,
            policy=policy,
        )
        answer = await self._channels.call(SERVICE, lambda: self._stub.SubmitJob(request))
        return answer.job_id

    async def get(self, job_id: str) -> rollout_pb2.Job:
        """The job's counts. `NotFoundError` for one that was never submitted."""
        request = rollout_pb2.GetJobRequest(job_id=job_id)
        return (await self._channels.call(SERVICE, lambda: self._stub.GetJob(request))).job

    async def watch(
        self, job_id: str, *, with_trajectories: bool = False
    ) -> AsyncIterator[rollout_pb2.WatchJobResponse]:
        """The job's counts after each change until it ends; each trajectory once, when asked for."""
        request = rollout_pb2.WatchJobRequest(job_id=job_id, with_trajectories=with_trajectories)
        told: set[str] = set()
        async for change in self._channels.stream(SERVICE, lambda: self._stub.WatchJob(request)):
            fresh = [scored for scored in change.trajectories if scored.trajectory.trajectory_id not in told]
            told.update(scored.trajectory.trajectory_id for scored in fresh)
            yield rollout_pb2.WatchJobResponse(job=change.job, trajectories=fresh)

    async def cancel(self, job_id: str) -> rollout_pb2.Job:
        """Discards what has not been rolled out."""
        request = rollout_pb2.CancelJobRequest(job_id=job_id)
        return (await self._channels.call(SERVICE, lambda: self._stub.CancelJob(request))).job

    async def list(self, limit: int = 0) -> list[rollout_pb2.Job]:
        """Jobs, newest first; 0 means the service's own limit."""
        request = rollout_pb2.ListJobsRequest(page_size=limit)
        return list((await self._channels.call(SERVICE, lambda: self._stub.ListJobs(request))).jobs)
