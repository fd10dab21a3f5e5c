"""The token account of one trajectory over all its branches.

Invariants:
- `total + reserved <= max_tokens` at all times: what a fork has promised (closing tags, takeaway cue) is paid for.
- A fork reserves one closing tag a branch and the cue; a branch's end turns its tag into a spent token; a join settles
  the cue. So an open block can always be closed and joined within every limit.
- Limits depend on the trajectory alone, never on what else is in the batch: the same request ends the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from npr_rollout.engine.outcomes import LimitKind


@dataclass(frozen=True, slots=True)
class ResolvedLimits:
    """A request's limits with the engine's defaults filled in; all in tokens after the prompt.

    Attributes:
        critical_kind: what `max_critical_tokens` stands for: the request's own limit or the model's context.
    """

    max_tokens: int
    max_critical_tokens: int
    critical_kind: LimitKind
    max_branch_tokens: int
    max_branches: int
    max_blocks: int


@dataclass(slots=True)
class Ledger:
    """What has been generated and what is promised.

    Attributes:
        total: tokens generated, forced ones included.
        forced: forced tokens among them.
        reserved: tokens that the open block will need to be closed and joined.
    """

    limits: ResolvedLimits
    total: int = 0
    forced: int = 0
    reserved: int = 0

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated and are promised to nobody."""
        return self.limits.max_tokens - self.total - self.reserved

    def can_fork(self, critical: int, headers: Sequence[int], cue: int) -> bool:
        """Whether headers, closing tags and cue fit into every limit.

        Args:
            critical: tokens on the critical path so far.
            headers: length of each branch's header.
            cue: length of the takeaway cue.
        """
        return (
            self.remaining >= sum(headers) + len(headers) + cue
            and self.branch_budget(critical, headers, cue) >= max(headers) + 1
        )

    def branch_budget(self, critical: int, headers: Sequence[int], cue: int) -> int:
        """Tokens that one branch's span may have at most, header and closing tag included."""
        limits = self.limits
        others = sum(headers) + len(headers) - (max(headers) + 1)
        return min(limits.max_branch_tokens, limits.max_critical_tokens - critical - cue, self.remaining - others - cue)

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

    def must_close(self, open_branches: int) -> bool:
        """Whether one more token for each open branch would break a promise."""
        return self.remaining < open_branches

    def trunk_limit(self, critical: int) -> LimitKind:
        """The limit that the trunk has reached; NONE if it may go on."""
        if self.total >= self.limits.max_tokens:
            return LimitKind.TOKENS
        if critical >= self.limits.max_critical_tokens:
            return self.limits.critical_kind
        return LimitKind.NONE
