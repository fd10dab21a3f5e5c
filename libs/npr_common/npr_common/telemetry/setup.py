"""Providers of one process, set up once by `rpc.server.run`."""

import os
from typing import Any

from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.instrumentation.grpc import aio_client_interceptors, aio_server_interceptor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from prometheus_client import start_http_server

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"

_SCOPE = "npr"


def setup(service_name: str, *, metrics_port: int | None = None) -> None:
    """Installs the process's tracer and meter providers.

    Traces and metrics go to OTEL_EXPORTER_OTLP_ENDPOINT when it is set; metrics are also served for Prometheus on
    loopback's `metrics_port` when that is given.
    """
    resource = Resource.create({SERVICE_NAME: f"npr-{service_name}"})
    readers: list[MetricReader] = []
    if _exports():
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(provider)
        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
    if metrics_port is not None:
        readers.append(PrometheusMetricReader())
        start_http_server(metrics_port, addr=os.environ.get("NPR_METRICS_HOST", "127.0.0.1"))
    if readers:
        metrics.set_meter_provider(MeterProvider(metric_readers=readers, resource=resource))


def tracer() -> trace.Tracer:
    """The system's tracer."""
    return trace.get_tracer(_SCOPE)


def meter() -> metrics.Meter:
    """The system's meter."""
    return metrics.get_meter(_SCOPE)


def current_traceparent() -> str:
    """W3C `traceparent` of the current span, empty outside one; stored with records that outlive the call."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get("traceparent", "")


def context_from(traceparent: str) -> Context:
    """The context that a stored `traceparent` names; the empty context for an empty or unreadable one."""
    return propagate.extract({"traceparent": traceparent} if traceparent else {})


def server_interceptors() -> list[Any]:
    """Interceptors that continue the caller's trace, when traces are exported."""
    return [aio_server_interceptor()] if _exports() else []


def client_interceptors() -> list[Any]:
    """Interceptors that send the trace along, when traces are exported."""
    return list(aio_client_interceptors()) if _exports() else []


def _exports() -> bool:
    return "OTEL_EXPORTER_OTLP_ENDPOINT" in os.environ
