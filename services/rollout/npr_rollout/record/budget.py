"""The budget policy: how a trajectory's tokens are shared between a block's branches, and what ends a branch.

Invariants:
- What is granted at a fork can be paid: headers, closing tags, the takeaway cue and what is kept for what follows the
  join fit beside it into every limit. A fork for which that can't be done is refused.
- Decisions are made when all open branches of the block have taken the same step's tokens, from the record of this
  block and the ledger alone: not from batch mates, the clock, or whether the trajectory was preempted.
- A branch is ended for one reason: its own budget first, then that it is losing, then the account that all draw from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from npr_rollout.record.ledger import Ledger
from npr_rollout.record.outcomes import BranchShare, BranchStop, LimitKind
from npr_rollout.record.request import BudgetPolicy, EarlyStop
from npr_rollout.record.trajectory import Block, Span, Trajectory

_RECENT = 32
"""Sampled tokens whose mean log-probability says whether a branch is losing."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What each branch of a block may have.

    Attributes:
        tokens: of its span at most, header and closing tag included.
        limit: which limit that comes from.
    """

    tokens: int
    limit: LimitKind


def can_fork(trajectory: Trajectory, headers: Sequence[int], cue: int) -> bool:
    """Whether headers, closing tags, cue and what is to be kept fit into every limit.

    Args:
        headers: length of each branch's header.
        cue: length of the takeaway cue.
    """
    keep = trajectory.request.budget.takeaway_reserve_tokens
    return (
        trajectory.ledger.remaining >= sum(headers) + len(headers) + cue + keep
        and allowance(trajectory, headers, cue).tokens >= max(headers) + 1
    )


def allowance(trajectory: Trajectory, headers: Sequence[int], cue: int) -> Allowance:
    """What each branch of a fork with these headers may have; where limits agree, the narrower kind is named."""
    limits, policy = trajectory.ledger.limits, trajectory.request.budget
    after_join = cue + policy.takeaway_reserve_tokens
    return min(
        (
            Allowance(limits.max_branch_tokens, LimitKind.BRANCH_TOKENS),
            Allowance(limits.max_critical_tokens - trajectory.critical - after_join, limits.critical_kind),
            Allowance(_share(policy, trajectory.ledger.remaining - after_join, headers), LimitKind.TOKENS),
        ),
        key=lambda granted: granted.tokens,
    )


def _share(policy: BudgetPolicy, left: int, headers: Sequence[int]) -> int:
    """What one span may take of the `left` tokens: an equal part, or all but the others' headers and closing tags."""
    if policy.share is BranchShare.FAIR:
        return left // len(headers)
    return left - (sum(headers) + len(headers) - (max(headers) + 1))


@dataclass(frozen=True, slots=True)
class Ending:
    """A branch that may not take another token, and why; `limit` is that of a BUDGET stop, else NONE."""

    branch: Span
    stop: BranchStop
    limit: LimitKind = LimitKind.NONE


def endings(block: Block, ledger: Ledger, early_stop: EarlyStop) -> list[Ending]:
    """Which open branches of a block end now, in plan order but for those that the account can't go on paying."""
    ended, left = [], []
    for branch in (branch for branch in block.branches if branch.open):
        if len(branch.tokens) + 1 >= branch.budget:
            ended.append(Ending(branch, BranchStop.BUDGET, block.limit))
        elif _straggles(branch, block, early_stop) or _is_unlikely(branch, early_stop):
            ended.append(Ending(branch, BranchStop.EARLY))
        else:
            left.append(branch)
    if ledger.must_close(len(left)):
        ended += [Ending(branch, BranchStop.BUDGET, LimitKind.TOKENS) for branch in left]
    return ended


def _straggles(branch: Span, block: Block, early_stop: EarlyStop) -> bool:
    """Whether enough siblings have closed themselves, all of them with far fewer tokens."""
    if early_stop.quorum == 0:
        return False
    closed = [len(sibling.tokens) for sibling in block.branches if sibling.stop is BranchStop.CLOSED]
    return len(closed) >= early_stop.quorum and len(branch.tokens) >= early_stop.straggler_factor * max(closed)


def _is_unlikely(branch: Span, early_stop: EarlyStop) -> bool:
    """Whether its last 32 sampled tokens are unlikely on the whole; false while it has fewer."""
    if early_stop.min_mean_log_prob == 0 or len(branch.tokens) < _RECENT or any(branch.forced[-_RECENT:]):
        return False
    return math.fsum(branch.log_probs[-_RECENT:]) < _RECENT * early_stop.min_mean_log_prob
