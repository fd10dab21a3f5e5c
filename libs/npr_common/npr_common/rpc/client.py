"""Channels to other services, and calls that outlive a service's restart.

Two layers of retry: gRPC's own (service config: UNAVAILABLE, a few attempts within a second) hides a dropped
connection; `call_durably` waits for a service that is being restarted, until a deadline, and says whom it waited for.
"""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import grpc
from pydantic import Field
from pydantic_settings import SettingsConfigDict
from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_delay, wait_random_exponential

from npr_common import telemetry
from npr_common.config import Settings
from npr_common.errors import UnavailableError, rpc_errors

T = TypeVar("T")

SERVICE_CONFIG = json.dumps(
    {
        "loadBalancingConfig": [{"round_robin": {}}],
        "methodConfig": [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
    }
)


class ClientSettings(Settings):
    """How to reach other services, from the environment (prefix `NPR_CLIENT_`)."""

    model_config = SettingsConfigDict(env_prefix="NPR_CLIENT_", frozen=True, extra="ignore")

    max_message_mib: int = Field(default=64, ge=1)
    keepalive_seconds: float = Field(default=30.0, gt=0)
    tls_ca: Path | None = Field(default=None, description="PEM of the authority that signs services; unset: plain text")
    tls_certificate: Path | None = Field(default=None, description="PEM chain of this client, for mTLS")
    tls_key: Path | None = Field(default=None, description="PEM key of this client, for mTLS")


def connect(address: str, settings: ClientSettings | None = None) -> grpc.aio.Channel:
    """A channel to `address` (`host:port` or any gRPC target); connects lazily, balances round robin."""
    settings = settings or ClientSettings()
    size = settings.max_message_mib * 1024 * 1024
    options = [
        ("grpc.service_config", SERVICE_CONFIG),
        ("grpc.max_send_message_length", size),
        ("grpc.max_receive_message_length", size),
        ("grpc.keepalive_time_ms", int(settings.keepalive_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.initial_reconnect_backoff_ms", 100),
    ]
    interceptors = telemetry.client_interceptors()
    if settings.tls_ca is None:
        return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
    credentials = grpc.ssl_channel_credentials(
        settings.tls_ca.read_bytes(),
        settings.tls_key.read_bytes() if settings.tls_key else None,
        settings.tls_certificate.read_bytes() if settings.tls_certificate else None,
    )
    return grpc.aio.secure_channel(address, credentials, options=options, interceptors=interceptors)


async def call_durably(call: Callable[[], Awaitable[T]], *, whom: str, deadline_seconds: float) -> T:
    """Awaits `call()`, again and again while it fails with UNAVAILABLE, until `deadline_seconds` have passed.

    Only for calls that may be repeated. Raises `UnavailableError` naming `whom` at the deadline, and any other typed
    error at once.
    """
    retrying = AsyncRetrying(
        retry=retry_if_exception_type(UnavailableError),
        wait=wait_random_exponential(multiplier=0.1, max=2),
        stop=stop_after_delay(deadline_seconds),
    )
    try:
        async for attempt in retrying:
            with attempt, rpc_errors():
                return await call()
    except RetryError as error:
        raise UnavailableError(
            f"{whom} did not answer for {deadline_seconds:.0f} s; check it with `npr status`",
            metadata={"service": whom},
        ) from error
    raise AssertionError("unreachable: tenacity either returns or raises")
