"""The engine on an SGLang server: the same records, decoded by streams of the server.

The life of a request: `submit` checks it and puts it in line; it is admitted when there is room, and becomes a journey,
which asks the server for streams; each `step` takes what has arrived into the records, which fork, join and end by the
rules of `record`, and asks for what they want next.

Invariants:
- One thread calls it. The streams run in a thread of their own (`transport.py`), which touches no record.
- After `step` returns, every stream that the records want is under way, and no other one is wanted.
- The server's pool is shared out before it is used: trajectories are admitted while what they hold and are expected to
  add fits. One whose branches have been evicted again and again gets the server to itself, so it comes to its end.
"""

from __future__ import annotations

import logging
import math
import queue
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from npr_common.dialects import Dialect
from npr_common.errors import UnavailableError
from npr_common.tags import Role, TagIds
from npr_rollout.record.admission import check_request
from npr_rollout.record.growth import Growth
from npr_rollout.record.live import LiveTrajectories
from npr_rollout.record.outcomes import Outcome
from npr_rollout.record.request import Event, Request
from npr_rollout.record.script import Script
from npr_rollout.record.trajectory import Trajectory
from npr_rollout.record.validation import ForkValidator, fork_validator
from npr_rollout.record.waiting_line import WaitingLine
from npr_rollout.sglang.client import SglangClient
from npr_rollout.sglang.journey import Journey, StopIds
from npr_rollout.sglang.limits import Expectations, ServerLimits
from npr_rollout.sglang.transport import Transport
from npr_rollout.sglang.wire import Ended, Tokens
from npr_rollout.status import EngineStatus
from npr_sglang.contract import STATE_KEY

log = logging.getLogger(__name__)

_PATIENCE = 2  # evictions of a trajectory's context, after which it gets the server to itself
_STEP_SECONDS = 0.01
_INFO_SECONDS = 2.0  # a busy server answers between two of its steps; records wait meanwhile
_TOLD_SECONDS = 0.2  # the instruments of one collection, a status and its audit ask once


class _SaidCount:
    """How many tokens a step's body has said: they are the last ones of its span, and the server knows which."""

    def __init__(self) -> None:
        self._count = 0

    def __setitem__(self, token: int, said: bool) -> None:
        self._count += 1

    def __len__(self) -> int:
        return self._count


