"""The NPR engine: continuous batching with fork and join.

The life of a request: `submit` checks it and puts it in line; the scheduler admits it; each `step` feeds what the
records of all running trajectories ask for in one forward pass, samples, and takes the samples into the records; a
closed guideline is validated and forks; ended branches join; an end gives back every page and makes a `Result`.

Invariants:
- One thread calls it. One policy at a time; every token of a trajectory is of one policy version.
- After `step` returns, every page is held by a trajectory that runs, or free.
- No state is undefined: whatever a model writes ends in one typed outcome.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from npr_common.dialects import Dialect
from npr_common.errors import AlreadyExistsError, InternalError
from npr_common.schema import State
from npr_common.tags import TagIds
from npr_rollout.engine.admission import check_request, resolve_limits
from npr_rollout.engine.audit import audit
from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.feeding import Feeder
from npr_rollout.engine.fork_join import Cues, end_branch, end_open_branches, enforce_budgets, fork, join
from npr_rollout.engine.kv_pool import KvPool
from npr_rollout.engine.ledger import Ledger
from npr_rollout.engine.model_runner import ModelRunner, kv_shape
from npr_rollout.engine.outcomes import BranchStop, ForkRefusal, LimitKind, MalformedReason, Outcome, Visibility
from npr_rollout.engine.page_table import PageTables
from npr_rollout.engine.prompts import SharedPrompts
from npr_rollout.engine.request import Event, FinishedEvent, Request, TokensEvent
from npr_rollout.engine.results import make_result, refused
from npr_rollout.engine.sampling import RandomSampler, Sampler, Samples, draw_key
from npr_rollout.engine.scheduler import Scheduler
from npr_rollout.engine.stopwatch import Stopwatch
from npr_rollout.engine.trajectory import Drawn, Span, Trajectory
from npr_rollout.engine.trunk_grammar import TagVerdict, TrunkGrammar
from npr_rollout.engine.validation import ForkValidator

_COUNTS = (
    "steps",
    "tokens",
    "forks",
    "joins",
    "preemptions",
    "evictions",
    "scheduling_seconds",
    "forward_seconds",
    "sampling_seconds",
    "kv_tokens_read",
    "kv_tokens_attended",
)


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What the engine is doing; counts since it was made.

    Attributes:
        pages_used: pages that trajectories hold; `pages_cached` hold prompts that nobody uses now.
        scheduling_seconds: spent in scheduling, planning and taking samples into the records; likewise
            `forward_seconds` and `sampling_seconds`.
        kv_tokens_read: tokens whose keys and values attention has read, shared segments once a step.
        kv_tokens_attended: the same, had each row read its whole prefix by itself.
    """

    running: int
    waiting: int
    pages_total: int
    pages_used: int
    steps: int
    tokens: int
    forks: int
    joins: int
    preemptions: int
    fork_refusals: dict[MalformedReason, int]
    pages_cached: int
    evictions: int
    scheduling_seconds: float
    forward_seconds: float
    sampling_seconds: float
    kv_tokens_read: int
    kv_tokens_attended: int

    @classmethod
    def zero(cls) -> EngineStatus:
        """An engine that was never there."""
        return cls(**{field.name: 0 for field in fields(cls)} | {"fork_refusals": {}})  # type: ignore[arg-type]

    def plus(self, later: EngineStatus) -> EngineStatus:
        """The state of `later`, with the counts of both."""
        counts = {name: getattr(self, name) + getattr(later, name) for name in _COUNTS}
        refusals = dict(Counter(self.fork_refusals) + Counter(later.fork_refusals))
        return replace(later, fork_refusals=refusals, **counts)


