"""Fork and join, on the record: where spans start, which tokens are forced, what the ledger pays.

Invariants (SPEC section 2):
- With g the position of `</guideline>`, every branch starts at g+1, and what follows the join at g+1+L, L being the
  length of the longest branch span.
- A branch's span opens with the forced header and ends with `</step>`, sampled or forced; an EOS leaves no trace.
- Nothing here touches the KV pool. `feeding` opens and joins the tables that the record asks for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from npr_common.cues import step_cue, takeaway_cue
from npr_common.dialects import Dialect
from npr_common.tags import Role, TagIds
from npr_rollout.record.budget import allowance, endings
from npr_rollout.record.outcomes import BranchStop, Exhaustion, LimitKind
from npr_rollout.record.trajectory import Block, Span, Trajectory


@dataclass
class Cues:
    """The forced tokens of one tokenizer and dialect, encoded once."""

    tokenizer: Any
    dialect: Dialect
    tags: TagIds
    _headers: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.takeaway: list[int] = takeaway_cue(self.dialect).encode(self.tokenizer)
        self.step_end: int = self.tags.close(Role.STEP)

    def header(self, branch: int) -> list[int]:
        """What opens the branch with this index, counted from 0."""
        if branch not in self._headers:
            self._headers[branch] = step_cue(self.dialect, branch + 1).encode(self.tokenizer)
        return self._headers[branch]


def fork(trajectory: Trajectory, branches: int, cues: Cues) -> Block:
    """Open a block of `branches` branches, each with its header, behind the trunk's `</guideline>`."""
    headers = [cues.header(index) for index in range(branches)]
    lengths, ledger = [len(header) for header in headers], trajectory.ledger
    granted = allowance(trajectory, lengths, len(cues.takeaway))
    block = Block(sum(1 for _ in trajectory.blocks()), [], time.time(), limit=granted.limit)
    for index, header in enumerate(headers):
        branch = Span(
            trajectory, trajectory.trunk.end, block.index, index, budget=granted.tokens, started_at=block.started_at
        )
        branch.force(header)
        block.branches.append(branch)
    ledger.fork(lengths, len(cues.takeaway), trajectory.request.budget.takeaway_reserve_tokens)
    trajectory.segments.append(block)
    trajectory.settled = False
    return block


def end_branch(branch: Span, stop: BranchStop, cues: Cues) -> None:
    """End an open branch. Unless it sampled its own `</step>`, one is forced."""
    trajectory, forced = branch.owner, stop is not BranchStop.CLOSED
    if forced:
        branch.force([cues.step_end])
        trajectory.branch_truncated = True
    branch.stop, branch.finished_at = stop, time.time()
    trajectory.ledger.end_branch(forced=forced)
    trajectory.settled = False


def end_open_branches(trajectory: Trajectory, stop: BranchStop, cues: Cues) -> None:
    """End every branch that is open, so that the list stays parseable."""
    block = trajectory.open_block
    for branch in block.branches if block is not None else ():
        if branch.open:
            end_branch(branch, stop, cues)


def join(trajectory: Trajectory, cues: Cues) -> Span:
    """Close the open block, whose branches have all ended, and go on with the forced takeaway cue."""
    block = trajectory.open_block
    assert block is not None
    assert block.closed
    block.finished_at = time.time()
    start = trajectory.trunk.end + block.longest
    takeaway = Span(trajectory, start)
    takeaway.force(cues.takeaway)
    trajectory.ledger.join(len(cues.takeaway))
    trajectory.segments.append(takeaway)
    trajectory.settled = False
    if trajectory.grammar is not None:
        trajectory.grammar.join()
    return takeaway


def enforce_budgets(trajectory: Trajectory, block: Block, cues: Cues) -> LimitKind:
    """End the branches of its open block that may not take another token.

    Returns:
        The limit that truncates the trajectory by its budget policy; NONE if it goes on.
    """
    policy, reached = trajectory.request.budget, LimitKind.NONE
    for ending in endings(block, trajectory.ledger, policy.early_stop):
        end_branch(ending.branch, ending.stop, cues)
        reached = reached or ending.limit
    return reached if policy.on_exhausted is Exhaustion.TRUNCATE else LimitKind.NONE
