"""Which structural tags may come next on the trunk.

Invariants:
- It knows tags only. Text, labels and white space are the parser's business (`npr_common.schema`); the engine stops a
  trajectory only at a tag that no well-formed response has there.
- `</guideline>` is where the engine decides: fork (the state becomes TAKEAWAY at the join) or serialize (STEPS).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from npr_common.dialects import Dialect
from npr_common.schema import State
from npr_common.tags import Role, Tag


class TagVerdict(Enum):
    """What a sampled tag means for the trajectory."""

    GO_ON = "go_on"
    GUIDELINE_CLOSED = "guideline_closed"
    STEP_OPENED = "step_opened"
    """A serialized step begins: its body starts empty."""
    STEP_CLOSED = "step_closed"
    UNEXPECTED = "unexpected"
    """The grammar has no such tag here."""
    IN_STEP = "in_step"
    """A tag other than its closing one inside a serialized step."""


_MOVES: Mapping[tuple[State, Tag], State] = {
    (State.GUIDELINE, Tag(Role.PLAN)): State.PLAN,
    (State.PLAN, Tag(Role.PLAN, closing=True)): State.GUIDELINE,
    (State.GUIDELINE, Tag(Role.GUIDELINE, closing=True)): State.STEPS,
    (State.STEPS, Tag(Role.STEP)): State.STEP,
    (State.STEP, Tag(Role.STEP, closing=True)): State.STEPS,
    (State.STEPS, Tag(Role.TAKEAWAY)): State.TAKEAWAY,
}
_PLAIN: Mapping[tuple[State, Tag], State] = {
    **_MOVES,
    (State.PROSE, Tag(Role.GUIDELINE)): State.GUIDELINE,
    (State.TAKEAWAY, Tag(Role.TAKEAWAY, closing=True)): State.PROSE,
}
_WRAPPED: Mapping[tuple[State, Tag], State] = {
    **_MOVES,
    (State.PROSE, Tag(Role.BLOCK)): State.BLOCK,
    (State.BLOCK, Tag(Role.GUIDELINE)): State.GUIDELINE,
    (State.TAKEAWAY, Tag(Role.TAKEAWAY, closing=True)): State.BLOCK_END,
    (State.BLOCK_END, Tag(Role.BLOCK, closing=True)): State.PROSE,
}
_VERDICTS: Mapping[Tag, TagVerdict] = {
    Tag(Role.GUIDELINE, closing=True): TagVerdict.GUIDELINE_CLOSED,
    Tag(Role.STEP): TagVerdict.STEP_OPENED,
    Tag(Role.STEP, closing=True): TagVerdict.STEP_CLOSED,
}


class TrunkGrammar:
    """Follows the tags of one trajectory's trunk.

    Attributes:
        state: where the trunk is.
        block_start: index, in the trunk span, of the first tag of the block that is open.
        plans: plans of the guideline that is open or has just closed.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._moves = _WRAPPED if dialect.wrapped else _PLAIN
        self.state = State.PROSE
        self.block_start = 0
        self.plans = 0

    def take(self, tag: Tag, index: int) -> TagVerdict:
        """Take a tag sampled at `index` of the trunk span."""
        after = self._moves.get((self.state, tag))
        if after is None:
            return TagVerdict.IN_STEP if self.state is State.STEP else TagVerdict.UNEXPECTED
        if self.state is State.PROSE:
            self.block_start, self.plans = index, 0
        self.plans += tag == Tag(Role.PLAN)
        self.state = after
        return _VERDICTS.get(tag, TagVerdict.GO_ON)

    def join(self) -> None:
        """The engine has joined the branches and opened the takeaway."""
        self.state = State.TAKEAWAY
