"""How a component says that it is well: gRPC's health service, Valkey's PING. A probe never raises."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import grpc
import redis.asyncio as redis
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.exceptions import RedisError

PROBE_SECONDS = 2.0


class Health(StrEnum):
    """What a probe found."""

    SERVING = "serving"
    NOT_SERVING = "not_serving"
    UNREACHABLE = "unreachable"
    STOPPED = "stopped"


async def grpc_health(address: str, service: str) -> Health:
    """The health of one gRPC service by its full name."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # the package's stubs leave the methods out
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = await stub.Check(request, timeout=PROBE_SECONDS)
        except grpc.aio.AioRpcError:
            return Health.UNREACHABLE
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return Health.SERVING if serving else Health.NOT_SERVING


async def valkey_health(address: str) -> Health:
    """SERVING when Valkey answers; NOT_SERVING while it loads its append-only file."""
    client = redis.Redis.from_url(f"redis://{address}", socket_timeout=PROBE_SECONDS, retry=None)
    try:
        await client.ping()
    except redis.BusyLoadingError:
        return Health.NOT_SERVING
    except (RedisError, OSError):
        return Health.UNREACHABLE
    finally:
        await client.aclose()
    return Health.SERVING
