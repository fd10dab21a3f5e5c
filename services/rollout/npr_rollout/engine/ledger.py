"""The token account of one trajectory over all its branches.

Invariants:
- `total + reserved <= max_tokens` at all times: what a fork has promised (closing tags, takeaway cue) is paid for.
- A fork reserves one closing tag a branch and the cue; a branch's end turns its tag into a spent token; a join settles
  the cue. So an open block can always be closed and joined within every limit.
- Limits depend on the trajectory alone, never on what else is in the batch: the same request ends the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from npr_rollout.engine.outcomes import LimitKind
from npr_rollout.engine.request import BudgetPolicy, ResolvedLimits


@dataclass(slots=True)
class Ledger:
    """What has been generated and what is promised.

    Attributes:
        total: tokens generated, forced ones included.
        forced: forced tokens among them.
        reserved: tokens that the open block will need to be closed and joined.
    """

    limits: ResolvedLimits
    policy: BudgetPolicy = field(default_factory=BudgetPolicy)
    total: int = 0
    forced: int = 0
    reserved: int = 0

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated and are promised to nobody."""
        return self.limits.max_tokens - self.total - self.reserved

    @property
    def left_for_branches(self) -> int:
        """Tokens that branches may still have: what remains, less what is kept for after the join."""
        return self.remaining - self.policy.takeaway_reserve_tokens

    def fork(self, headers: Sequence[int], cue: int) -> None:
        """Spend the headers; promise a closing tag a branch, and the cue."""
        self.spend_forced(sum(headers))
        self.reserved += len(headers) + cue

    def spend(self) -> None:
        """Count one sampled token."""
        self.total += 1

    def spend_forced(self, tokens: int) -> None:
        """Count forced tokens."""
        self.total += tokens
        self.forced += tokens

    def end_branch(self, *, forced: bool) -> None:
        """Turn a branch's promised closing tag into a spent one."""
        self.reserved -= 1
        self.total += 1
        self.forced += forced

    def join(self, cue: int) -> None:
        """Turn the promised cue into spent tokens."""
        self.reserved -= cue
        self.spend_forced(cue)

    def trunk_limit(self, critical: int) -> LimitKind:
        """The limit that the trunk has reached; NONE if it may go on."""
        if self.total >= self.limits.max_tokens:
            return LimitKind.TOKENS
        if critical >= self.limits.max_critical_tokens:
            return self.limits.critical_kind
        return LimitKind.NONE
