"""Runs in Redis: records, facts and events, changed by atomic scripts only.

Invariants
- A transition changes record, facts and log together or not at all, and only while the run is in an expected state.
- A transition made by a driver carries the leader's token: a controller that lost its lease can change nothing.
- Events are numbered from 1 without gaps and never change.
- Pub/sub only wakes; whoever was woken reads the truth again.
"""

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from importlib import resources
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from npr_common.rpc import AbortedError, NotFoundError, ResourceExhaustedError, UnavailableError
from npr_controller.state import keys
from npr_controller.state.records import EventRecord, RunRecord, RunState


class StoreUnavailableError(UnavailableError):
    """The controller's own Redis doesn't answer: nothing can be recorded, not even a failure."""


class StoreFullError(ResourceExhaustedError):
    """The controller's own Redis can't write: disk or memory is full."""


# After these nothing can be recorded: a driver is started again instead of its run being marked FAILED.
STORE_ERRORS = (StoreUnavailableError, StoreFullError)


class StateChangedError(AbortedError):
    """The run is not in the state that the transition needs, or another controller leads."""


class Signal:
    """Wakes on a pub/sub message; made by `RunStore.listen`."""

    def __init__(self, pubsub: Any) -> None:
        self._pubsub = pubsub

    async def wait(self, timeout_seconds: float) -> None:
        """Returns at the next message, or after `timeout_seconds`, whichever comes first."""
        with redis_errors():
            await self._pubsub.get_message(ignore_subscribe_messages=True, timeout=timeout_seconds)


class RunStore:
    """All durable state of the controller."""

    def __init__(self, redis: Any) -> None:
        # Any: redis-py types every answer as bytes | str, whatever decode_responses says.
        self.redis = redis
        self._transition = redis.register_script(_script("transition"))
        self._create = redis.register_script(_script("create"))

    async def create(self, record: RunRecord, event: EventRecord) -> bool:
        """Adds a run; False when its id is taken, and then nothing changes."""
        pairs = [part for pair in record.fields().items() for part in pair]
        with redis_errors():
            made = await self._create(
                keys=[keys.run_key(record.run_id), keys.RUNS, keys.events_key(record.run_id)],
                args=[record.run_id, record.created_at, event.model_dump_json(), keys.NOTICES, *pairs],
            )
        return bool(made)

    async def get(self, run_id: str) -> RunRecord:
        """A run's record. Raises `NotFoundError`."""
        with redis_errors():
            fields: dict[str, str] = await self.redis.hgetall(keys.run_key(run_id))
        if not fields:
            raise NotFoundError(f"no run {run_id!r}; `npr runs` lists them", reason="RUN_NOT_FOUND")
        return RunRecord.from_fields(fields)

    async def newest(self, count: int) -> list[RunRecord]:
        """The newest `count` runs, newest first."""
        with redis_errors():
            run_ids: list[str] = await self.redis.zrange(keys.RUNS, 0, count - 1, desc=True)
        return [await self.get(run_id) for run_id in run_ids]

    async def running(self) -> list[str]:
        """The ids of all runs in state RUNNING, oldest first."""
        with redis_errors():
            run_ids: list[str] = await self.redis.zrange(keys.RUNS, 0, -1)
            async with self.redis.pipeline(transaction=False) as pipeline:
                for run_id in run_ids:
                    pipeline.hget(keys.run_key(run_id), "state")
                states = await pipeline.execute()
        return [run_id for run_id, state in zip(run_ids, states, strict=True) if state == RunState.RUNNING]

    async def facts(self, run_id: str) -> dict[str, str]:
        """All facts of a run, JSON by name."""
        with redis_errors():
            facts: dict[str, str] = await self.redis.hgetall(keys.facts_key(run_id))
        return facts

    async def events(self, run_id: str, after_sequence: int, count: int = 500) -> list[tuple[int, EventRecord]]:
        """Up to `count` events after `after_sequence`, with their sequence numbers."""
        with redis_errors():
            logged: list[str] = await self.redis.lrange(
                keys.events_key(run_id), after_sequence, after_sequence + count - 1
            )
        return [
            (after_sequence + place, EventRecord.model_validate_json(event))
            for place, event in enumerate(logged, start=1)
        ]

    async def transition(
        self,
        run_id: str,
        event: EventRecord,
        *,
        expected: Sequence[RunState],
        changes: Mapping[str, object],
        facts: Mapping[str, str | None] | None = None,
        fence: str = "",
    ) -> int:
        """Makes one durable transition and returns its event's sequence number.

        A fact of None is forgotten. Raises `StateChangedError` when the run is in none of the `expected` states or
        `fence` is not the leader's token, `NotFoundError` when there is no such run.
        """
        told = {**changes, "updated_at": event.at}
        fields = [part for name, value in told.items() for part in (name, str(value))]
        named = [part for name, value in (facts or {}).items() for part in (name, value or "")]
        moves = keys.NOTICES if "state" in changes else ""
        with redis_errors():
            sequence = await self._transition(
                keys=[keys.LEADER, keys.run_key(run_id), keys.facts_key(run_id), keys.events_key(run_id)],
                args=[
                    fence,
                    ",".join(expected),
                    event.model_dump_json(exclude={"run": {"recipe_yaml"}}),
                    moves,
                    keys.event_channel(run_id),
                    len(told),
                    *fields,
                    len(facts or {}),
                    *named,
                ],
            )
        return int(sequence)

    @asynccontextmanager
    async def listen(self, channel: str) -> AsyncIterator[Signal]:
        """A signal that is subscribed before the body runs, so that no message after a read is missed."""
        pubsub = self.redis.pubsub()
        try:
            with redis_errors():
                await pubsub.subscribe(channel)
                await pubsub.get_message(timeout=5.0)  # the confirmation: from here on nothing is missed
            yield Signal(pubsub)
        finally:
            await pubsub.aclose()


@contextmanager
def redis_errors() -> Iterator[None]:
    """Turns Redis's errors into typed ones that say what to do."""
    try:
        yield
    except (RedisConnectionError, RedisTimeoutError) as error:
        raise StoreUnavailableError(
            f"the controller's Redis does not answer ({error}); check it with `npr status`", reason="REDIS_UNAVAILABLE"
        ) from error
    except OutOfMemoryError as error:
        raise _full(error) from error
    except ResponseError as error:
        raise _refusal(error) from error


def _refusal(error: ResponseError) -> Exception:
    message = str(error)
    if message.startswith("NO_RUN"):
        return NotFoundError("no such run; `npr runs` lists them", reason="RUN_NOT_FOUND")
    if message.startswith(("NOT_LEADER", "STATE")):
        return StateChangedError(f"the run moved on: {message}", reason="STATE_CHANGED")
    if "MISCONF" in message or "OOM" in message:
        return _full(error)
    return error


def _full(error: RedisError) -> StoreFullError:
    return StoreFullError(
        f"the controller's Redis can't write ({error}): free disk or memory; runs then go on by themselves",
        reason="REDIS_FULL",
    )


def _script(name: str) -> str:
    return resources.files(__package__).joinpath(f"{name}.lua").read_text()


def now() -> float:
    """Seconds since the epoch."""
    return time.time()


def connect_redis(url: str) -> Any:
    """A client that answers in text. Connects lazily."""
    return Redis.from_url(url, decode_responses=True, health_check_interval=30)
