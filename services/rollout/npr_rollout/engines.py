"""The engine that serves, the one before it that still finishes its requests, and the swap between them.

Invariants:
- One thread calls it. Policies change between two steps only.
- At most one swap is under way and at most one old engine finishes; meanwhile another swap is refused.
- New requests go to the engine that serves. While a swap drains it they are held, and go to the next one.
- A fault ends the requests of the engine that had it, and of no other. The serving engine is then made again from the
  policy in memory; one that fails again before it has made progress stays down until another policy is served.
- Memory is freed before more of it is taken: no engine that was given up is referenced while the next one is built,
  not even by a traceback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from npr.types.v1 import policy_pb2
from npr_common.errors import FailedPreconditionError, InternalError, NprError, UnavailableError
from npr_rollout.serving import Serving, Submission
from npr_rollout.status import EngineStatus
from npr_rollout.swap import Build, InFlight, Swap, Swapped

log = logging.getLogger(__name__)

PROGRESS_STEPS = 32
"""An engine that was made again after a fault has to decode so many steps to be worth it once more."""

_ASLEEP = "The engine sleeps, and has given back its memory; serve a policy (ServePolicy) to wake it."
_NOTHING_SERVED = "No policy is served: name one with `npr serve-policy RUN`, or submit a job that names one."


class Engines:
    """See the module's docstring.

    Attributes:
        recoveries: how often the serving engine was made again after a fault.
    """

    def __init__(self, report_health: Callable[[bool], None]) -> None:
        """`report_health` is called with False when the engine is down, with True when one serves again."""
        self.recoveries = 0
        self._report_health = report_health
        self._current: Serving | None = None
        self._build: Build | None = None  # how the current one is made again
        self._is_recovered = False
        self._is_down = False
        self._old: Serving | None = None
        self._swap: Swap | None = None
        self._held: list[Submission] = []
        self._past = EngineStatus.zero()
        self._obstacle: NprError = FailedPreconditionError(_NOTHING_SERVED)  # why nothing is served, if nothing is
        self._stopped = False

    # --- what is there; other threads may ask ---

    @property
    def policy(self) -> policy_pb2.PolicyRef | None:
        """What new requests are decoded with."""
        current = self._current
        return current.policy.ref if current is not None else None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of what new requests are decoded with; None when nothing is served."""
        current = self._current
        return current.policy.tokenizer if current is not None else None

    @property
    def in_flight(self) -> int:
        """Requests on their way."""
        return len(self._held) + sum(serving.in_flight for serving in self._live())

    # --- commands, between two steps ---

    @property
    def busy(self) -> bool:
        """Whether `advance` has something to do."""
        decodes = self._current is not None and not self._current.idle
        return decodes or self._swap is not None or self._old is not None

    def submit(self, submission: Submission) -> None:
        """Give a request to the engine that serves, or hold it while that is being changed."""
        if self._swap is not None:
            self._held.append(submission)
        elif self._current is None:
            submission.reject(self._obstacle)
        else:
            self._current.submit(submission)

    def withdraw(self, submission: Submission) -> None:
        """End a request that nobody waits for any more, wherever it is."""
        if submission in self._held:
            self._held.remove(submission)
        if submission.place is not None:
            serving, name = submission.place
            serving.withdraw(name)

    def check_can_swap(self) -> None:
        """Raises FailedPreconditionError while another swap is under way or an old engine still finishes."""
        if self._stopped:
            raise self._obstacle
        if self._swap is not None:
            raise FailedPreconditionError("Another policy is being loaded; wait for it.", reason="SWAP_UNDER_WAY")
        if self._old is not None:
            raise FailedPreconditionError(
                f"Policy version {self._old.policy.ref.version} still finishes {self._old.in_flight} requests beside "
                "the one that serves; wait for them.",
                reason="SWAP_UNDER_WAY",
            )

    def request_swap(self, swap: Swap) -> None:
        """Serve another policy, at the next `advance` where that is possible."""
        try:
            self.check_can_swap()
        except NprError as error:
            if swap.done.set_running_or_notify_cancel():
                swap.done.set_exception(error)
        else:
            self._swap = swap

    def stop(self) -> None:
        """Tell all who wait that nothing will come, and serve nothing any more."""
        self._stopped = True
        self._obstacle = UnavailableError("The rollout worker is stopping; try again elsewhere.")
        for serving in self._live():
            serving.fail(self._obstacle)
        self._current = self._old = None
        swap, self._swap = self._swap, None
        if swap is not None and swap.done.set_running_or_notify_cancel():
            swap.done.set_exception(self._obstacle)
        self._release_held()

    def status(self, *, audit: bool) -> tuple[EngineStatus, tuple[str, ...]]:
        """Counts since the beginning and the state of all engines, and the audit's problems when asked for."""
        now, problems = EngineStatus.zero(), []
        for serving in self._live():
            now = _together(now, serving.engine.status())
            if audit:
                version = serving.policy.ref.version
                problems += [f"Policy version {version}: {problem}" for problem in serving.engine.audit()]
        return self._past.plus(now), tuple(problems)

    def advance(self) -> None:
        """One turn: a swap that is due, then a step of each engine."""
        if self._swap is not None:
            self._swap_if_due(self._swap)
        if self._current is not None and not self._current.idle:
            self._step_current()
        if self._old is not None:
            self._step_old()

    # --- swapping ---

    def _swap_if_due(self, swap: Swap) -> None:
        drains = swap.in_flight is InFlight.DRAIN and self._current is not None and not self._current.idle
        if drains and not swap.done.cancelled():
            return
        if swap.done.set_running_or_notify_cancel():
            previous, aborted = self.policy, self._abort_current() if swap.in_flight is InFlight.ABORT else 0
            failure = self._exchange(swap)
            if failure is not None:
                swap.done.set_exception(failure)
            else:
                swap.done.set_result(Swapped(previous, aborted))
        self._swap = None
        self._release_held()

    def _abort_current(self) -> int:
        if self._current is None:
            return 0
        try:
            return self._current.abort_all("Another policy is served from now on; ask again.")
        except Exception as error:  # noqa: BLE001 - the engine is given up anyway
            count = self._current.in_flight
            self._current.fail(_fault(error))
            return count

    def _exchange(self, swap: Swap) -> NprError | None:
        """Put the next engine in the place of the current one; what went wrong, if so: then nothing has changed."""
        if swap.build is None:
            self._retire_current()
            self._obstacle = UnavailableError(_ASLEEP)
            return None
        if swap.in_flight is InFlight.FINISH_ON_OLD and self._current is not None and not self._current.idle:
            current = self._current
            failure = self._start(swap.build)
            if failure is None:
                self._old = current
            return failure
        build, served = self._build, self._current is not None
        self._retire_current()
        failure = self._start(swap.build)
        if failure is not None and build is not None and served:
            log.error("the next policy can't be served, the one before it is: %s", failure.message)
            self._start_or_stay_down(build)
        return failure

    def _start(self, build: Build) -> NprError | None:
        """Serve what `build` makes; or what went wrong."""
        try:
            self._current = build()
        except Exception as error:
            log.warning("an engine could not be made", exc_info=error)
            message = f"The engine can't serve this policy: {type(error).__name__}: {error}"
            failure = error if isinstance(error, NprError) else FailedPreconditionError(message)
            failure.__traceback__ = None  # it holds what was built so far
            return failure
        self._build = build
        self._is_recovered = False
        if self._is_down:
            self._is_down = False
            self._report_health(True)
        return None

    def _start_or_stay_down(self, build: Build) -> bool:
        failure = self._start(build)
        if failure is not None:
            self._stay_down(failure.message)
        return failure is None

    def _retire_current(self) -> None:
        if self._current is not None:
            self._past = self._past.plus(self._current.engine.status())
        self._current = self._build = None

    def _release_held(self) -> None:
        held, self._held = self._held, []
        for submission in held:
            self.submit(submission)

    # --- stepping, and faults; no name may hold an engine that is given up ---

    def _step_current(self) -> None:
        assert self._current is not None
        try:
            self._current.step()
        except Exception as error:
            log.critical("the engine failed", exc_info=error)
            fault = _fault(error)
        else:
            return
        self._current.fail(fault)
        self._recover(fault)

    def _recover(self, fault: NprError) -> None:
        """Make the current engine again, unless that was done just now."""
        assert self._current is not None
        build = self._build
        hopeless = self._is_recovered and self._current.engine.status().steps < PROGRESS_STEPS
        self._retire_current()
        if hopeless or build is None:
            self._stay_down(fault.message)
        elif self._start_or_stay_down(build):
            self._is_recovered = True
            self.recoveries += 1
            log.warning("the engine was made again from the policy in memory")

    def _stay_down(self, why: str) -> None:
        log.critical("no policy is served until one is loaded again: %s", why)
        self._obstacle = FailedPreconditionError(f"No policy is served: {why} Serve one again.", reason="ENGINE_DOWN")
        self._is_down = True
        self._report_health(False)

    def _step_old(self) -> None:
        assert self._old is not None
        try:
            self._old.step()
        except Exception as error:
            log.critical("the old engine failed; only its requests end", exc_info=error)
            self._old.fail(_fault(error))
            self._retire_old()
        else:
            if self._old.idle:
                self._retire_old()

    def _retire_old(self) -> None:
        assert self._old is not None
        self._past = self._past.plus(self._old.engine.status())
        log.info("policy version %d is done with its requests and leaves memory", self._old.policy.ref.version)
        self._old = None

    def _live(self) -> Iterator[Serving]:
        return (serving for serving in (self._current, self._old) if serving is not None)


def _fault(error: Exception) -> InternalError:
    return InternalError(f"The engine failed: {type(error).__name__}: {error}", reason="ENGINE_FAILED")


def _together(one: EngineStatus, other: EngineStatus) -> EngineStatus:
    """The sum of two engines that run at the same time."""
    state = ("running", "waiting", "pages_total", "pages_used", "pages_cached")
    counts = one.plus(other)
    values = {field.name: getattr(counts, field.name) for field in fields(counts)}
    return EngineStatus(**{**values, **{name: getattr(one, name) + getattr(other, name) for name in state}})
