"""One policy's engine, and those who wait for it.

Invariants:
- Each request gets its events from the engine that decodes it, up to its end or to that engine's fault; and none of
  another request that had its name.
- Nobody who was served still holds the engine: its memory goes with the last reference that is dropped here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from npr_common.errors import AlreadyExistsError, NprError
from npr_rollout.backend import DecodingEngine
from npr_rollout.policy_loader import LoadedPolicy
from npr_rollout.record.request import Event, FinishedEvent, Request

Sink = Callable[[Event | NprError], None]
MakeRequest = Callable[[LoadedPolicy], Request]


@dataclass(eq=False)
class Submission:
    """A request on its way to an engine.

    Attributes:
        make_request: makes it for the policy that will decode it.
        sink: takes its events, and the fault that ends them.
        accepted: set once an engine has it, or with the reason why none takes it.
        place: the engine that decodes it now, and its id there.
    """

    make_request: MakeRequest
    sink: Sink
    accepted: Future[None]
    place: tuple[Serving, str] | None = None

    def reject(self, error: Exception) -> None:
        """Tell that no engine takes it, unless the one who asked has left."""
        if self.accepted.running() or self.accepted.set_running_or_notify_cancel():
            self.accepted.set_exception(error)


class Serving:
    """A policy and the engine that serves it."""

    def __init__(self, policy: LoadedPolicy, engine: DecodingEngine) -> None:
        self.policy = policy
        self.engine = engine
        self._submissions: dict[str, Submission] = {}
        self._withdrawn: Counter[str] = Counter()  # whose end the engine has still to tell

    @property
    def in_flight(self) -> int:
        """Requests that have not got their last event."""
        return len(self._submissions)

    @property
    def idle(self) -> bool:
        """Whether nothing is decoded, and nobody waits for an event."""
        return self.engine.idle and not self._submissions

    def submit(self, submission: Submission) -> None:
        """Decode a request; what is wrong with it is told to the one who asked."""
        if not submission.accepted.set_running_or_notify_cancel():
            return
        try:
            request = submission.make_request(self.policy)
            self._check_is_new(request)
            self.engine.submit(request)
        except Exception as error:  # noqa: BLE001 - it is about this request alone
            submission.reject(error)
            return
        self._submissions[request.request_id] = submission
        submission.place = self, request.request_id
        submission.accepted.set_result(None)

    def _check_is_new(self, request: Request) -> None:
        if request.request_id in self._submissions:
            raise AlreadyExistsError(f"Request {request.request_id} is on its way already; use another id.")

    def withdraw(self, name: str) -> None:
        """End a request that nobody waits for any more."""
        self._submissions.pop(name).place = None
        self._withdrawn[name] += self.engine.abort(name)

    def step(self) -> None:
        """One step of the engine; its events are handed out. Raises whatever the engine raises."""
        for event in self.engine.step():
            ends = isinstance(event, FinishedEvent)
            name = event.result.request_id if isinstance(event, FinishedEvent) else event.request_id
            if self._withdrawn[name]:  # of a request that is gone; one of the same name may be on its way already
                self._withdrawn[name] -= ends
                continue
            submission = self._submissions.pop(name, None) if ends else self._submissions.get(name)
            if submission is not None:
                if ends:
                    submission.place = None
                submission.sink(event)
        self._withdrawn = +self._withdrawn

    def abort_all(self, message: str) -> int:
        """End all requests as ABORTED; how many that are."""
        aborted = sum([self.engine.abort(name, message) for name in self._submissions])
        self.step()  # hands out their results
        return aborted

    def fail(self, fault: NprError) -> None:
        """Tell all who wait of a fault; they wait no longer."""
        submissions, self._submissions = self._submissions, {}
        for submission in submissions.values():
            submission.place = None
            submission.sink(fault)
