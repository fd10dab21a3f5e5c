"""How a trajectory's tokens are shared between the branches of a block, and what ends a branch before it ends itself.

Invariants:
- Decisions depend on the trajectory's own branches and ledger at one step. Branches sample in the same steps, so what
  else is decoded, and whether the trajectory was preempted, changes nothing.
- Every branch's budget holds its header and its closing tag, and what an open block needs to be closed and joined is
  promised to it by the ledger. So a branch can be closed at any moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from npr_rollout.engine.ledger import Ledger
from npr_rollout.engine.outcomes import BranchShare, BranchStop, LimitKind
from npr_rollout.engine.request import EarlyStop
from npr_rollout.engine.trajectory import Block, Span

_WINDOW = 32  # sampled tokens whose mean log-probability is looked at


def branch_budget(ledger: Ledger, critical: int, headers: Sequence[int], cue: int) -> tuple[int, LimitKind]:
    """Tokens that one branch's span may have at most, header and closing tag included, and which limit that is.

    Args:
        critical: tokens on the critical path so far.
        headers: length of each branch's header.
        cue: length of the takeaway cue.
    """
    limits, reserve = ledger.limits, ledger.policy.takeaway_reserve_tokens
    left = ledger.left_for_branches - cue
    if ledger.policy.share is BranchShare.FAIR:
        account = left // len(headers)
    else:
        account = left - (sum(headers) + len(headers) - (max(headers) + 1))
    return min(
        (limits.max_branch_tokens, LimitKind.BRANCH_TOKENS),
        (limits.max_critical_tokens - critical - cue - reserve, limits.critical_kind),
        (account, LimitKind.TOKENS),
    )


def can_fork(ledger: Ledger, critical: int, headers: Sequence[int], cue: int) -> bool:
    """Whether headers, closing tags, cue and reserve fit into every limit. Arguments as for `branch_budget`."""
    return (
        ledger.left_for_branches >= sum(headers) + len(headers) + cue
        and branch_budget(ledger, critical, headers, cue)[0] >= max(headers) + 1
    )


def spent_branches(ledger: Ledger, block: Block) -> Iterator[tuple[Span, BranchStop]]:
    """Open branches that may not take another token, and why."""
    still_open = [branch for branch in block.branches if branch.open]
    out_of_tokens = ledger.left_for_branches < len(still_open)
    losing = _losing(ledger.policy.early_stop, block)
    for branch in still_open:
        if out_of_tokens or len(branch.tokens) + 1 >= branch.budget:
            yield branch, BranchStop.BUDGET
        elif branch in losing:
            yield branch, BranchStop.EARLY


def exhausted_limit(ledger: Ledger, block: Block) -> LimitKind:
    """Which limit a branch that was stopped by its budget has reached."""
    spent = any(branch.stop is BranchStop.BUDGET and len(branch.tokens) >= branch.budget for branch in block.branches)
    return block.budget_limit if spent else LimitKind.TOKENS


def _losing(rule: EarlyStop, block: Block) -> list[Span]:
    """Open branches that lose by the rule."""
    still_open = [branch for branch in block.branches if branch.open]
    lengths = [len(branch.tokens) for branch in block.branches if branch.stop is BranchStop.CLOSED]
    stragglers = [
        branch
        for branch in still_open
        if rule.quorum and len(lengths) >= rule.quorum and len(branch.tokens) >= rule.straggler_factor * max(lengths)
    ]
    unsure = [branch for branch in still_open if rule.min_mean_log_prob and _unsure(branch, rule.min_mean_log_prob)]
    return stragglers + unsure


def _unsure(branch: Span, least: float) -> bool:
    last = branch.log_probs[-_WINDOW:]
    return len(last) == _WINDOW and not any(branch.forced[-_WINDOW:]) and sum(last) / _WINDOW < least
