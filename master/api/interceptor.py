"""Answers what no method answers itself, instead of gRPC's traceback: bytes that are no message of
ours with INVALID_ARGUMENT, what is asked of a master that ends with UNAVAILABLE, what takes longer
than any caller should wait with DEADLINE_EXCEEDED, and a fault of ours with INTERNAL, of which the
log alone tells more.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from oobleck.master.api.limits import MOST_DETAILS, deadline_s
from oobleck.master.inbox import MasterEnded
from oobleck.master.state.trust import Denied, StillFresh, TooSoon
from oobleck.master.storage.disk import StorageFailed
from oobleck.proto.bounds import check_bounds

log = logging.getLogger(__name__)

#: A grpc.RpcMethodHandler; its stubs lack most of it.
Handler = Any

_FOREIGN = "the request is not a message of this service; install the same version on both sides"


class _Malformed:
    """Stands for a request that could not be read."""

    def __init__(self, why: str) -> None:
        self.why = why


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # not at run time
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method; gRPC says so itself
            return handler
        read = handler.request_deserializer

        def deserialize(data: bytes) -> object:
            try:
                message = read(data)
                check_bounds(message)
            except DecodeError:
                return _Malformed(_FOREIGN)
            except ValueError as error:
                return _Malformed(str(error))
            return message

        guarded: dict[str, object] = {"request_deserializer": deserialize}
        if handler.unary_unary is not None:
            limit_s = deadline_s(handler_call_details.method)
            guarded["unary_unary"] = _unary(handler.unary_unary, limit_s)
        elif handler.unary_stream is not None:
            guarded["unary_stream"] = _unary_stream(handler.unary_stream)
        elif handler.stream_stream is not None:
            guarded["stream_stream"] = _stream_stream(handler.stream_stream)
        return handler._replace(**guarded)


async def _refuse(context: Any, malformed: _Malformed) -> None:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, malformed.why[:MOST_DETAILS])


@asynccontextmanager
async def _answering(context: Any) -> AsyncIterator[None]:
    """Around a method: what it raises ends the call with a status."""
    try:
        yield
    except MasterEnded:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the master has ended")
    except StillFresh as refused:
        await context.abort(grpc.StatusCode.ALREADY_EXISTS, str(refused))
    except TooSoon as refused:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(refused))
    except Denied as denied:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(denied))
    except StorageFailed as failed:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(failed)[:MOST_DETAILS])
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError as error:  # of the library: nobody is there to be answered
        log.info("a call could not be answered", extra={"reason": repr(error)[:MOST_DETAILS]})
    except Exception:
        log.exception("a call failed")
        await context.abort(grpc.StatusCode.INTERNAL, "the master failed; its log tells why")


def _unary(behave: Any, limit_s: float) -> Any:
    async def guarded(request: Any, context: Any) -> Any:
        if isinstance(request, _Malformed):
            await _refuse(context, request)
        async with _answering(context):
            try:
                async with asyncio.timeout(limit_s):
                    return await behave(request, context)
            except TimeoutError:
                text = f"the master has no answer after {limit_s:g} s"
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)

    return guarded


def _unary_stream(behave: Any) -> Any:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        if isinstance(request, _Malformed):
            await _refuse(context, request)
        async with _answering(context):
            async for reply in behave(request, context):
                yield reply

    return guarded


def _stream_stream(behave: Any) -> Any:
    async def guarded(requests: Any, context: Any) -> None:
        async def readable() -> AsyncIterator[Any]:
            async for request in requests:
                if isinstance(request, _Malformed):
                    raise ValueError(request.why)
                yield request

        async with _answering(context):
            await behave(readable(), context)

    return guarded
