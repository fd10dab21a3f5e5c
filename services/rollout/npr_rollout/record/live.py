"""The trajectories on their way, from submission to the one event that ends each of them.

Invariants:
- A trajectory ends once, in one typed outcome; what it holds is released before its client is told.
- Events come in the order in which things happened; a trajectory's last one is its end.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator

from npr_common.dialects import Dialect
from npr_common.errors import AlreadyExistsError
from npr_rollout.record.fork_join import Cues, end_open_branches
from npr_rollout.record.ledger import Ledger, ResolvedLimits
from npr_rollout.record.outcomes import BranchStop, LimitKind, MalformedReason, Outcome, Visibility
from npr_rollout.record.request import Event, FinishedEvent, Request, TokensEvent
from npr_rollout.record.results import make_result, refused
from npr_rollout.record.trajectory import Trajectory
from npr_rollout.record.trunk_grammar import TrunkGrammar
from npr_sampling import draw_key

Resolve = Callable[[Request], tuple[ResolvedLimits, str]]
"""A request's limits with defaults filled in, and why they can never be granted (empty when they can)."""


class LiveTrajectories:
    """See the module's docstring."""

    def __init__(
        self,
        dialect: Dialect,
        cues: Cues | None,
        policy_version: int,
        clock: Callable[[], float],
        release: Callable[[Trajectory], None],
    ) -> None:
        """Nothing is on its way.

        Args:
            cues: the forced tokens; None where nothing ever forks.
            clock: what deadlines are compared with, in seconds.
            release: called once for each trajectory that ends, before its client is told.
        """
        self._dialect = dialect
        self._cues = cues
        self._policy_version = policy_version
        self._clock = clock
        self._release = release
        self._live: dict[str, Trajectory] = {}
        self._arrivals = itertools.count()
        self._deadlines: list[tuple[float, int, Trajectory]] = []  # a heap
        self._events: list[Event] = []

    def __bool__(self) -> bool:
        return bool(self._live)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self._live.values())

    def accept(self, request: Request, resolve: Resolve) -> Trajectory | None:
        """The record of a request that is on its way from now on; None if it can never be, which its client is told.

        Raises:
            AlreadyExistsError: a request with this id is on its way.
        """
        if request.request_id in self._live:
            raise AlreadyExistsError(f"Request {request.request_id} is being decoded already; use another id.")
        limits, obstacle = resolve(request)
        if obstacle:
            self._events.append(FinishedEvent(refused(request, self._policy_version, obstacle)))
            return None
        return self._open(request, limits)

    def abort(self, request_id: str, message: str) -> bool:
        """End a request by its client's wish; whether it was on its way."""
        trajectory = self._live.get(request_id)
        if trajectory is not None:
            self.finish(trajectory, Outcome.ABORTED, message)
        return trajectory is not None

    def _open(self, request: Request, limits: ResolvedLimits) -> Trajectory:
        parallel = request.visibility is Visibility.PARALLEL and self._cues is not None
        trajectory = Trajectory(
            request,
            draw_key(request.sampling.seed, request.prompt_ids),
            next(self._arrivals),
            Ledger(limits),
            TrunkGrammar(self._dialect) if parallel else None,
        )
        self._live[request.request_id] = trajectory
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, trajectory.arrival, trajectory))
        return trajectory

    def expire(self) -> bool:
        """End the trajectories whose deadline has passed; whether there were any."""
        now, late = self._clock(), False
        while self._deadlines and (self._deadlines[0][2].finished or self._deadlines[0][0] <= now):
            trajectory = heapq.heappop(self._deadlines)[2]
            if not trajectory.finished:
                self.finish(trajectory, Outcome.DEADLINE, "The deadline passed.")
                late = True
        return late

    def finish(
        self,
        trajectory: Trajectory,
        outcome: Outcome,
        message: str = "",
        *,
        reason: MalformedReason = MalformedReason.NONE,
        limit: LimitKind = LimitKind.NONE,
    ) -> None:
        """End a trajectory: close what is open, give back what it holds, tell its client."""
        if trajectory.open_block is not None and self._cues is not None:
            end_open_branches(trajectory, BranchStop.ABORTED, self._cues)
        self._release(trajectory)
        trajectory.finished = True
        del self._live[trajectory.request.request_id]
        self.stream([trajectory])
        result = make_result(
            trajectory, self._policy_version, outcome=outcome, reason=reason, limit=limit, message=message
        )
        self._events.append(FinishedEvent(result))

    def stream(self, trajectories: Iterable[Trajectory]) -> None:
        """Tell clients that asked for it what is new."""
        for trajectory in trajectories:
            if trajectory.request.stream:
                self._events.extend(_news(trajectory))

    def take_events(self) -> list[Event]:
        """What has happened since the last call."""
        events, self._events = self._events, []
        return events


def _news(trajectory: Trajectory) -> Iterator[TokensEvent]:
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
