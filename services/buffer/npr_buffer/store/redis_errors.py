"""What a failing Redis means to a caller: UNAVAILABLE, or RESOURCE_EXHAUSTED with the cure."""

from collections.abc import Iterator
from contextlib import contextmanager

from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
)

from npr_common.errors import ResourceExhaustedError, UnavailableError

# Replies without an exception class of their own in redis-py.
_UNAVAILABLE_PREFIXES = ("MASTERDOWN", "NOREPLICAS", "LOADING", "CLUSTERDOWN", "UNKILLABLE", "BUSY ")


@contextmanager
def redis_errors(whom: str, retry_after_seconds: float) -> Iterator[None]:
    """Raises redis-py's errors as typed ones that name `whom`; a bug of ours (any other reply) passes through."""
    try:
        yield
    except AuthenticationError as error:
        raise UnavailableError(
            f"{whom} refuses our credentials ({error}); correct NPR_BUFFER_REDIS_URL", reason="REDIS_AUTHENTICATION"
        ) from error
    except (ConnectionError, TimeoutError, ReadOnlyError) as error:
        raise _unavailable(whom, error) from error
    except OutOfMemoryError as error:
        raise ResourceExhaustedError(
            f"{whom} is out of memory; raise its maxmemory, or delete old runs (BufferService.DeleteRun)",
            reason="REDIS_OUT_OF_MEMORY",
            retry_after_seconds=retry_after_seconds,
        ) from error
    except ResponseError as error:
        if str(error).startswith("MISCONF"):
            raise ResourceExhaustedError(
                f"{whom} can't write its append-only file; free space on its disk, then it goes on by itself ({error})",
                reason="REDIS_DISK_FULL",
                retry_after_seconds=retry_after_seconds,
            ) from error
        if str(error).startswith(_UNAVAILABLE_PREFIXES):
            raise _unavailable(whom, error) from error
        raise


def _unavailable(whom: str, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"{whom} does not answer ({error}); start it or correct NPR_BUFFER_REDIS_URL",
        reason="REDIS_UNAVAILABLE",
        metadata={"service": "redis"},
    )
