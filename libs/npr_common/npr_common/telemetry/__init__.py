"""Traces, metrics and their propagation.

Exporters come from the standard OTEL_* environment; where it is unset nothing is exported.
"""

from npr_common.telemetry.setup import (
    LOG_FORMAT,
    client_interceptors,
    context_from,
    current_traceparent,
    meter,
    server_interceptors,
    setup,
    tracer,
)

__all__ = [
    "LOG_FORMAT",
    "client_interceptors",
    "context_from",
    "current_traceparent",
    "meter",
    "server_interceptors",
    "setup",
    "tracer",
]
