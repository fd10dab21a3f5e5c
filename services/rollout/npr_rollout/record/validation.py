"""Pre-branch validation: may this trajectory fork now? Cheap, and before any page is taken.

Invariant: the answer is a reason, never an exception; the first reason in the order below wins.

    no plan - labels (as text, by the schema's own parser) - empty plan - branches - blocks - ledger - KV pool
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from npr_common.dialects import Dialect
from npr_common.schema import StreamingParser, ViolationCode
from npr_common.tags import TagIds
from npr_rollout.record.budget import can_fork
from npr_rollout.record.fork_join import Cues
from npr_rollout.record.outcomes import MalformedReason
from npr_rollout.record.trajectory import Trajectory

_REASONS = {
    ViolationCode.NO_PLAN: MalformedReason.NO_PLAN,
    ViolationCode.MISSING_LABEL: MalformedReason.LABELS,
    ViolationCode.LABEL_OUT_OF_ORDER: MalformedReason.LABELS,
    ViolationCode.EMPTY_PLAN: MalformedReason.EMPTY_PLAN,
}


@dataclass(frozen=True)
class ForkValidator:
    """The checks, with all that they need to know.

    Attributes:
        can_ever_pay: whether a trajectory that forks into so many branches fits into the KV pool when it has that to
            itself. Load is no reason to refuse: others give way.
    """

    tokenizer: Any
    dialect: Dialect
    tags: TagIds
    cues: Cues
    can_ever_pay: Callable[[Trajectory, int], bool]

    def refusal(self, trajectory: Trajectory) -> MalformedReason:
        """Why the trajectory, whose guideline has just closed, can't fork; NONE if it can."""
        assert trajectory.grammar is not None
        branches = trajectory.grammar.plans
        return self._guideline(trajectory, branches) or self._limits(trajectory, branches)

    def _guideline(self, trajectory: Trajectory, branches: int) -> MalformedReason:
        """What the parser says of the guideline's text."""
        assert trajectory.grammar is not None
        parser = StreamingParser(self.dialect, self.tokenizer, tags=self.tags)
        for token in trajectory.trunk.tokens[trajectory.grammar.block_start :]:
            parser.feed_token(token)
        found = {_REASONS[v.code] for v in parser.block_violations if v.code in _REASONS}
        for reason in (MalformedReason.NO_PLAN, MalformedReason.LABELS, MalformedReason.EMPTY_PLAN):
            if reason in found:
                return reason
        # A tag spelled out in ordinary tokens is a plan to a reader, but none to the topology.
        plans = parser.guideline_plans()
        return MalformedReason.NONE if plans is not None and len(plans) == branches else MalformedReason.LABELS

    def _limits(self, trajectory: Trajectory, branches: int) -> MalformedReason:
        limits = trajectory.ledger.limits
        if branches > limits.max_branches:
            return MalformedReason.TOO_MANY_BRANCHES
        if sum(1 for _ in trajectory.blocks()) >= limits.max_blocks:
            return MalformedReason.TOO_MANY_BLOCKS
        headers = [len(self.cues.header(index)) for index in range(branches)]
        if not can_fork(trajectory, headers, len(self.cues.takeaway)):
            return MalformedReason.LEDGER
        if not self.can_ever_pay(trajectory, branches):
            return MalformedReason.KV_POOL
        return MalformedReason.NONE


def fork_validator(
    tokenizer: Any, dialect: Dialect, can_ever_pay: Callable[[Trajectory, int], bool]
) -> ForkValidator | None:
    """The checks for one tokenizer; None without single-token tags (before stage 2), where nothing ever forks."""
    tags = TagIds.from_tokenizer(tokenizer, dialect)
    if tags is None:
        return None
    return ForkValidator(tokenizer, dialect, tags, Cues(tokenizer, dialect, tags), can_ever_pay)
