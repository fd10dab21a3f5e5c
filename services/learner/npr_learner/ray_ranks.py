"""A world of Ray actors, one a rank, on any number of machines.

Invariants:
- The actors are started with the first operation. Once one of them has ended, or has failed otherwise than the others,
  all are ended; the next operation starts new ones, which go on from the last durable step.
- Every actor is given the same operation. What they return is the first one's; what they raise is the first one's that
  is not merely the wait for another one.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import GetTimeoutError, RayError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from npr_common.errors import InternalError, NprError, UnavailableError
from npr_learner.ranks import Operation, Result, T, Update, caller_has_left, to_its_end, within_memory
from npr_learner.ray_head import LOCAL, RayHead
from npr_learner.stages import Stages
from npr_learner.world import World

_GRACE_SECONDS = 10.0
"""How long the other ranks may take to fail, once one has, before they are taken to wait for it."""


@dataclass(frozen=True)
class Workers:
    """The processes of a world.

    Attributes:
        count: how many.
        device: `cpu`, or `cuda` for a GPU each.
        ray_address: of the cluster, as `ray.init` takes it, or `LOCAL`.
        threads: CPU threads of one operation of a worker; None is torch's own choice.
        timeout: how long a worker waits for another one.
    """

    count: int
    device: str
    ray_address: str
    threads: int | None
    timeout: timedelta

    @property
    def needs(self) -> dict[str, float]:
        """Ray's resources of one of them."""
        return {"CPU": 1.0, "GPU": 1.0} if self.device == "cuda" else {"CPU": 1.0}


@dataclass(frozen=True)
class _Failed:
    """An operation has raised."""

    error: NprError


@dataclass(frozen=True)
class _Ended:
    """An actor is gone."""

    why: str


_Event = Update | Result[Any] | _Failed | _Ended
MakeStages = Callable[[World], Stages]


class Rank:
    """One process of the world; an actor with two threads, one of which can stop the other."""

    def __init__(self, rank: int, workers: Workers, make_stages: MakeStages) -> None:
        self._rank = rank
        self._workers = workers
        self._make_stages = make_stages
        self._stopped = threading.Event()
        if workers.threads is not None:
            torch.set_num_threads(workers.threads)

    def join(self, host: str, port: int) -> None:
        """Meets the others."""
        store = _store(host, port, self._workers.timeout, is_master=False)
        device = torch.device(self._workers.device)
        self._world = World.join(store, self._rank, self._workers.count, device, self._workers.timeout)
        self._stages = self._make_stages(self._world)

    def run(self, operation: Operation[Any]) -> Iterator[_Event]:
        """Updates of the first rank, and in the end a result or what was raised."""
        self._stopped.clear()
        events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        thread = threading.Thread(target=lambda: events.put(self._outcome(operation, events.put)), daemon=True)
        thread.start()
        event = events.get()
        while isinstance(event, Update):
            yield event
            event = events.get()
        thread.join()
        yield event

    def stop(self) -> None:
        """Asks the running operation to stop, at the same point as the other ranks."""
        self._stopped.set()

    def _outcome(self, operation: Operation[Any], tell: Callable[[_Event], None]) -> _Event:
        def observe(done: int, total: int, metrics: Mapping[str, float]) -> None:
            if self._world.sum({"stop": float(self._stopped.is_set())}, f"the end of {done} of {total}")["stop"]:
                raise caller_has_left()
            if self._world.is_first:
                tell(Update(done, total, metrics))

        try:
            value = within_memory(operation, self._stages, observe)
        except Exception as error:  # noqa: BLE001  # whatever it is, the others must not wait for it
            return _Failed(_typed(self._world.explained(error), self._rank))
        return Result(value if self._world.is_first else None)


def _store(host: str, port: int, timeout: timedelta, *, is_master: bool) -> Any:
    """The store at which all meet; port 0 lets the system choose."""
    library: Any = dist  # it exports its stores without saying so
    return library.TCPStore(host, port, is_master=is_master, wait_for_workers=False, timeout=timeout)


