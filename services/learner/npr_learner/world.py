"""The processes that train one policy together.

Invariants:
- Every process of a world calls the same collectives in the same order; what differs between them is data.
- What is reduced here is small and lies on the CPU: it goes through gloo, whatever carries the gradients.
- Nobody is waited for without end. Whoever waits too long says who has not come, and where that one was seen last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from npr_common.errors import InternalError, NprError, UnavailableError

T = TypeVar("T")

log = logging.getLogger(__name__)

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True)
class World:
    """This process among `size` of them.

    Attributes:
        rank: of this process, from 0.
        device: where it computes.
        mesh: over which weights are sharded; None for one process alone.
        background: a group of all processes for what goes on beside training, on the CPU; None for one process alone.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    roll: Roll | None = None
    background: Any = None

    @classmethod
    def alone(cls, device: torch.device) -> World:
        """One process that computes by itself."""
        return cls(0, 1, device)

    @classmethod
    def join(cls, store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> World:
        """Joins `size` processes that meet at `store`; returns once all are there.

        Args:
            store: a `torch.distributed.TCPStore`, the same one for all.
            timeout: how long any process is waited for, here and in every collective.

        Raises:
            UnavailableError: not all came; it names those that did not.
        """
        roll = Roll(store, rank, size, timeout)
        roll.enter("the start")
        try:
            dist.init_process_group(
                _BACKENDS[device.type],
                store=store,
                rank=rank,
                world_size=size,
                timeout=timeout,
                device_id=_indexed(device),
            )
            mesh = init_device_mesh(device.type, (size,))
            background = dist.new_group(backend="gloo", timeout=timeout)
        except (RuntimeError, dist.DistError) as error:
            raise roll.explained(error) from error
        return cls(rank, size, device, mesh, roll, background)

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def meet(self, place: str) -> None:
        """Returns once all have come here. Raises UnavailableError naming those that have not."""
        self.sum({}, place)

    def sum(self, values: Mapping[str, float], place: str) -> dict[str, float]:
        """The sum of each value over all processes; every one gives the same names.

        Raises:
            UnavailableError: not all have come here in time; it names those that have not.
        """
        return self._reduced(values, dist.ReduceOp.SUM, place)

    def largest(self, values: Mapping[str, float], place: str) -> dict[str, float]:
        """The largest of each value over all processes. Raises as `sum` does."""
        return self._reduced(values, dist.ReduceOp.MAX, place)

    def on_first(self, function: Callable[[], T], place: str) -> T:
        """What the function returns on the first process, which alone runs it; what it raises, every one raises.

        Both must be picklable. Raises UnavailableError as `sum` does.
        """
        if self.roll is None:
            return function()
        outcome: list[Any] = [_outcome(function) if self.is_first else None]
        self._collective(lambda: dist.broadcast_object_list(outcome, src=0, device=torch.device("cpu")), place)
        told: _Outcome[T] = outcome[0]
        return told.value()

    def together(self, function: Callable[[], T], place: str) -> list[T]:
        """What the function returns on each process; what it raises on any, every one raises.

        Both must be picklable. Raises UnavailableError as `sum` does.
        """
        if self.roll is None:
            return [function()]
        own = _outcome(function)
        outcomes: list[Any] = [None] * self.size
        self._collective(lambda: dist.all_gather_object(outcomes, own, group=self.background), place)
        return [outcome.value() for outcome in outcomes]

    def _reduced(self, values: Mapping[str, float], operation: Any, place: str) -> dict[str, float]:
        if self.roll is None:
            return dict(values)
        names = sorted(values)
        reduced = torch.tensor([*(values[name] for name in names), 0.0], dtype=torch.float64)
        self._collective(lambda: dist.all_reduce(reduced, op=operation), place)
        return dict(zip(names, reduced[:-1].tolist(), strict=True))

    def _collective(self, call: Callable[[], Any], place: str) -> None:
        assert self.roll is not None
        self.roll.enter(place)
        try:
            call()
        except (RuntimeError, dist.DistError) as error:
            raise self.roll.explained(error) from error

    def explained(self, error: Exception) -> Exception:
        """A collective's failure as an error that names who is late; any other error as it is."""
        return self.roll.explained(error) if self.roll is not None and _is_of_a_collective(error) else error


@dataclass(frozen=True)
class Roll:
    """Where each process was seen last, in the store that they met at."""

    store: Any
    rank: int
    size: int
    timeout: timedelta

    def enter(self, place: str) -> None:
        """Says that this process has come to `place`, such as `micro-batch 3 of 9`."""
        steps = self.store.add(f"npr/steps/{self.rank}", 1)
        self.store.set(f"npr/place/{self.rank}", f"{steps} {place}")

    def explained(self, error: Exception) -> UnavailableError:
        """Who has not gone further than this process, and where each was seen last."""
        steps, place = self._seen(self.rank)
        late = [f"rank {rank} is at {where}" for rank, (count, where) in self._others() if count <= steps]
        who = "; ".join(late) or "all others are further"
        return UnavailableError(
            f"the learner's rank {self.rank} waited {self.timeout.total_seconds():.0f} s at {place}: {who} "
            f"({str(error).splitlines()[0]})",
            reason="RANK_NOT_THERE",
        )

    def _others(self) -> list[tuple[int, tuple[int, str]]]:
        return [(rank, self._seen(rank)) for rank in range(self.size) if rank != self.rank]

    def _seen(self, rank: int) -> tuple[int, str]:
        """How many places it has come to, and the last of them."""
        key = f"npr/place/{rank}"
        if not self.store.check([key]):
            return 0, "nowhere yet"
        steps, _, place = self.store.get(key).decode().partition(" ")
        return int(steps), place


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    """What a function has returned, or raised, to be told to others."""

    returned: T | None
    raised: NprError | None

    def value(self) -> T:
        if self.raised is not None:
            raise self.raised
        return self.returned  # type: ignore[return-value]  # T itself may be None


def _outcome(function: Callable[[], T]) -> _Outcome[T]:
    try:
        return _Outcome(function(), None)
    except NprError as error:
        return _Outcome(None, error)
    except Exception as error:
        log.exception("what the other processes wait for has failed")
        return _Outcome(None, InternalError(f"{type(error).__name__}: {error}"))  # any other may not be told whole


def _is_of_a_collective(error: Exception) -> bool:
    """NCCL has types of its own; gloo's errors are told by where they come from."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _indexed(device: torch.device) -> torch.device | None:
    return device if device.type == "cuda" and device.index is not None else None
