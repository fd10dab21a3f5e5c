"""Enum values in the words that a person reads."""

from __future__ import annotations

from npr.controller.v1 import controller_pb2
from npr.rollout.v1 import rollout_pb2
from npr.types.v1 import sampling_pb2, trajectory_pb2


def outcome(value: trajectory_pb2.Outcome.ValueType) -> str:
    """Such as `completed`."""
    return _word(trajectory_pb2.Outcome.Name(value), "OUTCOME_")


def ending(trajectory: trajectory_pb2.Trajectory) -> str:
    """The outcome with its cause, such as `malformed (kv pool)`; blocks that were not forked are told too."""
    word = outcome(trajectory.outcome)
    if trajectory.outcome == trajectory_pb2.OUTCOME_MALFORMED:
        return f"{word} ({malformed_reason(trajectory.malformed_reason)})"
    if trajectory.outcome == trajectory_pb2.OUTCOME_TRUNCATED:
        return f"{word} (limit: {limit(trajectory.limit)})"
    if trajectory.serialized_blocks:
        why = malformed_reason(trajectory.malformed_reason)
        return f"{word} ({trajectory.serialized_blocks} blocks not forked: {why})"
    return word


def malformed_reason(value: trajectory_pb2.MalformedReason.ValueType) -> str:
    """Such as `empty plan`."""
    return _word(trajectory_pb2.MalformedReason.Name(value), "MALFORMED_REASON_")


def limit(value: trajectory_pb2.LimitKind.ValueType) -> str:
    """Such as `branch tokens`."""
    return _word(trajectory_pb2.LimitKind.Name(value), "LIMIT_KIND_")


def branch_stop(value: trajectory_pb2.BranchStop.ValueType) -> str:
    """Such as `closed`."""
    return _word(trajectory_pb2.BranchStop.Name(value), "BRANCH_STOP_")


def budget(policy: sampling_pb2.BudgetPolicy) -> str:
    """Such as `fair shares · 40 tokens kept for the takeaway`; empty for the policy that nobody asked for."""
    early, parts = policy.early_stop, []
    if policy.share == sampling_pb2.BRANCH_SHARE_FAIR:
        parts.append("fair shares")
    if policy.on_exhausted == sampling_pb2.EXHAUSTION_TRUNCATE:
        parts.append("truncates at the end of a budget")
    if policy.takeaway_reserve_tokens:
        parts.append(f"{policy.takeaway_reserve_tokens:,} tokens kept for the takeaway")
    if early.quorum:
        parts.append(f"stragglers closed at {early.straggler_factor:g}x once {early.quorum} have closed")
    if early.min_mean_log_prob:
        parts.append(f"branches closed below a mean log-probability of {early.min_mean_log_prob:g}")
    return " · ".join(parts)


def verdict(value: trajectory_pb2.VerdictKind.ValueType) -> str:
    """`correct`, `incorrect`, `unscorable`, or `not judged`."""
    if value == trajectory_pb2.VERDICT_KIND_UNSPECIFIED:
        return "not judged"
    return _word(trajectory_pb2.VerdictKind.Name(value), "VERDICT_KIND_")


def visibility(value: sampling_pb2.Visibility.ValueType) -> str:
    """`parallel` or `sequential`."""
    return _word(sampling_pb2.Visibility.Name(value), "VISIBILITY_")


def run_state(value: controller_pb2.RunState.ValueType) -> str:
    """Such as `running`."""
    return _word(controller_pb2.RunState.Name(value), "RUN_STATE_")


def job_state(value: rollout_pb2.JobState.ValueType) -> str:
    """Such as `completed`."""
    return _word(rollout_pb2.JobState.Name(value), "JOB_STATE_")


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower().replace("_", " ")