def _typed(error: Exception, rank: int) -> NprError:
    if isinstance(error, NprError):
        return error
    return InternalError(f"the learner's rank {rank} failed: {type(error).__name__}: {error}")


class RayRanks:
    """The actors of a world, from outside; see `Ranks`."""

    def __init__(self, workers: Workers, make_stages: MakeStages) -> None:
        self._workers = workers
        self._make_stages = make_stages
        self._group: _Group | None = None

    async def run(self, operation: Operation[T]) -> T:
        """See `Ranks`."""
        return await to_its_end(self._last_of(operation))

    async def stream(self, operation: Operation[T]) -> AsyncGenerator[Update | Result[T], None]:
        """See `Ranks`."""
        if self._group is None:
            self._group = await asyncio.to_thread(_Group.start, self._workers, self._make_stages)
        turn = _Turn(self._group, operation, self._workers.timeout)
        try:
            while True:
                event = await turn.next()
                yield event
                if isinstance(event, Result):
                    return
        finally:
            if not await turn.end():
                group, self._group = self._group, None
                await asyncio.to_thread(group.kill)

    async def close(self) -> None:
        """See `Ranks`."""
        if self._group is not None:
            await asyncio.to_thread(self._group.kill)
            self._group = None

    async def _last_of(self, operation: Operation[T]) -> T:
        async with aclosing(self.stream(operation)) as events:
            async for event in events:
                if isinstance(event, Result):
                    return event.value
        raise AssertionError("a stream ends with a result, or raises")


class _Turn:
    """One operation on all ranks."""

    def __init__(self, group: _Group, operation: Operation[Any], timeout: timedelta) -> None:
        self._events: asyncio.Queue[tuple[int, _Event]] = asyncio.Queue()
        self._group = group
        self._timeout = timeout
        shared = ray.put(operation)
        self._tasks = [
            asyncio.create_task(self._follow(rank, actor.run.options(num_returns="streaming").remote(shared)))
            for rank, actor in enumerate(group.actors)
        ]
        self._outcomes: dict[int, _Event] = {}
        self._given_up = False

    async def next(self) -> Update | Result[Any]:
        """The first rank's next event, once every rank is done where it is the result. Raises what a rank raised."""
        while (event := await self._take()) is not None:
            if isinstance(event, Update):
                return event
        return self._conclusion()

    async def end(self) -> bool:
        """Returns once no rank runs the operation any more: whether all ended it alike, and the ranks can go on."""
        if len(self._outcomes) < len(self._tasks):
            self._group.stop()
        while await self._take() is not None:
            pass
        for task in self._tasks:
            task.cancel()
        kinds = {type(event) for event in self._outcomes.values()}
        return len(self._outcomes) == len(self._tasks) and len(kinds) == 1 and _Ended not in kinds

    async def _take(self) -> _Event | None:
        """The next event of any rank; None when all are done, one has gone, or one has been waited for in vain."""
        if self._given_up or len(self._outcomes) == len(self._tasks):
            return None
        try:
            rank, event = await asyncio.wait_for(self._events.get(), self._patience)
        except TimeoutError:
            self._given_up = True
            return None
        if not isinstance(event, Update):
            self._outcomes[rank] = event
            self._given_up = isinstance(event, _Ended)
        return event

    @property
    def _patience(self) -> float | None:
        """Seconds to wait for the next event: until a rank is done, the ranks themselves see to it that none hangs."""
        if self._is_failing:
            return _GRACE_SECONDS
        return self._timeout.total_seconds() if self._outcomes else None

    @property
    def _is_failing(self) -> bool:
        return any(isinstance(event, _Failed | _Ended) for event in self._outcomes.values())

    def _conclusion(self) -> Result[Any]:
        for rank, event in self._outcomes.items():
            if isinstance(event, _Ended):
                raise UnavailableError(
                    f"the learner's rank {rank} has ended ({event.why}): new ones go on from the last durable step",
                    reason="RANK_ENDED",
                    retry_after_seconds=1.0,
                )
        failures = [event.error for _, event in sorted(self._outcomes.items()) if isinstance(event, _Failed)]
        if failures:
            raise next((error for error in failures if error.reason != "RANK_NOT_THERE"), failures[0])
        missing = sorted(set(range(len(self._tasks))) - set(self._outcomes))
        if missing:
            raise UnavailableError(
                f"the learner's rank {missing[0]} has not ended within {self._timeout.total_seconds():.0f} s what "
                "others have: new ones go on from the last durable step",
                reason="RANK_NOT_THERE",
                retry_after_seconds=1.0,
            )
        first = self._outcomes[0]
        assert isinstance(first, Result)
        return first

    async def _follow(self, rank: int, events: Any) -> None:
        try:
            async for reference in events:
                await self._events.put((rank, await reference))
        except RayError as error:
            await self._events.put((rank, _Ended(str(error).splitlines()[0])))


