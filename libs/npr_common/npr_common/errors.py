"""Typed errors that cross the wire.

A handler raises an `NprError`; it travels as its canonical code plus one `ErrorInfo` (reason, domain, metadata), with
`RetryInfo` and `BadRequest` where they apply; `rpc_errors()` raises the same type again on the client's side.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "npr"


class NprError(Exception):
    """An error with a canonical code, a machine-readable reason, and a message that says what to do."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    default_reason: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after_seconds: float | None = None,
        field_violations: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata = dict(metadata or {})
        self.retry_after_seconds = retry_after_seconds
        self.field_violations = dict(field_violations or {})

    def to_status(self) -> status_pb2.Status:
        """The error as `google.rpc.Status`, ready for the trailing metadata."""
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata)
        details = [_pack(info)]
        if self.retry_after_seconds is not None:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromMilliseconds(int(self.retry_after_seconds * 1000))
            details.append(_pack(retry))
        if self.field_violations:
            fields = [
                error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
                for field, description in self.field_violations.items()
            ]
            details.append(_pack(error_details_pb2.BadRequest(field_violations=fields)))
        number: int = self.code.value[0]
        return status_pb2.Status(code=number, message=self.message, details=details)


class InvalidArgumentError(NprError):
    """The request can't be right, whatever the system's state."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_ARGUMENT"


class NotFoundError(NprError):
    """What was named is not there."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = "NOT_FOUND"


class AlreadyExistsError(NprError):
    """What should be made is there already and differs."""

    code = grpc.StatusCode.ALREADY_EXISTS
    default_reason = "ALREADY_EXISTS"


class FailedPreconditionError(NprError):
    """The system is not in the state that the call needs."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "FAILED_PRECONDITION"


class ResourceExhaustedError(NprError):
    """A quota, queue, disk or memory is full."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "RESOURCE_EXHAUSTED"


class UnavailableError(NprError):
    """A dependency doesn't answer now; trying again may help."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class DataLossError(NprError):
    """Stored bytes are not what they were."""

    code = grpc.StatusCode.DATA_LOSS
    default_reason = "DATA_LOSS"


class AbortedError(NprError):
    """Somebody else got there first."""

    code = grpc.StatusCode.ABORTED
    default_reason = "ABORTED"


class DeadlineExceededError(NprError):
    """The time given was not enough."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class CancelledError(NprError):
    """The caller changed its mind."""

    code = grpc.StatusCode.CANCELLED
    default_reason = "CANCELLED"


class InternalError(NprError):
    """A fault of ours."""

    code = grpc.StatusCode.INTERNAL
    default_reason = "INTERNAL"


_BY_CODE: dict[grpc.StatusCode, type[NprError]] = {kind.code: kind for kind in NprError.__subclasses__()}


def error_from_rpc(error: grpc.aio.AioRpcError) -> NprError:
    """The typed error behind a failed call; details that are not ours are left out."""
    kind = _BY_CODE.get(error.code(), NprError)
    message = error.details() or error.code().name
    status = _status_of(error)
    if status is None:
        return kind(message)
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    bad = error_details_pb2.BadRequest()
    has_retry = False
    for detail in status.details:
        _ = detail.Unpack(info) or detail.Unpack(bad)
        has_retry = detail.Unpack(retry) or has_retry
    return kind(
        message,
        reason=info.reason or None,
        metadata=dict(info.metadata),
        retry_after_seconds=retry.retry_delay.ToMilliseconds() / 1000 if has_retry else None,
        field_violations={violation.field: violation.description for violation in bad.field_violations},
    )


@contextmanager
def rpc_errors() -> Iterator[None]:
    """Raises the typed error behind any `AioRpcError` of its body."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error


def _status_of(error: Any) -> status_pb2.Status | None:
    try:
        status: status_pb2.Status | None = rpc_status.from_call(error)
    except ValueError:  # a status whose code or message contradicts the call's: not one of ours
        return None
    return status


def _pack(
    message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo | error_details_pb2.BadRequest,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
