"""A rollout worker without an engine: it leases from a real buffer and appends what a script says."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from npr.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from npr.types.v1 import sampling_pb2, trajectory_pb2

_STEP = "<step>{label}: 4*7=28,28+8=36</step>"
WELL_FORMED = (
    "<guideline><plan>1: a</plan><plan>2: b</plan></guideline>"
    + "".join(_STEP.format(label=label) for label in (1, 2))
    + "<takeaway>max(36,36)=36</takeaway>The answer is \\boxed{36}"
)


@dataclass(frozen=True)
class Script:
    """What becomes of sample `index` of a group."""

    correct: Callable[[buffer_pb2.Group, int], bool] = lambda _, index: index % 2 == 0
    well_formed: Callable[[buffer_pb2.Group, int], bool] = lambda *_: True
    forks: Callable[[buffer_pb2.Group, int], bool] = lambda group, _: (
        group.decoding.visibility == sampling_pb2.VISIBILITY_PARALLEL
    )


async def work(channel: grpc.aio.Channel, script: Script) -> None:
    """Leases and appends until cancelled."""
    stub = buffer_pb2_grpc.BufferServiceStub(channel)
    number = 0
    while True:
        number += 1
        leased = await stub.LeaseGroups(
            buffer_pb2.LeaseGroupsRequest(
                request_id=f"worker-{number}", worker_id="worker", max_groups=64, lease_seconds=30, wait_seconds=10
            ),
            wait_for_ready=True,
        )
        by_run: dict[str, list[trajectory_pb2.ScoredTrajectory]] = {}
        for item in leased.groups:
            made = [_scored(item.group, index, script) for index in item.missing_sample_indices]
            by_run.setdefault(item.group.run_id, []).extend(made)
        for run_id, trajectories in by_run.items():
            request = buffer_pb2.AppendTrajectoriesRequest(run_id=run_id, trajectories=trajectories)
            await stub.AppendTrajectories(request)
        await asyncio.sleep(0)


def _scored(group: buffer_pb2.Group, index: int, script: Script) -> trajectory_pb2.ScoredTrajectory:
    correct, well_formed = script.correct(group, index), script.well_formed(group, index)
    verdict = trajectory_pb2.VERDICT_KIND_CORRECT if correct else trajectory_pb2.VERDICT_KIND_INCORRECT
    return trajectory_pb2.ScoredTrajectory(
        trajectory=trajectory_pb2.Trajectory(
            trajectory_id=f"{group.group_id}/{index}",
            group_id=group.group_id,
            sample_index=index,
            prompt_id=group.prompt.prompt_id,
            token_ids=range(20),
            prompt_length=4,
            behavior_log_probs=[-0.5] * 16,
            forced=[False] * 16,
            policy=group.policy,
            visibility=group.decoding.visibility,
            outcome=trajectory_pb2.OUTCOME_COMPLETED,
            ledger=_ledger(script.forks(group, index)),
            response_text=WELL_FORMED if well_formed else "<plan>no block",
        ),
        score=trajectory_pb2.Score(
            verdict=verdict,
            answer="36",
            reward=1.0 if correct else -1.0,
            format_penalty=0.0 if well_formed else -1.0,
        ),
    )


def _ledger(forks: bool) -> trajectory_pb2.Ledger:
    branch = trajectory_pb2.BranchLedger(budget_tokens=10, used_tokens=5, stop=trajectory_pb2.BRANCH_STOP_CLOSED)
    blocks = [trajectory_pb2.BlockLedger(branches=[branch, branch], critical_path_tokens=5)] if forks else []
    return trajectory_pb2.Ledger(total_tokens=16, critical_path_tokens=11 if forks else 16, blocks=blocks)
