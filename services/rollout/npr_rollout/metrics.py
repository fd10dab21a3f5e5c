"""The engine's counts as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Observation

from npr_common.errors import UnavailableError
from npr_common.telemetry import meter, names
from npr_rollout.engine.engine import EngineStatus
from npr_rollout.engine_thread import EngineThread

_WAIT_SECONDS = 2.0

Read = Callable[[EngineStatus], Iterable[Observation]]


def observe_engine(engine: EngineThread) -> None:
    """Register the instruments; they ask the engine when metrics are collected, and are silent while it is busy."""

    def callback(read: Read) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            try:
                return list(read(engine.status_now(_WAIT_SECONDS)))
            except (TimeoutError, UnavailableError):
                return []

        return observe

    instruments = meter()
    instruments.create_observable_counter(names.METRIC_ENGINE_TOKENS, [callback(lambda s: [Observation(s.tokens)])])
    instruments.create_observable_counter(names.METRIC_ENGINE_STEPS, [callback(lambda s: [Observation(s.steps)])])
    instruments.create_observable_counter(names.METRIC_ENGINE_FORKS, [callback(lambda s: [Observation(s.forks)])])
    instruments.create_observable_gauge(
        names.METRIC_ENGINE_PAGES_USED, [callback(lambda s: [Observation(s.pages_used)])]
    )
    instruments.create_observable_counter(names.METRIC_ENGINE_RECOVERIES, [lambda _: [Observation(engine.recoveries)]])
    instruments.create_observable_counter(
        names.METRIC_ENGINE_FORK_REFUSALS,
        [callback(lambda s: [Observation(n, {"reason": r.name.lower()}) for r, n in s.fork_refusals.items()])],
    )
