"""Server interceptor: typed errors become statuses, anything else becomes INTERNAL and is logged."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from grpc_status import rpc_status

from npr_common.errors import InternalError, NprError

log = logging.getLogger(__name__)

OUR_METHODS = "/npr."

if TYPE_CHECKING:  # grpc's classes are generic in their stubs only
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]
    Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of our own contract, all unary-unary or unary-stream; health and reflection are not ours."""

    async def intercept_service(
        self, continuation: "Continuation", handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(OUR_METHODS):
            return handler
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _unary(handler.unary_unary, method), handler.request_deserializer, handler.response_serializer
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                _stream(handler.unary_stream, method), handler.request_deserializer, handler.response_serializer
            )
        return handler


def _unary(inner: Callable[..., Any], method: str) -> Callable[[Any, "Context"], Awaitable[Any]]:
    async def call(request: Any, context: "Context") -> Any:
        try:
            return await inner(request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:  # noqa: BLE001 - the boundary where faults become statuses
            await _abort(context, error, method)

    return call


def _stream(inner: Callable[..., Any], method: str) -> Callable[[Any, "Context"], AsyncIterator[Any]]:
    async def call(request: Any, context: "Context") -> AsyncIterator[Any]:
        try:
            async for response in inner(request, context):
                yield response
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:  # noqa: BLE001 - the boundary where faults become statuses
            await _abort(context, error, method)

    return call


async def _abort(context: "Context", error: Exception, method: str) -> NoReturn:
    if not isinstance(error, NprError):
        log.error("unexpected error in %s", method, exc_info=error)
        error = InternalError(f"{type(error).__name__} in {method}; the service's log has the traceback")
    status = rpc_status.to_status(error.to_status())
    await context.abort(status.code, status.details, status.trailing_metadata)
