"""gRPC plumbing that every service and client shares: typed errors, the server's life cycle, channels and retries."""

from npr_common.errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    NprError,
    ResourceExhaustedError,
    UnavailableError,
    rpc_errors,
)
from npr_common.rpc.client import call_durably, connect
from npr_common.rpc.server import ServerSettings, Service, run, serve

__all__ = [
    "AbortedError",
    "AlreadyExistsError",
    "CancelledError",
    "DataLossError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "NprError",
    "ResourceExhaustedError",
    "ServerSettings",
    "Service",
    "UnavailableError",
    "call_durably",
    "connect",
    "rpc_errors",
    "run",
    "serve",
]