class Engine:
    """Decodes requests with one policy. See the module's docstring."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        dialect: Dialect,
        config: EngineConfig | None = None,
        *,
        policy_version: int = 0,
        sampler: Sampler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve a model.

        Args:
            model: a `transformers` causal language model; its attention function is replaced, and on a CPU its linear
                layers are.
            tokenizer: its tokenizer. Without single-token tags (before stage 2) nothing ever forks.
            sampler: how tokens are chosen, if not at random.
            clock: what deadlines are compared with, in seconds.
        """
        self.config = config or EngineConfig()
        self.policy_version = policy_version
        self.context = int(model.config.max_position_embeddings)
        self._vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self._pool = KvPool(kv_shape(model, self.config.kv_dtype), self.config.pages, self.config.page_size)
        self._tables = PageTables(self._pool)
        self._prompts = SharedPrompts(self._tables)
        self._feeder = Feeder(self._tables, self._prompts)
        self._runner = ModelRunner(model, self._pool, self._tables, self.config.attention)
        self._scheduler = Scheduler(
            self._pool, self._prompts, self._feeder, self.config.max_running, self.config.prefill_tokens
        )
        self._clock = clock
        self._deadlines: list[tuple[float, int, Trajectory]] = []  # a heap
        self._sampler = sampler or RandomSampler()
        self._dialect = dialect
        self._eos = _eos_ids(model, tokenizer)
        self._tags = TagIds.from_tokenizer(tokenizer, dialect)
        if self._tags is not None:
            self._cues = Cues(tokenizer, dialect, self._tags)
            self._validator = ForkValidator(tokenizer, dialect, self._tags, self._cues, self._pool)
        self._special = self._eos | frozenset(self._tags or ())
        self._live: dict[str, Trajectory] = {}
        self._arrivals = itertools.count()
        self._events: list[Event] = []
        self._counts: Counter[str] = Counter()
        self._seconds = Stopwatch()
        self._refusals: Counter[MalformedReason] = Counter()

    # --- what callers use ---

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not self._live

    def submit(self, request: Request) -> str:
        """Put a request in line; its id. One that can never fit ends as REFUSED in the next step's events.

        Raises:
            InvalidArgumentError: the prompt is empty, too long for the context, or has ids that the model lacks; or a
                sampling parameter or limit makes no sense.
            AlreadyExistsError: a request with this id is on its way.
        """
        check_request(request, self.context, self._vocab_size)
        if request.request_id in self._live:
            raise AlreadyExistsError(f"Request {request.request_id} is being decoded already; use another id.")
        limits, obstacle = resolve_limits(request, self.config, self.context)
        if obstacle:
            self._events.append(FinishedEvent(refused(request, self.policy_version, obstacle)))
            return request.request_id
        parallel = request.visibility is Visibility.PARALLEL and self._tags is not None
        trajectory = Trajectory(
            request,
            draw_key(request.sampling.seed, request.prompt_ids),
            next(self._arrivals),
            Ledger(limits),
            TrunkGrammar(self._dialect) if parallel else None,
        )
        self._live[request.request_id] = trajectory
        self._scheduler.add(trajectory)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, trajectory.arrival, trajectory))
        return request.request_id

    def step(self) -> list[Event]:
        """One forward pass over everything that runs, and what came of it. Cheap when there is nothing to do."""
        self._seconds.start()
        self._expire()
        admitted, preempted = self._scheduler.schedule()
        now = time.time()
        for trajectory in admitted:
            trajectory.started_at = trajectory.started_at or now
        self._counts["preemptions"] += len(preempted)
        if self._scheduler.running:
            self._decode()
        self._seconds.lap("scheduling")
        if self.config.audit_every_step and (problems := self.audit()):
            raise InternalError("The KV audit failed: " + " ".join(problems), reason="KV_AUDIT")
        events, self._events = self._events, []
        return events

    def abort(self, request_id: str, message: str = "The client left.") -> bool:
        """End a request with all its branches, at any moment; whether it was on its way. `message` says why."""
        trajectory = self._live.get(request_id)
        if trajectory is None:
            return False
        self._finish(trajectory, Outcome.ABORTED, message)
        self._scheduler.remove_finished()
        return True

    def status(self) -> EngineStatus:
        """What the engine is doing."""
        return EngineStatus(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            pages_total=self._pool.pages,
            pages_used=self._pool.pages - self._pool.free_pages - self._prompts.idle_pages,
            steps=self._counts["steps"],
            tokens=self._counts["tokens"],
            forks=self._counts["forks"],
            joins=self._counts["joins"],
            preemptions=self._counts["preemptions"],
            fork_refusals=dict(self._refusals),
            pages_cached=self._prompts.idle_pages,
            evictions=self._prompts.evictions,
            scheduling_seconds=self._seconds.of["scheduling"],
            forward_seconds=self._seconds.of["forward"],
            sampling_seconds=self._seconds.of["sampling"],
            kv_tokens_read=self._counts["kv_tokens_read"],
            kv_tokens_attended=self._counts["kv_tokens_attended"],
        )

    def audit(self) -> tuple[str, ...]:
        """Problems between the page allocator and the live tables, each a sentence; none in a sound engine."""
        return audit(self._tables, self._prompts, self._live.values())

    # --- one step ---

    def _expire(self) -> None:
        now, late = self._clock(), False
        while self._deadlines and (self._deadlines[0][2].finished or self._deadlines[0][0] <= now):
            trajectory = heapq.heappop(self._deadlines)[2]
            if not trajectory.finished:
                self._finish(trajectory, Outcome.DEADLINE, "The deadline passed.")
                late = True
        if late:
            self._scheduler.remove_finished()

    def _decode(self) -> None:
        planned = self._runner.plan(*self._scheduler.plan())
        self._seconds.lap("scheduling")
        logits = self._runner.forward(planned)
        self._seconds.lap("forward")
        samples = self._sampler.sample(logits, planned.spans) if planned.spans else None
        self._seconds.lap("sampling")
        self._tables.recycle()
        for trajectory in self._scheduler.running:
            trajectory.engine_steps += 1
        self._counts.update(
            steps=1,
            tokens=len(planned.spans),
            kv_tokens_read=planned.attention.tokens_read,
            kv_tokens_attended=planned.attention.tokens_attended,
        )
        if samples is not None:
            self._take(planned.spans, samples)
        self._stream(self._scheduler.running)
        self._scheduler.remove_finished()

    def _take(self, spans: list[Span], samples: Samples) -> None:
        """Take one sampled token into each span's record."""
        special = self._special
        for span, drawn in zip(spans, samples.rows(), strict=True):
            trajectory = span.owner
            if trajectory.finished:
                continue
            if drawn.token not in special:
                span.add(drawn)
                trajectory.ledger.spend()
                if span.seen is not None:
                    span.seen[drawn.token] = True
                if not span.is_branch:
                    self._check_trunk_limits(trajectory)
            elif span.is_branch:
                self._special_in_branch(span, drawn)
            else:
                self._special_in_trunk(span, drawn)
        self._go_on_with_blocks(span.owner for span in spans if span.is_branch)

    def _special_in_branch(self, span: Span, drawn: Drawn) -> None:
        """A branch ends at its `</step>` or EOS; any other tag ends the trajectory when all have taken their tokens."""
        if drawn.token == self._cues.step_end:
            span.add(drawn)
            end_branch(span, BranchStop.CLOSED, self._cues)
        elif drawn.token in self._eos:
            end_branch(span, BranchStop.EOS, self._cues)
        else:
            span.add(drawn)
            span.owner.ledger.spend()
            end_branch(span, BranchStop.TAG, self._cues)

    def _special_in_trunk(self, span: Span, drawn: Drawn) -> None:
        trajectory = span.owner
        span.add(drawn)
        trajectory.ledger.spend()
        if drawn.token in self._eos:
            self._end_of_text(trajectory)
        elif trajectory.grammar is not None and self._tags is not None:
            verdict = trajectory.grammar.take(self._tags.tag_of[drawn.token], len(span.tokens) - 1)
            self._trunk_tag(trajectory, verdict)
        if not trajectory.finished and trajectory.open_block is None:
            self._check_trunk_limits(trajectory)

    def _end_of_text(self, trajectory: Trajectory) -> None:
        if trajectory.grammar is None or trajectory.grammar.state is State.PROSE:
            self._finish(trajectory, Outcome.COMPLETED)
        else:
            self._finish(
                trajectory,
                Outcome.MALFORMED,
                f"The text ends inside a block ({trajectory.grammar.state.value}).",
                reason=MalformedReason.UNEXPECTED_TAG,
            )

    def _trunk_tag(self, trajectory: Trajectory, verdict: TagVerdict) -> None:
        if verdict is TagVerdict.GUIDELINE_CLOSED:
            self._fork_or_refuse(trajectory)
        elif verdict is TagVerdict.UNEXPECTED:
            message = "A structural tag stands where the grammar has none."
            self._finish(trajectory, Outcome.MALFORMED, message, reason=MalformedReason.UNEXPECTED_TAG)
        elif verdict is TagVerdict.IN_STEP:
            message = "A structural tag stands in a serialized step."
            self._finish(trajectory, Outcome.MALFORMED, message, reason=MalformedReason.TAG_IN_STEP)
        elif verdict is TagVerdict.STEP_OPENED:
            trajectory.trunk.seen = self._new_body(trajectory)
        elif verdict is TagVerdict.STEP_CLOSED:
            trajectory.trunk.seen = None

    def _fork_or_refuse(self, trajectory: Trajectory) -> None:
        assert trajectory.grammar is not None
        if trajectory.ledger.trunk_limit(trajectory.critical) is not LimitKind.NONE:
            return  # truncated right here, which is no refusal
        reason = self._validator.refusal(trajectory)
        if reason is MalformedReason.NONE:
            self._counts["forks"] += 1
            block = fork(trajectory, trajectory.grammar.plans, self._cues)
            for branch in block.branches:
                branch.seen = self._new_body(trajectory)
            self._go_on_with_blocks([trajectory])
            return
        self._refusals[reason] += 1
        if trajectory.request.fork_refusal is ForkRefusal.REJECT:
            self._finish(trajectory, Outcome.MALFORMED, "The fork was refused.", reason=reason)
        else:
            trajectory.serialized_blocks += 1
            trajectory.serialized_reason = reason

    def _go_on_with_blocks(self, trajectories: Iterable[Trajectory]) -> None:
        """Once all branches have taken their tokens, in whatever order: end, close or join what has come to its end."""
        for trajectory in dict.fromkeys(trajectories):
            block = trajectory.open_block
            if trajectory.finished or block is None:
                continue
            if any(branch.stop is BranchStop.TAG for branch in block.branches):
                message = "A structural tag stands in a step."
                self._finish(trajectory, Outcome.MALFORMED, message, reason=MalformedReason.TAG_IN_STEP)
                continue
            self._truncate_at(trajectory, enforce_budgets(trajectory, block, self._cues))
            if not trajectory.finished and block.closed:
                join(trajectory, self._cues)
                self._counts["joins"] += 1
                self._check_trunk_limits(trajectory)

    def _check_trunk_limits(self, trajectory: Trajectory) -> None:
        self._truncate_at(trajectory, trajectory.ledger.trunk_limit(trajectory.critical))

    def _truncate_at(self, trajectory: Trajectory, limit: LimitKind) -> None:
        """End a trajectory at the limit that it has reached, if it has reached one."""
        if limit is not LimitKind.NONE:
            self._finish(trajectory, Outcome.TRUNCATED, f"It reached its limit: {limit.name.lower()}.", limit=limit)

    def _new_body(self, trajectory: Trajectory) -> Any:
        """What a step's body has said so far: nothing. None when no penalty is on."""
        if trajectory.request.sampling.repetition_penalty == 1.0:
            return None
        return self._pool.keys[0].new_zeros(self._vocab_size, dtype=torch.bool)

    def _finish(
        self,
        trajectory: Trajectory,
        outcome: Outcome,
        message: str = "",
        *,
        reason: MalformedReason = MalformedReason.NONE,
        limit: LimitKind = LimitKind.NONE,
    ) -> None:
        """End a trajectory: close what is open, give back every page, tell its client."""
        if trajectory.open_block is not None:
            end_open_branches(trajectory, BranchStop.ABORTED, self._cues)
        self._feeder.release(trajectory)
        trajectory.finished = True
        del self._live[trajectory.request.request_id]
        self._stream([trajectory])
        result = make_result(
            trajectory, self.policy_version, outcome=outcome, reason=reason, limit=limit, message=message
        )
        self._events.append(FinishedEvent(result))

    def _stream(self, trajectories: Iterable[Trajectory]) -> None:
        """Tell clients that asked for it what is new."""
        for trajectory in trajectories:
            if trajectory.request.stream:
                self._events.extend(_news(trajectory))


def _news(trajectory: Trajectory) -> Iterable[TokensEvent]:
    for span in trajectory.spans():
        begin = max(span.streamed, span.prompt_length)
        if begin < len(span.tokens):
            span.streamed = len(span.tokens)
            told = slice(begin - span.prompt_length, None)
            yield TokensEvent(
                trajectory.request.request_id,
                span.block,
                span.branch,
                span.start + begin,
                tuple(span.tokens[begin:]),
                tuple(span.log_probs[told]),
                tuple(span.forced[told]),
                tuple(span.raw_log_probs[told]),
            )


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """All ids that end a text, by the model's generation settings and by the tokenizer."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in [*ids, tokenizer.eos_token_id] if token is not None)
