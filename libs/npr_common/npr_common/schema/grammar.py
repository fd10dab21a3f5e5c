"""The grammar of section "Schema" as a state machine over lexemes, with recovery.

    response := (prose? block)* prose
    block    := <guideline> (<plan>i: text</plan>)+ </guideline> (<step>i: text</step>)+ <takeaway>text</takeaway>

Invariants:
- Every tag has a home: the states in which it may stand. Elsewhere it is a violation, and one of two things happens:
  where it shows that elements before it were left open, these are closed and it is taken; otherwise it is ignored.
- An ignored tag is part of the text around it.
- The tree and the violations depend on the lexemes alone, not on how text is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from npr_common.dialects import Dialect
from npr_common.schema.lexer import Lexeme
from npr_common.schema.tree import Block, Guideline, Plan, Prose, Response, Span, Step, Takeaway
from npr_common.schema.violations import Violation, ViolationCode
from npr_common.tags import Role, Tag

Locate = Callable[[int, int], Span]


class State(Enum):
    """Where in the grammar the end of the stream is."""

    PROSE = "prose"
    """Outside of all blocks."""
    BLOCK = "block"
    """Inside a wrapped block, before its guideline."""
    GUIDELINE = "guideline"
    """Inside a guideline, between plans."""
    PLAN = "plan"
    STEPS = "steps"
    """After a guideline, between steps."""
    STEP = "step"
    TAKEAWAY = "takeaway"
    BLOCK_END = "block_end"
    """Inside a wrapped block, after its takeaway."""


_LEAVES = {State.PLAN: Role.PLAN, State.STEP: Role.STEP, State.TAKEAWAY: Role.TAKEAWAY}
_OUTER = frozenset({Role.BLOCK, Role.GUIDELINE})
"""Roles that start a block."""
_OPEN = {role: Tag(role) for role in Role}
_CLOSE = {role: Tag(role, closing=True) for role in Role}

_HOMES: Mapping[Tag, frozenset[State]] = {
    _OPEN[Role.BLOCK]: frozenset({State.PROSE}),
    _OPEN[Role.GUIDELINE]: frozenset({State.PROSE, State.BLOCK}),
    _OPEN[Role.PLAN]: frozenset({State.GUIDELINE}),
    _CLOSE[Role.PLAN]: frozenset({State.PLAN}),
    _CLOSE[Role.GUIDELINE]: frozenset({State.GUIDELINE}),
    _OPEN[Role.STEP]: frozenset({State.STEPS}),
    _CLOSE[Role.STEP]: frozenset({State.STEP}),
    _OPEN[Role.TAKEAWAY]: frozenset({State.STEPS}),
    _CLOSE[Role.TAKEAWAY]: frozenset({State.TAKEAWAY}),
    _CLOSE[Role.BLOCK]: frozenset({State.BLOCK_END}),
}
"""Where a tag may stand."""

_RECOVERABLE: Mapping[Tag, frozenset[State]] = {
    _OPEN[Role.BLOCK]: frozenset({State.STEPS, State.TAKEAWAY, State.BLOCK_END}),
    _OPEN[Role.GUIDELINE]: frozenset({State.STEPS, State.TAKEAWAY, State.BLOCK_END}),
    _OPEN[Role.PLAN]: frozenset({State.PLAN}),
    _CLOSE[Role.GUIDELINE]: frozenset({State.PLAN}),
    _OPEN[Role.STEP]: frozenset({State.GUIDELINE, State.STEP}),
    _OPEN[Role.TAKEAWAY]: frozenset({State.GUIDELINE, State.STEP}),
    _CLOSE[Role.BLOCK]: frozenset({State.BLOCK, State.GUIDELINE, State.STEPS, State.STEP, State.TAKEAWAY}),
}
"""Where a tag means that what is open should have been closed before."""


@dataclass
class _Text:
    """Text in the making, from the character `start` (its element's own tag, if it has one)."""

    start: int
    pieces: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "".join(self.pieces)


@dataclass
class _OpenBlock:
    """A block in the making."""

    start: int
    first_violation: int  # number of violations before it
    wrapped: bool = False
    guideline_start: int = 0
    plans: list[Plan] = field(default_factory=list)
    guideline: Guideline | None = None
    steps: list[Step] = field(default_factory=list)
    takeaway: Takeaway | None = None


class Grammar:
    """Builds the tree and the violations of one response from its lexemes.

    `locate` turns a range of characters into a span in the unit of the parse.
    """

    def __init__(self, dialect: Dialect, locate: Locate) -> None:
        self.state = State.PROSE
        self.violations: list[Violation] = []
        self._dialect = dialect
        self._locate = locate
        self._parts: list[Prose | Block] = []
        self._text = _Text(0)  # of the prose or leaf that is open
        self._block = _OpenBlock(0, 0)  # the one that is open, or the last one
        self._stray = False  # whether the gap between two tags holds text

    @property
    def guideline(self) -> Guideline | None:
        """The guideline of the open block, once it is closed."""
        return None if self.state is State.PROSE else self._block.guideline

    @property
    def step_count(self) -> int:
        """Number of steps of the open block that have ended."""
        return 0 if self.state is State.PROSE else len(self._block.steps)

    @property
    def block_violations(self) -> tuple[Violation, ...]:
        """What has been found in the block that is open; nothing in prose."""
        return () if self.state is State.PROSE else tuple(self.violations[self._block.first_violation :])

    def take(self, lexeme: Lexeme) -> None:
        """Take the next lexeme of the stream."""
        if lexeme.tag is None:
            self._take_text(lexeme)
        elif self._come_home(lexeme, lexeme.tag):
            self._stray = False
            self._take_tag(lexeme, lexeme.tag)
        else:
            self._ignore(lexeme, lexeme.tag)

    def finish(self, end: int) -> Response:
        """Close what is open at the stream's end; the whole tree."""
        while self.state is not State.PROSE:
            self._force_exit(end)
        self._parts.append(Prose(self._locate(self._text.start, end), str(self._text)))
        return Response(self._locate(0, end), tuple(self._parts))

    # --- text ---

    def _take_text(self, lexeme: Lexeme) -> None:
        if self.state is State.PROSE or self.state in _LEAVES:
            self._text.pieces.append(lexeme.text)
        elif not (self._stray or lexeme.text.isspace() or self._in_preamble()):
            self._stray = True
            at = lexeme.start + len(lexeme.text) - len(lexeme.text.lstrip())
            self._report(
                ViolationCode.STRAY_TEXT_BETWEEN_TAGS, at, "Only white space may stand between a block's tags."
            )

    def _in_preamble(self) -> bool:
        return self._dialect.guideline_preamble and self.state is State.GUIDELINE and not self._block.plans

    # --- tags ---

    def _come_home(self, lexeme: Lexeme, tag: Tag) -> bool:
        """Close what the tag shows to have been left open; whether it may stand here then."""
        if self.state in _RECOVERABLE.get(tag, ()):
            while self.state not in _HOMES[tag] and self.state is not State.PROSE:
                self._force_exit(lexeme.start)
        return self.state in _HOMES[tag]

    def _ignore(self, lexeme: Lexeme, tag: Tag) -> None:
        nested = not tag.closing and self.state is not State.PROSE and (self.state in _LEAVES or tag.role in _OUTER)
        code = ViolationCode.NESTED_TAG if nested else ViolationCode.UNEXPECTED_TAG
        self._report(code, lexeme.start, f"{lexeme.text} can't stand here ({self.state.value}).")
        if self.state is State.PROSE or self.state in _LEAVES:
            self._text.pieces.append(lexeme.text)

    def _take_tag(self, lexeme: Lexeme, tag: Tag) -> None:
        if tag.role is Role.BLOCK:
            self._end_block(lexeme.end) if tag.closing else self._open_wrapper(lexeme)
        elif tag.role is Role.GUIDELINE:
            self._end_guideline(lexeme.end) if tag.closing else self._open_guideline(lexeme)
        elif tag.closing:
            self._end_leaf(lexeme.end)
        else:
            self._open_leaf(lexeme, tag.role)

    def _force_exit(self, at: int) -> None:
        """Leave the state without the tag that should end it."""
        if self.state in _LEAVES:
            self._report_unclosed(_LEAVES[self.state], at)
            self._end_leaf(at)
        elif self.state is State.GUIDELINE:
            self._report_unclosed(Role.GUIDELINE, at)
            self._end_guideline(at)
        elif self.state is State.STEPS:
            self._check_counts(at)
            self._report(ViolationCode.MISSING_TAKEAWAY, at, "The block ends without a takeaway.")
            self._after_takeaway(at)
        elif self.state is State.BLOCK:
            self._report(ViolationCode.MISSING_GUIDELINE, at, "The block ends without a guideline.")
            self._after_takeaway(at)
        elif self.state is State.BLOCK_END:
            self._report_unclosed(Role.BLOCK, at)
            self._end_block(at)

    # --- blocks ---

    def _open_wrapper(self, lexeme: Lexeme) -> None:
        self._start_block(lexeme.start)
        self._block.wrapped = True
        self.state = State.BLOCK

    def _open_guideline(self, lexeme: Lexeme) -> None:
        if self.state is State.PROSE:
            self._start_block(lexeme.start)
            if self._dialect.wrapped:
                wrapper = self._dialect.open(Role.BLOCK)
                self._report(ViolationCode.UNEXPECTED_TAG, lexeme.start, f"{lexeme.text} has no {wrapper} around it.")
        self._block.guideline_start = lexeme.start
        self.state = State.GUIDELINE

    def _start_block(self, start: int) -> None:
        if self._text.pieces:
            self._parts.append(Prose(self._locate(self._text.start, start), str(self._text)))
        self._block = _OpenBlock(start, len(self.violations))

    def _end_guideline(self, end: int) -> None:
        block = self._block
        if not block.plans:
            self._report(ViolationCode.NO_PLAN, block.guideline_start, "The guideline holds no plan.")
        block.guideline = Guideline(self._locate(block.guideline_start, end), tuple(block.plans))
        self.state = State.STEPS

    def _after_takeaway(self, end: int) -> None:
        if self._block.wrapped:
            self.state = State.BLOCK_END
        else:
            self._end_block(end)

    def _end_block(self, end: int) -> None:
        block = self._block
        span = self._locate(block.start, end)
        self._parts.append(Block(span, block.guideline, tuple(block.steps), block.takeaway))
        self._text = _Text(end)
        self.state = State.PROSE

    def _check_counts(self, at: int) -> None:
        plans, steps = len(self._block.plans), len(self._block.steps)
        if plans != steps:
            message = f"The block has {plans} plans, but {steps} steps."
            self._report(ViolationCode.PLAN_STEP_COUNT_MISMATCH, at, message)

    # --- leaves ---

    def _open_leaf(self, lexeme: Lexeme, role: Role) -> None:
        if role is Role.TAKEAWAY:
            self._check_counts(lexeme.start)
        self._text = _Text(lexeme.start)
        self.state = State(role.value)

    def _end_leaf(self, end: int) -> None:
        span, content = self._locate(self._text.start, end), str(self._text)
        if self.state is State.TAKEAWAY:
            self._check_not_empty(ViolationCode.EMPTY_TAKEAWAY, content)
            self._block.takeaway = Takeaway(span, content.strip())
            self._after_takeaway(end)
        elif self.state is State.PLAN:
            label, text = self._split_label(content, len(self._block.plans) + 1)
            self._check_not_empty(ViolationCode.EMPTY_PLAN, text)
            self._block.plans.append(Plan(span, label, text))
            self.state = State.GUIDELINE
        else:
            label, text = self._split_label(content, len(self._block.steps) + 1)
            self._check_not_empty(ViolationCode.EMPTY_STEP, text)
            self._block.steps.append(Step(span, label, text))
            self.state = State.STEPS

    def _split_label(self, content: str, expected: int) -> tuple[int | None, str]:
        match = self._dialect.label_pattern.match(content)
        wanted = self._dialect.label_of(expected)
        if match is None:
            self._report(ViolationCode.MISSING_LABEL, self._text.start, f"The label {wanted!r} is missing.")
            return None, content.strip()
        if match.group(1) != str(expected):
            message = f"The label should be {wanted!r}, not {match.group().strip()!r}."
            self._report(ViolationCode.LABEL_OUT_OF_ORDER, self._text.start, message)
        return int(match.group(1)), content[match.end() :].strip()

    def _check_not_empty(self, code: ViolationCode, text: str) -> None:
        if not text.strip():
            self._report(code, self._text.start, f"The {self.state.value} is empty.")

    # --- violations ---

    def _report_unclosed(self, role: Role, at: int) -> None:
        self._report(ViolationCode.UNCLOSED_TAG, at, f"{self._dialect.close(role)} is missing.")

    def _report(self, code: ViolationCode, at: int, message: str) -> None:
        self.violations.append(Violation(code, self._locate(at, at + 1).start, message))
