"""How trajectories and branches end: the contract's enums, as Python enums.

Invariant: every value equals the number of its namesake in `npr.types.v1`, so converting is a cast.
"""

from __future__ import annotations

from enum import IntEnum

from npr.types.v1 import sampling_pb2, trajectory_pb2


class Outcome(IntEnum):
    """How a trajectory ended."""

    COMPLETED = trajectory_pb2.OUTCOME_COMPLETED
    MALFORMED = trajectory_pb2.OUTCOME_MALFORMED
    TRUNCATED = trajectory_pb2.OUTCOME_TRUNCATED
    ABORTED = trajectory_pb2.OUTCOME_ABORTED
    DEADLINE = trajectory_pb2.OUTCOME_DEADLINE
    REFUSED = trajectory_pb2.OUTCOME_REFUSED


class MalformedReason(IntEnum):
    """Why a trajectory is malformed, or a block was serialized."""

    NONE = trajectory_pb2.MALFORMED_REASON_UNSPECIFIED
    LABELS = trajectory_pb2.MALFORMED_REASON_LABELS
    NO_PLAN = trajectory_pb2.MALFORMED_REASON_NO_PLAN
    EMPTY_PLAN = trajectory_pb2.MALFORMED_REASON_EMPTY_PLAN
    TOO_MANY_BRANCHES = trajectory_pb2.MALFORMED_REASON_TOO_MANY_BRANCHES
    TOO_MANY_BLOCKS = trajectory_pb2.MALFORMED_REASON_TOO_MANY_BLOCKS
    LEDGER = trajectory_pb2.MALFORMED_REASON_LEDGER
    KV_POOL = trajectory_pb2.MALFORMED_REASON_KV_POOL
    TAG_IN_STEP = trajectory_pb2.MALFORMED_REASON_TAG_IN_STEP
    UNEXPECTED_TAG = trajectory_pb2.MALFORMED_REASON_UNEXPECTED_TAG


class LimitKind(IntEnum):
    """Which limit ended a trajectory."""

    NONE = trajectory_pb2.LIMIT_KIND_UNSPECIFIED
    TOKENS = trajectory_pb2.LIMIT_KIND_TOKENS
    CRITICAL_TOKENS = trajectory_pb2.LIMIT_KIND_CRITICAL_TOKENS
    BRANCH_TOKENS = trajectory_pb2.LIMIT_KIND_BRANCH_TOKENS
    CONTEXT = trajectory_pb2.LIMIT_KIND_CONTEXT


class BranchStop(IntEnum):
    """Why a branch stopped."""

    OPEN = trajectory_pb2.BRANCH_STOP_UNSPECIFIED
    CLOSED = trajectory_pb2.BRANCH_STOP_CLOSED
    BUDGET = trajectory_pb2.BRANCH_STOP_BUDGET
    EOS = trajectory_pb2.BRANCH_STOP_EOS
    TAG = trajectory_pb2.BRANCH_STOP_TAG
    ABORTED = trajectory_pb2.BRANCH_STOP_ABORTED
    EARLY = trajectory_pb2.BRANCH_STOP_EARLY


class Visibility(IntEnum):
    """The attention rule of a trajectory."""

    SEQUENTIAL = sampling_pb2.VISIBILITY_SEQUENTIAL
    PARALLEL = sampling_pb2.VISIBILITY_PARALLEL


class ForkRefusal(IntEnum):
    """What becomes of a request whose fork is refused."""

    REJECT = sampling_pb2.FORK_REFUSAL_POLICY_REJECT
    SERIALIZE = sampling_pb2.FORK_REFUSAL_POLICY_SERIALIZE


class BranchShare(IntEnum):
    """How the tokens that are left are shared out between the branches of a block."""

    FIRST_COME = sampling_pb2.BRANCH_SHARE_FIRST_COME
    FAIR = sampling_pb2.BRANCH_SHARE_FAIR


class Exhaustion(IntEnum):
    """What happens when a branch's budget, or the account it draws from, is used up."""

    CLOSE = sampling_pb2.EXHAUSTION_CLOSE
    TRUNCATE = sampling_pb2.EXHAUSTION_TRUNCATE
