"""Policies that could not be served here, and when to try them again.

Invariants:
- What is shunned is asked for again after a while, and a longer while each time: a store is repaired now and then.
- Work for other policies does not wait behind work for a shunned one: the buffer is told to pass it over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from npr.types.v1 import policy_pb2
from npr_common.errors import DataLossError, FailedPreconditionError, InvalidArgumentError, NotFoundError, NprError

_FIRST_SECONDS = 4.0
_MOST_SECONDS = 300.0
_MOST_POLICIES = 256
_PASSING = ("SWAP_UNDER_WAY", "ENGINE_DOWN")


def is_lasting(error: NprError) -> bool:
    """Whether a policy that failed so would fail again if it were asked for at once."""
    if isinstance(error, FailedPreconditionError):
        return error.reason not in _PASSING
    return isinstance(error, NotFoundError | DataLossError | InvalidArgumentError)


@dataclass(slots=True)
class _Shunned:
    ref: policy_pb2.PolicyRef
    seconds: float
    until: float


class ShunnedPolicies:
    """See the module's docstring. An empty reference stands for work that names no policy."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shunned: dict[tuple[str, int], _Shunned] = {}

    def shun(self, ref: policy_pb2.PolicyRef) -> None:
        """Pass over a policy for a while, twice as long as the last time."""
        earlier = self._shunned.pop(_key(ref), None)
        seconds = min(_MOST_SECONDS, 2 * earlier.seconds) if earlier is not None else _FIRST_SECONDS
        self._shunned[_key(ref)] = _Shunned(ref, seconds, self._clock() + seconds)
        while len(self._shunned) > _MOST_POLICIES:
            del self._shunned[next(iter(self._shunned))]

    def forgive(self, ref: policy_pb2.PolicyRef) -> None:
        """It is served: forget that it ever failed."""
        self._shunned.pop(_key(ref), None)

    def now(self) -> list[policy_pb2.PolicyRef]:
        """Policies to pass over now."""
        now = self._clock()
        return [shunned.ref for shunned in self._shunned.values() if now < shunned.until]


def _key(ref: policy_pb2.PolicyRef) -> tuple[str, int]:
    return ref.line, ref.version
