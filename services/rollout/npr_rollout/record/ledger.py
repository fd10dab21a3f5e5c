"""The token account of one trajectory over all its branches.

Invariants:
- `total + reserved <= max_tokens` at all times: what a fork has promised (closing tags, takeaway cue, and what the
  budget policy keeps for what follows the join) is paid for.
- A fork reserves one closing tag a branch, the cue and what is kept; a branch's end turns its tag into a spent token; a
  join settles the cue and frees what was kept. So an open block can always be closed and joined within every limit.
- Limits depend on the trajectory alone, never on what else is in the batch: the same request ends the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from npr_rollout.record.outcomes import LimitKind
from npr_rollout.record.request import Limits


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

    @classmethod
    def of(cls, asked: Limits, max_tokens: int, room: int, max_branches: int, max_blocks: int) -> ResolvedLimits:
        """What is asked for, within `room` positions of the context; the rest stands where nothing is asked."""
        critical = room if asked.max_critical_tokens is None else min(room, asked.max_critical_tokens)
        return cls(
            max_tokens=max_tokens,
            max_critical_tokens=critical,
            critical_kind=LimitKind.CONTEXT if critical == room else LimitKind.CRITICAL_TOKENS,
            max_branch_tokens=asked.max_branch_tokens if asked.max_branch_tokens is not None else room,
            max_branches=asked.max_branches if asked.max_branches is not None else max_branches,
            max_blocks=asked.max_blocks if asked.max_blocks is not None else max_blocks,
        )

    def report(self) -> Limits:
        """The same as a request would ask for it."""
        return Limits(
            self.max_tokens, self.max_critical_tokens, self.max_branch_tokens, self.max_branches, self.max_blocks
        )


@dataclass(slots=True)
class Ledger:
    """What has been generated and what is promised.

    Attributes:
        total: tokens generated, forced ones included.
        forced: forced tokens among them.
        reserved: tokens that the open block will need to be closed and joined, `kept` included.
        kept: tokens that the open block's branches may not use.
    """

    limits: ResolvedLimits
    total: int = 0
    forced: int = 0
    reserved: int = 0
    kept: int = 0

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated and are promised to nobody."""
        return self.limits.max_tokens - self.total - self.reserved

    def fork(self, headers: Sequence[int], cue: int, keep: int) -> None:
        """Spend the headers; promise a closing tag a branch, the cue, and `keep` tokens for what follows the join."""
        self.spend_forced(sum(headers))
        self.kept = keep
        self.reserved += len(headers) + cue + keep

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
        """Turn the promised cue into spent tokens, and give the trunk what was kept for it."""
        self.reserved -= cue + self.kept
        self.kept = 0
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
