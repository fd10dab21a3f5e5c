"""Jobs: many prompts, rolled out by whichever worker, kept by the buffer alone.

Invariants:
- All jobs are channels of one run, `jobs`, so a restarted rollout service finds them where it left them.
- A group's id is `<job id>.<milliseconds since the epoch at submission>.<index>`: it says which job it belongs to, and
  when that was submitted. A repeated submission finds the first one's groups and adds nothing.
- A job is done when every group is ready. Cancelling discards what is not, and leaves the rest.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence

from npr.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from npr.reward.v1 import reward_pb2, reward_pb2_grpc
from npr.rollout.v1 import rollout_pb2
from npr.types.v1 import prompt_pb2, sampling_pb2, trajectory_pb2
from npr_common.errors import InvalidArgumentError, NotFoundError, NprError
from npr_common.rpc import call_durably, rpc_errors
from npr_common.telemetry import current_traceparent
from npr_rollout.messages import Decoding, check_policy_ref, timestamp
from npr_rollout.record.outcomes import ForkRefusal

JOBS_RUN = "jobs"
MAX_PROMPTS = 4096
MAX_SAMPLES = 1024
_JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CANCELLED = "the job was cancelled"
_OPEN = {buffer_pb2.GROUP_STATE_WAITING, buffer_pb2.GROUP_STATE_LEASED}
_THERE = {buffer_pb2.GROUP_STATE_READY, buffer_pb2.GROUP_STATE_CONSUMED}
_READ_BATCH = 32
_VERIFIERS_SECONDS = 5.0
_TOLD_VIOLATIONS = 10

log = logging.getLogger(__name__)


class Jobs:
    """The job API over the buffer."""

    def __init__(
        self,
        buffer: buffer_pb2_grpc.BufferServiceAsyncStub,
        reward: reward_pb2_grpc.RewardServiceAsyncStub,
        peer_wait_seconds: float,
    ) -> None:
        self._buffer = buffer
        self._reward = reward
        self._peer_wait = peer_wait_seconds

    async def submit(self, request: rollout_pb2.SubmitJobRequest) -> str:
        """Put a job on the queue; its id.

        Raises:
            InvalidArgumentError: naming the fields, or a verifier that is unknown.
        """
        _check(request)
        job_id = request.request_id
        if not await self._groups(job_id, without_samples=True):
            await self._check_verifiers(request.prompts)
            enqueue = buffer_pb2.EnqueueGroupsRequest(request_id=f"job-{job_id}", groups=_groups(request))
            await call_durably(
                lambda: self._buffer.EnqueueGroups(enqueue), whom="the buffer", deadline_seconds=self._peer_wait
            )
        return job_id

    async def _check_verifiers(self, prompts: Sequence[prompt_pb2.Prompt]) -> None:
        """Raises InvalidArgumentError when the reward service doesn't know a verifier; one that is away is believed."""
        named = {prompt.verifier for prompt in prompts if prompt.verifier}
        if not named:
            return
        try:
            with rpc_errors():
                answer = await self._reward.ListVerifiers(reward_pb2.ListVerifiersRequest(), timeout=_VERIFIERS_SECONDS)
        except NprError as error:
            log.warning("a job's verifiers are not checked: %s", error.message)
            return
        known = [verifier.name for verifier in answer.verifiers]
        bad = {
            f"prompts[{index}].verifier": f"no verifier is named {prompt.verifier!r}"
            for index, prompt in enumerate(prompts)
            if prompt.verifier and prompt.verifier not in known
        }
        if bad:
            field, why = next(iter(bad.items()))
            message = f"The job can't be submitted: {field}: {why}; choose one of {', '.join(known)}"
            # As many as an answer's trailing metadata holds with ease.
            violations = dict(list(bad.items())[:_TOLD_VIOLATIONS])
            raise InvalidArgumentError(message, reason="UNKNOWN_VERIFIER", field_violations=violations)

    async def get(self, job_id: str) -> rollout_pb2.Job:
        """A job's counts. Raises NotFoundError."""
        return _job(job_id, await self._existing(job_id))

    async def cancel(self, job_id: str) -> rollout_pb2.Job:
        """Discard the groups that are not ready; the job after it. Raises NotFoundError."""
        groups = await self._existing(job_id)
        unfinished = [group.group_id for group in groups if group.state in _OPEN]
        if unfinished:
            request = buffer_pb2.DiscardGroupsRequest(run_id=JOBS_RUN, group_ids=unfinished, reason=_CANCELLED)
            with rpc_errors():
                await self._buffer.DiscardGroups(request)
        return await self.get(job_id)

    async def newest(self, limit: int) -> list[rollout_pb2.Job]:
        """The newest jobs, newest first."""
        by_job: dict[str, list[buffer_pb2.GroupSummary]] = {}
        for group in await self._groups(""):
            by_job.setdefault(group.group_id.split(".")[0], []).append(group)
        jobs = [_job(job_id, groups) for job_id, groups in by_job.items()]
        jobs.sort(key=lambda job: job.submitted_at.ToNanoseconds(), reverse=True)
        return jobs[:limit]

    async def watch(self, job_id: str, *, with_trajectories: bool) -> AsyncIterator[rollout_pb2.WatchJobResponse]:
        """A job's counts after each change and, when asked for, each trajectory once, until it ends."""
        told: set[str] = set()
        await self._existing(job_id)
        with rpc_errors():
            async for _ in self._buffer.WatchChannel(buffer_pb2.WatchChannelRequest(run_id=JOBS_RUN, channel=job_id)):
                groups = await self._existing(job_id)
                yield rollout_pb2.WatchJobResponse(job=_job(job_id, groups))
                ready = [g.group_id for g in groups if with_trajectories and g.state in _THERE]
                async for response in self._trajectories(_job(job_id, groups), [g for g in ready if g not in told]):
                    yield response
                told.update(ready)

    async def _trajectories(
        self, job: rollout_pb2.Job, group_ids: Sequence[str]
    ) -> AsyncIterator[rollout_pb2.WatchJobResponse]:
        for begin in range(0, len(group_ids), _READ_BATCH):
            request = buffer_pb2.ReadGroupsRequest(run_id=JOBS_RUN, group_ids=group_ids[begin : begin + _READ_BATCH])
            async for group in self._buffer.ReadGroups(request):
                yield rollout_pb2.WatchJobResponse(job=job, trajectories=group.trajectories)

    async def _existing(self, job_id: str) -> list[buffer_pb2.GroupSummary]:
        groups = await self._groups(job_id) if _JOB_ID.fullmatch(job_id) else []
        if not groups:
            raise NotFoundError(f"There is no job {job_id}; `npr jobs` lists those there are.", reason="JOB_NOT_FOUND")
        return groups

    async def _groups(self, channel: str, *, without_samples: bool = False) -> list[buffer_pb2.GroupSummary]:
        groups: list[buffer_pb2.GroupSummary] = []
        request = buffer_pb2.ListGroupsRequest(run_id=JOBS_RUN, channel=channel, without_samples=without_samples)
        while True:
            try:
                page = await call_durably(
                    lambda: self._buffer.ListGroups(request), whom="the buffer", deadline_seconds=self._peer_wait
                )
            except NotFoundError:  # no job was ever submitted
                return groups
            groups.extend(page.groups)
            if not page.next_page_token:
                return groups
            request.page_token = page.next_page_token


