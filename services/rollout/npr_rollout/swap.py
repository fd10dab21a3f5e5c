"""A swap of policies: what is asked, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

from npr.types.v1 import policy_pb2
from npr_rollout.serving import Serving

Build = Callable[[], Serving]


class InFlight(Enum):
    """What becomes of what is being decoded; the numbers are the contract's."""

    DRAIN = 1
    ABORT = 2
    FINISH_ON_OLD = 3


@dataclass(frozen=True)
class Swapped:
    """A swap that is done.

    Attributes:
        previous: what was served before; None when nothing was.
        aborted: requests that the swap ended.
    """

    previous: policy_pb2.PolicyRef | None
    aborted: int


@dataclass(frozen=True, eq=False)
class Swap:
    """A swap under way.

    Attributes:
        build: makes what shall be served; None where nothing shall be, until the next swap.
        done: can be cancelled until `build` is called.
    """

    build: Build | None
    in_flight: InFlight
    done: Future[Swapped]
