"""The record of one trajectory while it is decoded: its tokens as a tree, and where its keys and values are.

Invariants:
- `segments` alternates trunk spans and blocks, in canonical order; the first and the last are trunk spans, except that
  an open block may be last.
- The record alone says what must be in the KV pool: a span's first `fed` tokens are there, or planned for the coming
  forward pass. Decoding and recomputing are therefore the same act, feeding what is not fed: after a preemption
  `fed` is zero everywhere, and the tokens, their log-probabilities and their positions stay as they are.
- A span samples only when it is open and all its tokens are fed.

What is fed, and through which rows of which pages, concerns the engine that keeps keys and values itself. One that
leaves them to a server never feeds a span.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from npr_rollout.record.ledger import Ledger
from npr_rollout.record.outcomes import BranchStop, LimitKind, MalformedReason
from npr_rollout.record.request import BlockReport, BranchReport, Request
from npr_rollout.record.trunk_grammar import TrunkGrammar

if TYPE_CHECKING:
    from npr_rollout.engine.prompts import SharedPrompt

OUTSIDE = -1
"""Block and branch index of trunk spans."""


class Body(Protocol):
    """What a step's body has said, for the repetition penalty: `body[token] = True` for each of its tokens."""

    def __setitem__(self, token: int, said: bool, /) -> None: ...

    def __len__(self) -> int: ...


class Drawn(NamedTuple):
    """A sampled token; its raw log-probability is 0 where nobody asks for it."""

    token: int
    log_prob: float
    raw_log_prob: float


@dataclass(slots=True, eq=False)
class Span:
    """A run of tokens of the trunk, or one branch.

    Attributes:
        start: RoPE position of the first token.
        prompt_length: how many of the tokens are the prompt's; not zero in the first span only.
        log_probs: one a token after the prompt; likewise `forced`, and `raw_log_probs` where they are asked for.
        row: its table; None until it is fed, and after it has been joined.
        seen: which tokens the step's body holds; None without a penalty.
        streamed: tokens that have been told to the client.
    """

    owner: Trajectory
    start: int
    block: int = OUTSIDE
    branch: int = OUTSIDE
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    raw_log_probs: list[float] = field(default_factory=list)
    prompt_length: int = 0
    fed: int = 0
    row: int | None = None
    seen: Body | None = None
    streamed: int = 0
    budget: int = 0
    stop: BranchStop = BranchStop.OPEN
    started_at: float = 0.0
    finished_at: float = 0.0

    @property
    def is_branch(self) -> bool:
        """Whether it is a branch of a block."""
        return self.branch != OUTSIDE

    @property
    def open(self) -> bool:
        """Whether a branch may still grow."""
        return self.stop is BranchStop.OPEN

    @property
    def end(self) -> int:
        """RoPE position of the token that would come next."""
        return self.start + len(self.tokens)

    @property
    def unfed(self) -> int:
        """Tokens whose keys and values are not in the pool."""
        return len(self.tokens) - self.fed

    def add(self, drawn: Drawn) -> None:
        """Append a sampled token."""
        self.tokens.append(drawn.token)
        self.log_probs.append(drawn.log_prob)
        self.forced.append(False)
        if self.owner.request.sampling.raw_log_probs:
            self.raw_log_probs.append(drawn.raw_log_prob)

    def force(self, tokens: list[int]) -> None:
        """Append tokens that the engine puts there."""
        self.tokens.extend(tokens)
        self.log_probs.extend([0.0] * len(tokens))
        self.forced.extend([True] * len(tokens))
        if self.owner.request.sampling.raw_log_probs:
            self.raw_log_probs.extend([0.0] * len(tokens))

    def report(self) -> BranchReport:
        """Its account, for the ledger's report."""
        return BranchReport(
            self.budget, len(self.tokens), sum(self.forced), self.stop, self.started_at, self.finished_at
        )


