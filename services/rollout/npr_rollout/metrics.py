"""The engine's counts as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Observation

from npr_common.errors import UnavailableError
from npr_common.telemetry import meter, names
from npr_rollout.engine_thread import EngineThread
from npr_rollout.status import EngineStatus

_WAIT_SECONDS = 2.0

Read = Callable[[EngineStatus], Iterable[Observation]]

_COUNTERS: dict[str, Callable[[EngineStatus], int]] = {
    names.METRIC_ENGINE_TOKENS: lambda s: s.tokens,
    names.METRIC_ENGINE_STEPS: lambda s: s.steps,
    names.METRIC_ENGINE_FORKS: lambda s: s.forks,
    names.METRIC_ENGINE_PREEMPTIONS: lambda s: s.preemptions,
    names.METRIC_ENGINE_EVICTIONS: lambda s: s.evictions,
    names.METRIC_ENGINE_KV_TOKENS_READ: lambda s: s.kv_tokens_read,
    names.METRIC_ENGINE_KV_TOKENS_ATTENDED: lambda s: s.kv_tokens_attended,
}
_GAUGES: dict[str, Callable[[EngineStatus], int]] = {
    names.METRIC_ENGINE_RUNNING: lambda s: s.running,
    names.METRIC_ENGINE_WAITING: lambda s: s.waiting,
    names.METRIC_ENGINE_PAGES_USED: lambda s: s.pages_used,
    names.METRIC_ENGINE_PAGES_CACHED: lambda s: s.pages_cached,
}


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
    for name, count in _COUNTERS.items():
        instruments.create_observable_counter(name, [callback(_single(count))])
    for name, value in _GAUGES.items():
        instruments.create_observable_gauge(name, [callback(_single(value))])
    instruments.create_observable_gauge(
        names.METRIC_ENGINE_SERVER,
        [callback(lambda s: [Observation(value, {"name": name}) for name, value in s.server.items()])],
    )
    instruments.create_observable_counter(names.METRIC_ENGINE_INPUT_TOKENS, [callback(_input_tokens)])
    instruments.create_observable_counter(names.METRIC_ENGINE_SECONDS, [callback(_seconds)], unit="s")
    instruments.create_observable_counter(names.METRIC_ENGINE_RECOVERIES, [lambda _: [Observation(engine.recoveries)]])
    instruments.create_observable_counter(
        names.METRIC_ENGINE_FORK_REFUSALS,
        [callback(lambda s: [Observation(n, {"reason": r.name.lower()}) for r, n in s.fork_refusals.items()])],
    )


def _single(value: Callable[[EngineStatus], int]) -> Read:
    return lambda status: [Observation(value(status))]


def _input_tokens(status: EngineStatus) -> Iterable[Observation]:
    """What was fed to a server; how well its cache serves is the part that is `cached`."""
    if not status.input_tokens:
        return []
    cached = status.cached_input_tokens
    return [
        Observation(cached, {"cached": True}),
        Observation(status.input_tokens - cached, {"cached": False}),
    ]


def _seconds(status: EngineStatus) -> Iterable[Observation]:
    """Where the engine's time goes."""
    parts = {
        "scheduling": status.scheduling_seconds,
        "forward": status.forward_seconds,
        "sampling": status.sampling_seconds,
    }
    return [Observation(seconds, {"part": part}) for part, seconds in parts.items()]
