"""Which trajectories may be trained on, and why not.

Invariants:
- The structural filter looks at token ids, never at text alone: a tag that is spelled out forks nothing.
- A tag-free answer doesn't pass: a response must hold a block.
- What isn't the model's doing (aborted, out of pages, unscorable) is never held against it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from npr.types.v1 import policy_pb2, sampling_pb2, trajectory_pb2
from npr_common.dialects import Dialect
from npr_common.errors import FailedPreconditionError
from npr_common.schema import parse_tokens
from npr_common.tags import TagIds

_DECODED = frozenset(
    {trajectory_pb2.OUTCOME_COMPLETED, trajectory_pb2.OUTCOME_MALFORMED, trajectory_pb2.OUTCOME_TRUNCATED}
)
_JUDGED = frozenset({trajectory_pb2.VERDICT_KIND_CORRECT, trajectory_pb2.VERDICT_KIND_INCORRECT})


class Defect(StrEnum):
    """Why the structural filter refuses a response."""

    NOT_COMPLETED = "not_completed"
    BRANCH_TRUNCATED = "branch_truncated"
    SERIALIZED = "serialized"
    MALFORMED = "malformed"
    NO_BLOCK = "no_block"
    SPELLED_TAG = "spelled_tag"


@dataclass(frozen=True)
class StructuralFilter:
    """The filter of stage 3: what parses, holds a block, and was decoded in parallel from end to end."""

    tokenizer: Any
    dialect: Dialect
    tags: TagIds

    def defect(self, trajectory: trajectory_pb2.Trajectory) -> Defect | None:
        """The first reason to refuse the response, or None."""
        if trajectory.outcome != trajectory_pb2.OUTCOME_COMPLETED:
            return Defect.NOT_COMPLETED
        if trajectory.branch_truncated:
            return Defect.BRANCH_TRUNCATED
        if trajectory.serialized_blocks:
            return Defect.SERIALIZED
        parsed = parse_tokens(
            trajectory.token_ids, self.tokenizer, self.dialect, trajectory.prompt_length, tags=self.tags
        )
        if not parsed.well_formed:
            return Defect.MALFORMED
        if not parsed.holds_block:
            return Defect.NO_BLOCK
        return Defect.SPELLED_TAG if parsed.spelled_tags else None


def is_usable(scored: trajectory_pb2.ScoredTrajectory) -> bool:
    """Whether the response was decoded to an end of the model's own making, and judged."""
    trajectory = scored.trajectory
    starved = trajectory.malformed_reason == trajectory_pb2.MALFORMED_REASON_KV_POOL
    return trajectory.outcome in _DECODED and not starved and scored.score.verdict in _JUDGED


def require_policy(trajectories: Iterable[trajectory_pb2.Trajectory], policy: policy_pb2.PolicyRef) -> None:
    """Refuse trajectories of any other policy.

    Raises:
        FailedPreconditionError: reason `WRONG_POLICY`, naming the first one.
    """
    for trajectory in trajectories:
        made_by = trajectory.policy
        if (made_by.line, made_by.version) != (policy.line, policy.version):
            raise FailedPreconditionError(
                f"trajectory {trajectory.trajectory_id} is of policy {made_by.line} version {made_by.version}, but the "
                f"step starts from {policy.line} version {policy.version}: roll its group out again",
                reason="WRONG_POLICY",
                metadata={"trajectory_id": trajectory.trajectory_id},
            )


def require_visibility(
    trajectories: Iterable[trajectory_pb2.Trajectory], visibility: "sampling_pb2.Visibility.ValueType"
) -> None:
    """Refuse trajectories decoded under another attention rule than they would be trained under.

    Raises:
        FailedPreconditionError: reason `WRONG_VISIBILITY`, naming the first one.
    """
    for trajectory in trajectories:
        if trajectory.visibility == visibility and not trajectory.textual_joins:
            continue
        remedy = (
            "use one visibility for rollouts and stage"
            if not trajectory.textual_joins
            else "its branches were joined as text, by an SGLang server without the plug-in; serve with it"
        )
        raise FailedPreconditionError(
            f"trajectory {trajectory.trajectory_id} was decoded under another attention rule than its stage trains "
            f"under: {remedy}",
            reason="WRONG_VISIBILITY",
            metadata={"trajectory_id": trajectory.trajectory_id},
        )
