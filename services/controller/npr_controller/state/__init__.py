"""What the controller must not forget: runs, facts, events, and who leads."""

from npr_controller.state import keys
from npr_controller.state.records import EventKind, EventRecord, RunRecord, RunState
from npr_controller.state.store import (
    STORE_ERRORS,
    RunStore,
    StateChangedError,
    StoreUnavailableError,
    connect_redis,
    now,
)

__all__ = [
    "STORE_ERRORS",
    "EventKind",
    "EventRecord",
    "RunRecord",
    "RunState",
    "RunStore",
    "StateChangedError",
    "StoreUnavailableError",
    "connect_redis",
    "keys",
    "now",
]