class SglangEngine:
    """Decodes requests with what a server serves. See the module's docstring."""

    def __init__(
        self,
        transport: Transport,
        tokenizer: Any,
        dialect: Dialect,
        limits: ServerLimits,
        *,
        eos: frozenset[int],
        policy_version: int = 0,
        scripts: Mapping[str, Script] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Decode with the policy that the server serves.

        Args:
            tokenizer: the policy's. Without single-token tags (before stage 2) nothing ever forks.
            eos: ids that end a text.
            scripts: what requests are to say, by their ids, where that is given (tests and benchmarks).
            clock: what deadlines are compared with, in seconds.
        """
        self.limits = limits
        self.policy_version = policy_version
        self._transport = transport
        self._scripts = scripts or {}
        self._validator = fork_validator(tokenizer, dialect, limits.can_ever_pay)
        cues = self._validator.cues if self._validator is not None else None
        self._journeys: dict[str, Journey] = {}
        self._by_name: dict[str, Journey] = {}
        self._live = LiveTrajectories(dialect, cues, policy_version, clock, _Release(self._journeys, transport))
        self._growth = Growth(self._live, eos, self._validator, _SaidCount)
        self._stops = _stop_ids(self._validator, eos)
        self._waiting = WaitingLine()
        self._expectations = Expectations(limits)
        self._alone: Journey | None = None
        self._counts: Counter[str] = Counter()
        self._last_told: Mapping[str, float] = {}
        self._told_at = -math.inf

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
        check_request(request, self.limits.context, self.limits.vocab_size)
        trajectory = self._live.accept(request, self.limits.resolve)
        if trajectory is not None:
            self._waiting.add(trajectory)
        return request.request_id

    def step(self) -> list[Event]:
        """Take what has arrived, and ask for what is wanted next. Waits a moment when nothing has arrived."""
        self._live.expire()
        self._take(self._arrivals())
        self._forget_finished()
        self._admit()
        for journey in self._journeys.values():
            self._go_on(journey)
        return self._live.take_events()

    def abort(self, request_id: str, message: str = "The client left.") -> bool:
        """End a request with all its branches, at any moment; whether it was on its way. `message` says why."""
        was_on_its_way = self._live.abort(request_id, message)
        self._forget_finished()
        return was_on_its_way

    def status(self) -> EngineStatus:
        """What the engine is doing. A page is a token's keys and values here, a step one that has brought tokens."""
        told = self._told()
        return replace(
            EngineStatus.zero(),
            running=len(self._journeys),
            waiting=len(self._waiting),
            pages_total=self.limits.pool_tokens,
            pages_used=int(told.get("held_tokens", 0)),
            pages_cached=int(told.get("cached_tokens", 0)),
            steps=self._counts["steps"],
            tokens=self._counts["tokens"],
            forks=self._growth.forks,
            joins=self._growth.joins,
            preemptions=self._counts["preemptions"],
            evictions=self._counts["evictions"],
            input_tokens=self._counts["input_tokens"],
            cached_input_tokens=self._counts["cached_input_tokens"],
            fork_refusals=dict(self._growth.refusals),
            joins_by_text=not self.limits.native,
            server=told,
        )

    def audit(self) -> tuple[str, ...]:
        """What the server holds though nothing runs, each a sentence; nothing can be said while something does."""
        told = self._told()
        if self._live or "pins" not in told or told["running"] or told["waiting"]:
            return ()
        lost = told["pool_tokens"] - told["free_tokens"] - told["cached_tokens"]
        problems = {
            "holds {} contexts though nothing runs": told["pins"],
            "holds {} cached tokens though nothing runs": told["held_tokens"],
            "has lost {} slots of its pool": lost,
        }
        return tuple(f"The server {text.format(int(count))}." for text, count in problems.items() if count)

    # --- one step ---

    def _arrivals(self) -> list[Tokens | Ended]:
        """All that has arrived; waits a moment for the first."""
        found: list[Tokens | Ended] = []
        try:
            if self._journeys:
                found.append(self._transport.arrivals.get(timeout=_STEP_SECONDS))
            while True:
                found.append(self._transport.arrivals.get_nowait())
        except queue.Empty:
            return found

    def _take(self, arrivals: list[Tokens | Ended]) -> None:
        touched: dict[Journey, None] = {}
        for arrival in arrivals:
            journey = self._by_name.get(arrival.name.partition(".")[0])
            if journey is None or journey.trajectory.finished:
                continue
            touched[journey] = None
            if isinstance(arrival, Tokens):
                self._counts["tokens"] += len(arrival.drawn)
                self._counts["input_tokens"] += arrival.input_tokens
                self._counts["cached_input_tokens"] += arrival.cached_tokens
                journey.tokens(arrival.name, arrival.drawn)
            elif obstacle := journey.ended(arrival):
                self._live.finish(journey.trajectory, Outcome.ABORTED, obstacle)
        self._counts["steps"] += any(isinstance(arrival, Tokens) for arrival in arrivals)
        for journey in touched:
            journey.grow(self._growth)
        self._live.stream(journey.trajectory for journey in touched if not journey.trajectory.finished)

    def _admit(self) -> None:
        """Let in who fits beside those who run; somebody always may."""
        jobs = Counter(journey.trajectory.request.job for journey in self._journeys.values())
        while self._alone is None and (trajectory := self._waiting.next(jobs)) is not None:
            running = [journey.trajectory for journey in self._journeys.values()]
            if running and not self._expectations.has_room(running, trajectory):
                return
            self._waiting.pop(trajectory)
            jobs[trajectory.request.job] += 1
            self._start(trajectory)

    def _start(self, trajectory: Trajectory) -> None:
        trajectory.started_at = time.time()
        name = uuid.uuid4().hex
        request_id = trajectory.request.request_id
        script = self._scripts.get(request_id)
        journey = Journey(trajectory, name, self._stops, native=self.limits.native, script=script)
        self._journeys[request_id] = self._by_name[name] = journey

    def _go_on(self, journey: Journey) -> None:
        """Tell the server what is not wanted any more, and ask for what is."""
        self._transport.abort(journey.unwanted())
        if self._alone is None and journey.evictions > _PATIENCE:
            self._alone = journey
        if self._alone is journey or (self._alone is None and self._may_go_on(journey)):
            self._transport.begin(journey.wanted())

    def _may_go_on(self, journey: Journey) -> bool:
        """Whether there is room for a block that is about to begin; the oldest trajectory never waits."""
        oldest = next(iter(self._journeys.values()))
        if journey is oldest or journey.has_begun_its_block:
            return True
        others = [other.trajectory for other in self._journeys.values() if other is not journey]
        return self._expectations.has_room(others, journey.trajectory)

    def _forget_finished(self) -> None:
        for journey in [journey for journey in self._journeys.values() if journey.trajectory.finished]:
            self._expectations.learn(journey.trajectory)
            self._counts["preemptions"] += journey.trajectory.preemptions
            self._counts["evictions"] += journey.evictions
            del self._by_name[journey.name], self._journeys[journey.trajectory.request.request_id]
            if self._alone is journey:
                self._alone = None

    def _told(self) -> Mapping[str, float]:
        """The server's own counters: what it said last where it is busy, none where it is gone; a step tells that."""
        if time.monotonic() - self._told_at > _TOLD_SECONDS:
            try:
                self._last_told = self._transport.ask(_counters, _INFO_SECONDS)
            except UnavailableError:
                self._last_told = {}
            except TimeoutError:
                log.info("the server is too busy to tell its counters")
            self._told_at = time.monotonic()
        return self._last_told


class _Release:
    """Ends a trajectory's streams. It knows the journeys, not the engine, whose memory nothing is to hold."""

    def __init__(self, journeys: dict[str, Journey], transport: Transport) -> None:
        self._journeys = journeys
        self._transport = transport

    def __call__(self, trajectory: Trajectory) -> None:
        journey = self._journeys.get(trajectory.request.request_id)
        if journey is None:
            return  # it still waited
        trajectory.peak_pages = trajectory.length  # a page holds one token, and a record never shrinks
        self._transport.abort([stream.ask.name for stream in journey.streams if stream.ended is None])


async def _counters(client: SglangClient) -> dict[str, float]:
    """The plug-in's counters, and how many tokens/s the server has decoded when it decoded last."""
    told = await client.info()
    return {**told.get(STATE_KEY, {}), "tokens_per_second": float(told.get("last_gen_throughput") or 0.0)}


def _stop_ids(validator: ForkValidator | None, eos: frozenset[int]) -> StopIds:
    plain = tuple(sorted(eos))
    if validator is None:
        return StopIds(plain, plain, plain, plain)
    tags: TagIds = validator.tags
    fork = tags.close(Role.GUIDELINE)
    steps = (tags.open(Role.STEP), tags.close(Role.STEP))
    return StopIds((*plain, *tags), (*plain, fork), (*plain, fork, *steps), plain)
