"""Groups and trajectories for tests and benchmarks: small, valid, and different from each other."""

from collections.abc import Iterable

from npr.buffer.v1 import buffer_pb2
from npr.types.v1 import policy_pb2, prompt_pb2, trajectory_pb2


def make_policy(version: int, line: str = "line") -> policy_pb2.PolicyRef:
    """A policy reference whose digest follows from its version."""
    return policy_pb2.PolicyRef(line=line, version=version, digest=f"{version:064x}")


def make_group(
    run_id: str,
    group_id: str,
    *,
    channel: str = "train",
    samples: int = 2,
    priority: int = 0,
    policy: policy_pb2.PolicyRef | None = None,
) -> buffer_pb2.Group:
    """A group of one prompt."""
    return buffer_pb2.Group(
        group_id=group_id,
        run_id=run_id,
        channel=channel,
        prompt=prompt_pb2.Prompt(prompt_id=f"prompt-of-{group_id}", token_ids=[1, 2, 3]),
        sample_count=samples,
        priority=priority,
        policy=policy,
    )


def make_scored(
    group_id: str, index: int, *, version: int = 0, line: str = "line", tokens: int = 8, reward: float = 1.0
) -> trajectory_pb2.ScoredTrajectory:
    """A scored trajectory of `tokens` response tokens after a prompt of three."""
    return trajectory_pb2.ScoredTrajectory(
        trajectory=trajectory_pb2.Trajectory(
            trajectory_id=f"{group_id}/{index}",
            group_id=group_id,
            sample_index=index,
            token_ids=[1, 2, 3, *range(1000, 1000 + tokens)],
            prompt_length=3,
            behavior_log_probs=[-0.5] * tokens,
            forced=[False] * tokens,
            policy=make_policy(version, line),
            outcome=trajectory_pb2.OUTCOME_COMPLETED,
            ledger=trajectory_pb2.Ledger(
                total_tokens=tokens,
                critical_path_tokens=tokens - 2,
                blocks=[trajectory_pb2.BlockLedger(branches=[trajectory_pb2.BranchLedger(used_tokens=2)] * 3)],
            ),
        ),
        score=trajectory_pb2.Score(verdict=trajectory_pb2.VERDICT_KIND_CORRECT, reward=reward),
    )


def keys_of(groups: Iterable[buffer_pb2.LeasedGroup]) -> list[buffer_pb2.GroupKey]:
    """The keys by which leases are renewed and returned."""
    return [buffer_pb2.GroupKey(run_id=leased.group.run_id, group_id=leased.group.group_id) for leased in groups]