def _check(request: rollout_pb2.SubmitJobRequest) -> None:
    bad: dict[str, str] = {}
    if not _JOB_ID.fullmatch(request.request_id):
        bad["request_id"] = "1 to 64 letters, digits, `-` and `_`"
    if not 1 <= len(request.prompts) <= MAX_PROMPTS:
        bad["prompts"] = f"1 to {MAX_PROMPTS} prompts, not {len(request.prompts)}"
    if not 1 <= request.samples_per_prompt <= MAX_SAMPLES:
        bad["samples_per_prompt"] = f"1 to {MAX_SAMPLES}, not {request.samples_per_prompt}"
    for index, prompt in enumerate(request.prompts):
        if bool(prompt.messages) == bool(prompt.token_ids):
            bad[f"prompts[{index}]"] = "set exactly one of messages and token_ids"
    if bad:
        raise InvalidArgumentError(
            "The job can't be submitted: " + "; ".join(f"{k}: {v}" for k, v in bad.items()), field_violations=bad
        )
    if request.HasField("policy"):
        check_policy_ref(request.policy)
    Decoding.parse(request.decoding, default_refusal=ForkRefusal.SERIALIZE)


def _groups(request: rollout_pb2.SubmitJobRequest) -> Iterable[buffer_pb2.Group]:
    decoding = sampling_pb2.DecodingSpec()
    decoding.CopyFrom(request.decoding)
    if not decoding.fork_refusal:
        decoding.fork_refusal = sampling_pb2.FORK_REFUSAL_POLICY_SERIALIZE
    milliseconds = int(time.time() * 1000)
    for index, prompt in enumerate(request.prompts):
        yield buffer_pb2.Group(
            group_id=f"{request.request_id}.{milliseconds}.{index:04d}",
            run_id=JOBS_RUN,
            channel=request.request_id,
            prompt=prompt,
            sample_count=request.samples_per_prompt,
            decoding=decoding,
            policy=request.policy if request.HasField("policy") else None,
            reward_rule=request.reward_rule,
            priority=request.priority,
            traceparent=current_traceparent(),
        )


def _job(job_id: str, groups: Sequence[buffer_pb2.GroupSummary]) -> rollout_pb2.Job:
    samples = [sample for group in groups for sample in group.samples]
    outcomes = Counter(_name(trajectory_pb2.Outcome.Name(s.outcome), "OUTCOME_") for s in samples)
    verdicts = Counter(_name(trajectory_pb2.VerdictKind.Name(s.verdict), "VERDICT_KIND_") for s in samples)
    return rollout_pb2.Job(
        job_id=job_id,
        state=_state(groups),
        prompts=len(groups),
        trajectories_expected=sum(group.sample_count for group in groups),
        trajectories=len(samples),
        correct=sum(s.verdict == trajectory_pb2.VERDICT_KIND_CORRECT for s in samples),
        submitted_at=timestamp(int(groups[0].group_id.split(".")[1]) / 1000),
        outcomes=outcomes,
        verdicts=verdicts,
    )


def _state(groups: Sequence[buffer_pb2.GroupSummary]) -> rollout_pb2.JobState.ValueType:
    if any(group.state in _OPEN for group in groups):
        return rollout_pb2.JOB_STATE_RUNNING
    if any(group.state == buffer_pb2.GROUP_STATE_DISCARDED for group in groups):
        return rollout_pb2.JOB_STATE_CANCELLED
    return rollout_pb2.JOB_STATE_COMPLETED


def _name(name: str, prefix: str) -> str:
    short = name.removeprefix(prefix).lower()
    return "not_judged" if short == "unspecified" else short