@dataclass(frozen=True)
class _Group:
    """Actors that have met, and the place that is held for them.

    Attributes:
        store: at which they met. It is this process's, so that it answers whichever of them hangs.
    """

    actors: Sequence[Any]
    placement: Any
    store: Any

    @classmethod
    def start(cls, workers: Workers, make_stages: MakeStages) -> _Group:
        """Starts the actors. Raises UnavailableError where the cluster has no room, or they can't meet."""
        _connect(workers)
        placement = _reserve(workers)
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        store = _store(address, 0, workers.timeout, is_master=True)
        actors = [_actor(workers, make_stages, placement, rank) for rank in range(workers.count)]
        group = cls(actors, placement, store)
        try:
            ray.get([actor.join.remote(address, store.port) for actor in actors])
        except RayError as error:
            group.kill()
            raise UnavailableError(f"the learner's workers could not start: {error}", reason="RANK_ENDED") from error
        return group

    def stop(self) -> None:
        """Asks every rank to stop what it runs."""
        for actor in self.actors:
            actor.stop.remote()

    def kill(self) -> None:
        """Ends the actors and gives their place back."""
        for actor in self.actors:
            ray.kill(actor)
        remove_placement_group(self.placement)


@cache
def _own_cluster(cpus: int) -> RayHead:
    """The cluster of this process, which lives as long."""
    return RayHead(cpus)


def _connect(workers: Workers) -> None:
    if ray.is_initialized():
        return
    try:
        address = _own_cluster(workers.count).address if workers.ray_address == LOCAL else workers.ray_address
        ray.init(address, configure_logging=False)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise UnavailableError(
            f"there is no Ray cluster at {workers.ray_address!r}, which NPR_LEARNER_RAY_ADDRESS names: {error}",
            reason="NO_RAY_CLUSTER",
        ) from error


def _reserve(workers: Workers) -> Any:
    """A place for every worker. Raises UnavailableError where the cluster has none."""
    placement = placement_group([workers.needs] * workers.count, strategy="PACK")
    try:
        ray.get(placement.ready(), timeout=workers.timeout.total_seconds())
    except GetTimeoutError as error:
        remove_placement_group(placement)
        raise UnavailableError(
            f"the Ray cluster has no room for {workers.count} workers with {workers.needs} each: it has "
            f"{_resources()}; lower NPR_LEARNER_WORKERS or add machines",
            reason="NO_ROOM_FOR_WORKERS",
        ) from error
    return placement


def _actor(workers: Workers, make_stages: MakeStages, placement: Any, rank: int) -> Any:
    return (
        ray.remote(Rank)
        .options(
            num_cpus=workers.needs["CPU"],
            num_gpus=workers.needs.get("GPU", 0.0),
            max_concurrency=2,  # one runs, one stops it
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, rank),
        )
        .remote(rank, workers, make_stages)
    )


def _resources() -> str:
    found = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return ", ".join(f"{found.get(name, 0):.0f} {name}" for name in ("CPU", "GPU"))
