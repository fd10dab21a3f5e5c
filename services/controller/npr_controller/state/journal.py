"""The driver's pen: what a run has established, and how it establishes more.

A *fact* is a named result that is written once, together with the event that tells of it: the groups of a step, a
step's result, an evaluation. A driver that starts again reads the facts and goes on behind the last one; so stages are
plain coroutines that ask for a fact before they work for it.
"""

import time
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from npr_controller.state.records import EventKind, EventRecord, RunRecord, RunState
from npr_controller.state.store import RunStore

Fact = TypeVar("Fact", bound=BaseModel)

# Progress is for people: more often than this it only makes the log long.
_PROGRESS_SECONDS = 1.0
# Of a stage without steps: a line each, also where no display is drawn anew.
_LINE_SECONDS = {EventKind.SAMPLING: 5.0, EventKind.FINE_TUNING: 5.0}


class Journal:
    """One run's facts and log, written by one driver under the leader's token."""

    def __init__(self, store: RunStore, record: RunRecord, facts: Mapping[str, str], fence: str) -> None:
        self._store = store
        self._facts = dict(facts)
        self._fence = fence
        self._last_progress: dict[EventKind, float] = {}
        self.run = record

    @classmethod
    async def open(cls, store: RunStore, run_id: str, fence: str) -> "Journal":
        """The journal as it stands."""
        return cls(store, await store.get(run_id), await store.facts(run_id), fence)

    def fact(self, name: str, kind: type[Fact]) -> Fact | None:
        """What is established under a name, or None."""
        stored = self._facts.get(name)
        return kind.model_validate_json(stored) if stored is not None else None

    async def record(
        self,
        kind: EventKind,
        message: str = "",
        *,
        metrics: Mapping[str, float] | None = None,
        facts: Mapping[str, BaseModel | None] | None = None,
        **changes: Any,
    ) -> None:
        """One transition: facts established (None: forgotten), the record changed, the event logged.

        Raises `StateChangedError` once the run was stopped or another controller leads.
        """
        at = time.time()
        after = self.run.model_copy(update={**changes, "updated_at": at})
        texts = {name: fact.model_dump_json() if fact is not None else None for name, fact in (facts or {}).items()}
        event = EventRecord(at=at, kind=kind, run=after, metrics=dict(metrics or {}), message=message)
        await self._store.transition(
            self.run.run_id, event, expected=[RunState.RUNNING], changes=changes, facts=texts, fence=self._fence
        )
        self.run = after
        for name, text in texts.items():
            if text is None:
                self._facts.pop(name, None)
            else:
                self._facts[name] = text

    def is_due(self, kind: EventKind) -> bool:
        """Whether progress of this kind would be recorded now: to be asked where it is dear to find out."""
        last = self._last_progress.get(kind)
        return last is None or time.monotonic() - last >= _LINE_SECONDS.get(kind, _PROGRESS_SECONDS)

    async def progress(self, kind: EventKind, message: str, metrics: Mapping[str, float]) -> None:
        """Like `record`, for people only: left out when the last one of its kind is too young."""
        if self.is_due(kind):
            self._last_progress[kind] = time.monotonic()
            await self.record(kind, message, metrics=metrics)