@dataclass(slots=True, eq=False)
class Block:
    """A forked block: branches in plan order.

    Attributes:
        limit: the limit that its branches' budget comes from.
    """

    index: int
    branches: list[Span]
    started_at: float
    finished_at: float = 0.0
    limit: LimitKind = LimitKind.NONE

    @property
    def closed(self) -> bool:
        """Whether every branch has ended."""
        return not any(branch.open for branch in self.branches)

    @property
    def longest(self) -> int:
        """Length of the longest branch span."""
        return max(len(branch.tokens) for branch in self.branches)

    def report(self) -> BlockReport:
        """Its account, for the ledger's report."""
        return BlockReport(tuple(branch.report() for branch in self.branches), self.started_at, self.finished_at)


@dataclass(slots=True, eq=False)
class Trajectory:
    """A request on its way.

    Attributes:
        key: 64 bits that fix its random draws, made of seed and prompt.
        grammar: follows the trunk's tags; None where nothing ever forks.
        arrival: order of submission.
        frontier: index of the first segment that is not settled: all fed and, if a block, joined.
        row: the trunk's table; None until its prompt is decoded.
        active: the spans that sample in the coming step.
        prompt: the shared entry of its prompt; None while it waits.
        settled: whether each active span has just its last token to feed, and nothing else is to be done.
        pages: KV pages that it holds, shared ones included.
        textual_joins: joins for which all branches were fed again as plain text.
    """

    request: Request
    key: int
    arrival: int
    ledger: Ledger
    grammar: TrunkGrammar | None
    segments: list[Span | Block] = field(default_factory=list)
    frontier: int = 0
    row: int | None = None
    prompt: SharedPrompt | None = None
    active: list[Span] = field(default_factory=list)
    settled: bool = False
    finished: bool = False
    pages: int = 0
    peak_pages: int = 0
    engine_steps: int = 0
    preemptions: int = 0
    textual_joins: int = 0
    serialized_blocks: int = 0
    serialized_reason: MalformedReason = MalformedReason.NONE
    branch_truncated: bool = False
    started_at: float = 0.0

    def __post_init__(self) -> None:
        prompt = list(self.request.prompt_ids)
        self.segments.append(Span(self, 0, tokens=prompt, prompt_length=len(prompt)))

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt_ids)

    @property
    def length(self) -> int:
        """Number of tokens, the prompt's and those of all branches included."""
        return sum(len(span.tokens) for span in self.spans())

    @property
    def open_block(self) -> Block | None:
        """The block whose branches are being decoded."""
        last = self.segments[-1]
        return last if isinstance(last, Block) else None

    @property
    def trunk(self) -> Span:
        """The last trunk span; the one that is decoded, unless a block is open."""
        last = self.segments[-1]
        span = last if isinstance(last, Span) else self.segments[-2]
        assert isinstance(span, Span)
        return span

    @property
    def unfed(self) -> int:
        """Tokens whose keys and values are not in the pool, from the frontier on."""
        return sum(
            segment.unfed if isinstance(segment, Span) else sum(branch.unfed for branch in segment.branches)
            for segment in self.segments[self.frontier :]
        )

    def samples(self, span: Span) -> bool:
        """Whether a span samples once all is fed: an open branch, or the trunk at its end."""
        return span.open if span.is_branch else span is self.segments[-1]

    def samplers(self) -> list[Span]:
        """The spans that sample once all is fed."""
        last = self.segments[-1]
        return [last] if isinstance(last, Span) else [branch for branch in last.branches if branch.open]

    @property
    def critical(self) -> int:
        """Tokens after the prompt on the critical path, an open block left out."""
        return self.trunk.end - self.prompt_length

    def blocks(self) -> Iterator[Block]:
        """Forked blocks in order."""
        return (segment for segment in self.segments if isinstance(segment, Block))

    def spans(self) -> Iterator[Span]:
        """All spans in canonical order."""
        for segment in self.segments:
            if isinstance(segment, Span):
                yield segment
            else:
                yield from segment.branches

    def rows(self) -> set[int]:
        """Rows that it holds."""
        held = {span.row for span in self.spans() if span.row is not None}
        return held | ({self.row} if self.row is not None else set())

    def forget_cache(self) -> None:
        """Mark everything as not fed, after its rows were closed."""
        self.frontier, self.row, self.prompt, self.pages, self.settled = 0, None, None, 0, False
        self.active = []
        for span in self.spans():
            span.fed, span.row = 0, None
