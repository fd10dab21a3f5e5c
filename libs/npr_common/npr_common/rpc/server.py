"""The life of a service process: bind, publish the address, start, serve, drain, exit.

Invariants: health is SERVING only between the end of `start` and the beginning of `drain`; the address file is written
once, whole, after the port is bound; plain-text gRPC is served on loopback only; SIGTERM ends in exit code 0 after what
was in flight is finished or given back.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from npr_common import telemetry
from npr_common.config import WRONG_SETTINGS_EXIT_CODE, Settings, WrongSettingsError
from npr_common.errors import FailedPreconditionError, NprError
from npr_common.files import write_atomically
from npr_common.rpc.interceptors import ErrorInterceptor

log = logging.getLogger(__name__)


class ServerSettings(Settings):
    """Deployment of any service, from the environment (prefix `NPR_`)."""

    model_config = SettingsConfigDict(env_prefix="NPR_", frozen=True, extra="ignore")

    listen: str = Field(default="127.0.0.1:0", description="host:port to bind; port 0 lets the system choose")
    address_file: Path | None = Field(default=None, description="where to write the bound host:port")
    reflection: bool = Field(default=False, description="serve gRPC reflection")
    max_message_mib: int = Field(default=64, ge=1, description="largest message, both ways")
    drain_seconds: float = Field(default=30.0, ge=0, description="how long SIGTERM waits for what is in flight")
    metrics_port: int | None = Field(default=None, description="port of the Prometheus endpoint; unset: none")
    tls_certificate: Path | None = Field(default=None, description="PEM chain of this service")
    tls_key: Path | None = Field(default=None, description="PEM key of this service")
    tls_client_ca: Path | None = Field(default=None, description="PEM of the authority that signs peers")


class Service(Protocol):
    """What a service is to the process that runs it."""

    @property
    def name(self) -> str:
        """The service's short name, such as `buffer`."""

    @property
    def grpc_names(self) -> tuple[str, ...]:
        """Full proto names, for health and reflection."""

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicers."""

    async def start(self) -> None:
        """Connects and loads; the service is healthy when it returns."""

    async def drain(self) -> None:
        """Stops taking work; finishes or gives back what is in flight."""


@runtime_checkable
class ReportsHealth(Protocol):
    """A service whose health can change while it serves, such as one that depends on a store."""

    def report_health_to(self, report: Callable[[bool], Awaitable[None]]) -> None:
        """Takes the function to call with False when calls can't succeed, and with True when they can again."""


class RunningServer:
    """A bound server and its health; made by `start_server`."""

    def __init__(self, service: Service, settings: ServerSettings) -> None:
        self._service = service
        self._settings = settings
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            interceptors=[*telemetry.server_interceptors(), ErrorInterceptor()], options=_options(settings)
        )
        self.address = ""
        if isinstance(service, ReportsHealth):
            service.report_health_to(self.set_serving)

    async def start(self) -> None:
        """Binds, publishes the address, starts the service and turns healthy."""
        await self.set_serving(False)
        self._service.register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if self._settings.reflection:
            names = (*self._service.grpc_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        self.address = _bind(self._server, self._settings)
        await self._server.start()
        if self._settings.address_file is not None:
            write_atomically(self._settings.address_file, self.address.encode())
        try:
            await self._service.start()
        except BaseException:
            await self._server.stop(grace=None)
            raise
        await self.set_serving(True)
        log.info("%s serves on %s", self._service.name, self.address)

    async def set_serving(self, serving: bool) -> None:
        """Sets the health of the service and of the whole process."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._service.grpc_names):
            await self._health.set(name, status)

    async def stop(self) -> None:
        """Turns unhealthy, drains, and ends the calls that are left after the drain time."""
        await self.set_serving(False)
        try:
            async with asyncio.timeout(self._settings.drain_seconds):
                await self._service.drain()
        except TimeoutError:
            log.warning("%s did not drain within %.0f s", self._service.name, self._settings.drain_seconds)
        finally:
            await self._server.stop(grace=min(2.0, self._settings.drain_seconds))


async def serve(service: Service, settings: ServerSettings) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Raises what `start` raises."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    running = RunningServer(service, settings)
    starting = asyncio.create_task(running.start())
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        starting.result()
    else:  # told to stop before it was ready
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
    await stopping
    await running.stop()


def run(make_service: Callable[[], Service]) -> None:
    """The main function of a service process: settings, telemetry, `serve`, exit code.

    Wrong settings end it with a code of their own, and the last lines on standard error are one a wrong variable.
    """
    try:
        settings, service = _configured(make_service)
        telemetry.setup(service.name, metrics_port=settings.metrics_port)
        asyncio.run(serve(service, settings))
    except WrongSettingsError as error:
        sys.stderr.writelines(f"{name}: {why}\n" for name, why in error.variables.items())
        sys.exit(WRONG_SETTINGS_EXIT_CODE)
    except NprError as error:
        log.critical("%s", error.message)
        sys.exit(1)


def _configured(make_service: Callable[[], Service]) -> tuple[ServerSettings, Service]:
    """The server's settings and the service. Raises `WrongSettingsError` with what is wrong with any of them."""
    settings, service = None, None
    wrong: dict[str, str] = {}
    level = os.environ.get("NPR_LOG_LEVEL", "INFO")
    try:
        logging.basicConfig(level=level, format=telemetry.LOG_FORMAT, stream=sys.stderr)
    except ValueError:
        wrong["NPR_LOG_LEVEL"] = f"Input should be {', '.join(logging.getLevelNamesMapping())}"
    try:
        settings = ServerSettings()
    except WrongSettingsError as error:
        wrong |= error.variables
    try:
        service = make_service()
    except WrongSettingsError as error:
        wrong |= error.variables
    if settings is None or service is None or wrong:
        raise WrongSettingsError(wrong)
    return settings, service


def _options(settings: ServerSettings) -> list[tuple[str, int]]:
    size = settings.max_message_mib * 1024 * 1024
    return [
        ("grpc.max_send_message_length", size),
        ("grpc.max_receive_message_length", size),
        ("grpc.so_reuseport", 0),  # two processes on one port would share its calls unseen
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]


def _bind(server: grpc.aio.Server, settings: ServerSettings) -> str:
    host, _, _ = settings.listen.rpartition(":")
    try:
        if settings.tls_certificate and settings.tls_key:
            port = server.add_secure_port(settings.listen, _credentials(settings))
        elif is_loopback(host):
            port = server.add_insecure_port(settings.listen)
        else:
            raise FailedPreconditionError(
                f"{settings.listen} is not loopback and no TLS is configured: set NPR_TLS_CERTIFICATE and NPR_TLS_KEY",
                reason="PLAIN_TEXT_REFUSED",
            )
    except RuntimeError as error:
        raise FailedPreconditionError(
            f"can't listen on {settings.listen}: the port is taken; set NPR_LISTEN to a free one", reason="PORT_TAKEN"
        ) from error
    return f"{host}:{port}"


def _credentials(settings: ServerSettings) -> grpc.ServerCredentials:
    assert settings.tls_certificate is not None
    assert settings.tls_key is not None
    pair = (settings.tls_key.read_bytes(), settings.tls_certificate.read_bytes())
    authority = settings.tls_client_ca.read_bytes() if settings.tls_client_ca else None
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


def is_loopback(host: str) -> bool:
    """True for `localhost` and loopback addresses, bracketed or not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
