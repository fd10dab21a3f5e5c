"""One trajectory's dealings with the server: which streams its record asks for, and what comes of them.

Invariants:
- The record alone says what is to be done: what is not decoded is asked for, what is decoded is never asked for again.
  So an eviction, a retraction, and a stream that ended early are all answered by asking anew.
- The tokens of a block's branches are taken in step: one of each open branch at a time, in plan order, whoever decodes
  faster. So what is decided depends on the record alone, as in the engine that steps itself.
- A context is used only when it is sealed: the keys and values of every token of its branches were computed, each in
  the isolation of its branch. An eviction unseals it.
- A server without the plug-in knows no contexts: what stands on joined blocks is fed as plain text, and the record
  counts these joins (`textual_joins`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from npr_common.errors import InternalError
from npr_rollout.record.growth import Growth
from npr_rollout.record.outcomes import BranchStop
from npr_rollout.record.request import SamplingParams
from npr_rollout.record.script import Script
from npr_rollout.record.trajectory import Block, Drawn, Span, Trajectory
from npr_rollout.sglang.wire import Ask, End, Ended
from npr_sglang.contract import FREE, Context, Params
from npr_sglang.contract import Block as ContextBlock

_GREEDY = SamplingParams(temperature=0.0)
_MAX_IDLE_ENDS = 20  # streams in a row that ended without a token, before that is taken for a fault
_MAX_EVICTIONS = 20  # of a trajectory's context; it had the server to itself long before


class Purpose(Enum):
    """What a stream is for."""

    DECODE = "decode"
    SEAL = "seal"


@dataclass(slots=True, eq=False)
class Stream:
    """A stream under way.

    Attributes:
        length: tokens of the span when it was asked for.
        drawn: tokens that have come and are not taken yet.
        ended: its end, once that has come.
        taken: how many have been taken.
        last: the last one of these.
    """

    ask: Ask
    purpose: Purpose
    span: Span
    length: int
    drawn: deque[Drawn] = field(default_factory=deque)
    ended: Ended | None = None
    taken: int = 0
    last: int | None = None

    @property
    def ends_by_itself(self) -> bool:
        """Whether the server ends it without being told: all its tokens are taken, up to a stop id or to its length."""
        return not self.drawn and (self.last in self.ask.stop or self.taken >= self.ask.max_tokens)


@dataclass(frozen=True, slots=True)
class StopIds:
    """After which tokens a stream ends.

    Attributes:
        branch: every tag and every end of text.
        trunk: what closes a guideline, and every end of text.
        serialized: the same, and what begins and ends a step, whose body has a penalty of its own.
        plain: every end of text.
    """

    branch: tuple[int, ...]
    trunk: tuple[int, ...]
    serialized: tuple[int, ...]
    plain: tuple[int, ...]


class Journey:
    """See the module's docstring.

    Attributes:
        evictions: how often a context had to be sealed again.
    """

    def __init__(
        self, trajectory: Trajectory, name: str, stops: StopIds, *, native: bool, script: Script | None = None
    ) -> None:
        """Begin.

        Args:
            name: what the names of its streams begin with.
            native: whether the server has the plug-in.
            script: what it is to say, if that is given.
        """
        self.trajectory = trajectory
        self.name = name
        self.evictions = 0
        self._native = native
        self._script = script
        self._stops = stops
        self._streams: dict[str, Stream] = {}
        self._sealed: set[Span] = set()
        self._begun: Block | None = None  # the last block whose branches were asked for
        self._idle_ends = 0
        self._asked = 0

    # --- what comes from the server ---

    @property
    def streams(self) -> Iterable[Stream]:
        """Streams under way."""
        return self._streams.values()

    def tokens(self, name: str, drawn: list[Drawn]) -> None:
        """New tokens of a stream; those of streams that are not wanted any more are thrown away."""
        stream = self._streams.get(name)
        if stream is not None and stream.purpose is Purpose.DECODE:
            stream.drawn.extend(drawn if self._native else self._by_our_rules(drawn))
            self._idle_ends = 0

    def ended(self, ended: Ended) -> str:
        """The end of a stream; why the trajectory can't go on, if it can't.

        Raises:
            InternalError: the server does not answer any more.
        """
        stream = self._streams.get(ended.name)
        if stream is None:
            return ""
        if ended.end is End.LOST:
            raise InternalError(f"The SGLang server is gone: {ended.message}")
        self.trajectory.preemptions += ended.retractions
        stream.ended = ended
        if ended.end is End.EVICTED and self._sealed:  # all streams that stand on a context tell of its eviction
            self.evictions += 1
            self._sealed.clear()
        if not stream.drawn:
            self._close(stream)
        if ended.end in (End.REFUSED, End.NO_ROOM):
            return f"The SGLang server refuses it ({ended.end.value}): {ended.message}"
        if self.evictions > _MAX_EVICTIONS:
            return "The SGLang server evicts its context again and again."
        return "The SGLang server ends its streams without a token." if self._idle_ends > _MAX_IDLE_ENDS else ""

    def _by_our_rules(self, drawn: list[Drawn]) -> list[Drawn]:
        """What a server without the plug-in has drawn: all it tells is the log-probability after temperature."""
        is_greedy = self.trajectory.request.sampling.temperature == 0.0  # drawn from a point mass
        return [Drawn(token, 0.0 if is_greedy else log_prob, log_prob) for token, log_prob, _ in drawn]

    @property
    def has_begun_its_block(self) -> bool:
        """Whether no block is open whose branches have not been asked for."""
        block = self.trajectory.open_block
        return block is None or block is self._begun

    # --- taking tokens into the record ---

    def grow(self, growth: Growth) -> None:
        """Take what can be taken."""
        trajectory = self.trajectory
        while not trajectory.finished:
            wanted = trajectory.samplers()
            streams = [stream for stream in self._streams.values() if stream.drawn]
            ready = {stream.span: stream for stream in streams}
            if not wanted or not all(span in ready for span in wanted):
                return
            chosen = [ready[span] for span in wanted]
            samples = [stream.drawn.popleft() for stream in chosen]
            growth.take(wanted, samples)
            trajectory.engine_steps += 1
            for stream, drawn in zip(chosen, samples, strict=True):
                stream.taken, stream.last = stream.taken + 1, drawn.token
                if stream.ended is not None and not stream.drawn:
                    self._close(stream)

    def _close(self, stream: Stream) -> None:
        """Forget a stream that has ended and all of whose tokens are taken."""
        del self._streams[stream.ask.name]
        if self._wrote_all(stream):
            self._sealed.add(stream.span)
        elif not stream.taken and stream.ended is not None and stream.ended.end is not End.EVICTED:
            self._idle_ends += 1

    def _wrote_all(self, stream: Stream) -> bool:
        """Whether the keys and values of the span's every token were computed by this stream."""
        if stream.ended is None or stream.ended.end not in (End.STOPPED, End.LENGTH):
            return False
        if stream.purpose is Purpose.SEAL:
            return True
        is_whole = stream.length + stream.taken == len(stream.span.tokens)
        return is_whole and stream.span.is_branch and stream.span.stop is BranchStop.CLOSED

    # --- what to ask for ---

    def unwanted(self) -> list[str]:
        """Names of streams that decode what the record does not want; each is told once."""
        wanted = set(self.trajectory.samplers())
        names = []
        for stream in list(self._streams.values()):
            if stream.purpose is Purpose.DECODE and stream.span not in wanted and not stream.ends_by_itself:
                del self._streams[stream.ask.name]
                if stream.ended is None:
                    names.append(stream.ask.name)
        return names

    def wanted(self) -> list[Ask]:
        """Streams to be asked for now. They are under way from now on."""
        trajectory = self.trajectory
        if trajectory.finished:
            return []
        if unsealed := self._unsealed():
            return [self._ask(span, Purpose.SEAL) for span in unsealed if not self._has_stream(span)]
        self._begun = trajectory.open_block
        return [self._ask(span, Purpose.DECODE) for span in trajectory.samplers() if not self._has_stream(span)]

    def _unsealed(self) -> list[Span]:
        """Branches of the first joined block that is not sealed as a whole."""
        if not self._native:
            return []
        for block in self.trajectory.blocks():
            if block is self.trajectory.open_block:
                break
            if unsealed := [branch for branch in block.branches if branch not in self._sealed]:
                return unsealed
        return []

    def _has_stream(self, span: Span) -> bool:
        return any(stream.span is span for stream in self._streams.values())

    def _ask(self, span: Span, purpose: Purpose) -> Ask:
        self._asked += 1
        name = f"{self.name}.{self._asked}."
        before, blocks = _before(self.trajectory, span)
        if not self._native:
            self.trajectory.textual_joins = len(blocks)
        ask = self._seal if purpose is Purpose.SEAL else self._decode
        asked = ask(name, [*before, *span.tokens], span, Context(blocks))
        self._streams[name] = Stream(asked, purpose, span, len(span.tokens))
        return asked

    def _seal(self, name: str, tokens: list[int], _: Span, context: Context) -> Ask:
        return Ask(name, tokens, 1, (), _GREEDY, Params(context=context))

    def _decode(self, name: str, tokens: list[int], span: Span, context: Context) -> Ask:
        params = self._params(span, context) if self._native else None
        request = self.trajectory.request
        stop = self._stop_ids(span)
        return Ask(name, tokens, self._room(span), stop, request.sampling, params, at_once=request.stream)

    def _params(self, span: Span, context: Context) -> Params:
        sampling = self.trajectory.request.sampling
        return Params(
            context=context,
            key=self.trajectory.key,
            branch=span.branch,
            penalty=sampling.repetition_penalty if span.seen is not None else 1.0,
            said=len(span.seen) if span.seen is not None else 0,
            seal=span.is_branch,
            raw_log_probs=sampling.raw_log_probs,
            script=self._script.says(span, self._room(span), FREE) if self._script is not None else (),
        )

    def _room(self, span: Span) -> int:
        """Tokens after which the record is sure to end the span."""
        ledger = self.trajectory.ledger
        if span.is_branch:
            return max(1, span.budget - 1 - len(span.tokens))
        left = ledger.limits.max_tokens - ledger.total
        return max(1, min(left, ledger.limits.max_critical_tokens - self.trajectory.critical))

    def _stop_ids(self, span: Span) -> tuple[int, ...]:
        if span.is_branch:
            return self._stops.branch
        if self.trajectory.grammar is None:
            return self._stops.plain
        has_penalty = self.trajectory.request.sampling.repetition_penalty != 1.0
        return self._stops.serialized if has_penalty and self.trajectory.serialized_blocks else self._stops.trunk


def _before(trajectory: Trajectory, span: Span) -> tuple[list[int], tuple[ContextBlock, ...]]:
    """All tokens that a span stands on, in canonical order, and how the joined blocks lie in them."""
    tokens: list[int] = []
    blocks: list[ContextBlock] = []
    trunk = 0
    for segment in trajectory.segments:
        if segment is span or (isinstance(segment, Block) and span in segment.branches):
            break
        if isinstance(segment, Span):
            tokens += segment.tokens
            trunk = len(segment.tokens)
        else:
            for branch in segment.branches:
                tokens += branch.tokens
            blocks.append(ContextBlock(trunk, tuple(len(branch.tokens) for branch in segment.branches)))
    return tokens, tuple(blocks)
