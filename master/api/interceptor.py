"""What stands around every method: it checks the caller, reads the request, and turns what the
method raises into a status.

Bytes that are no message of ours give INVALID_ARGUMENT, a master that ends UNAVAILABLE, a call that
takes longer than any caller should wait DEADLINE_EXCEEDED, and a fault of ours INTERNAL, with its
details in the log alone.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from oobleck.master.api.calls import Calls
from oobleck.master.api.limits import MOST_DETAILS, deadline_s
from oobleck.master.inbox import MasterEnded
from oobleck.master.state.trust import Denied, StillFresh, TooSoon
from oobleck.master.storage.disk import StorageFailed
from oobleck.proto.bounds import check_bounds

log = logging.getLogger(__name__)

#: A grpc.RpcMethodHandler; its stubs lack most of it.
Handler = Any
#: Ends the call of that context where its caller may not make it.
Check = Callable[[Any], Awaitable[None]]
Around = Callable[[Any], AbstractAsyncContextManager[None]]

_FOREIGN = "the request is not a message of this service; install the same version on both sides"


class _Malformed(ValueError):
    """Stands for a request that could not be read."""


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # not at run time
    def __init__(self, check: Callable[[str, Any], Awaitable[None]], calls: Calls) -> None:
        """`check`: ends a call of that method and context where its caller may not make it."""
        self._check = check
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method; gRPC says so itself
            return handler
        method = handler_call_details.method
        check = partial(self._check, method)
        streams = handler.request_streaming or handler.response_streaming
        count = partial(self._calls.count, method, stream=streams)
        around = partial(_answering, check, count)
        guarded: dict[str, object] = {
            "request_deserializer": partial(_deserialize, handler.request_deserializer)
        }
        if handler.unary_unary is not None:
            guarded["unary_unary"] = _unary(handler.unary_unary, around, deadline_s(method))
        elif handler.unary_stream is not None:
            guarded["unary_stream"] = _unary_stream(handler.unary_stream, around, check)
        elif handler.stream_unary is not None:
            limit_s = deadline_s(method)
            guarded["stream_unary"] = _stream_unary(handler.stream_unary, around, limit_s)
        elif handler.stream_stream is not None:
            guarded["stream_stream"] = _stream_stream(handler.stream_stream, around)
        else:
            raise TypeError(f"{method}: calls of this kind have no guard")
        return handler._replace(**guarded)


def _deserialize(read: Callable[[bytes], Any], data: bytes) -> object:
    try:
        message = read(data)
        check_bounds(message)
    except DecodeError:
        return _Malformed(_FOREIGN)
    except ValueError as error:
        return _Malformed(str(error))
    return message


def _readable(request: Any) -> Any:
    """Raises _Malformed."""
    if isinstance(request, _Malformed):
        raise request
    return request


@asynccontextmanager
async def _answering(check: Check, count: Around, context: Any) -> AsyncIterator[None]:
    """Around a method: it is counted, and what it raises ends the call with a status."""
    async with count(context):
        await check(context)
        async with _told(context):
            yield


@asynccontextmanager
async def _told(context: Any) -> AsyncIterator[None]:
    try:
        yield
    except _Malformed as malformed:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(malformed)[:MOST_DETAILS])
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


def _unary(behave: Any, around: Around, limit_s: float) -> Any:
    async def guarded(request: Any, context: Any) -> Any:
        async with around(context):
            return await _in_time(limit_s, context, lambda: behave(_readable(request), context))

    return guarded


def _stream_unary(behave: Any, around: Around, limit_s: float) -> Any:
    async def guarded(requests: Any, context: Any) -> Any:
        readable = (_readable(request) async for request in requests)
        async with around(context):
            return await _in_time(limit_s, context, lambda: behave(readable, context))

    return guarded


async def _in_time(limit_s: float, context: Any, answer: Callable[[], Awaitable[Any]]) -> Any:
    try:
        async with asyncio.timeout(limit_s):
            return await answer()
    except TimeoutError:
        text = f"the master has no answer after {limit_s:g} s"
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)


def _unary_stream(behave: Any, around: Around, check: Check) -> Any:
    async def guarded(request: Any, context: Any) -> None:
        async with around(context), aclosing(behave(_readable(request), context)) as replies:
            async for reply in replies:
                # It may be long since, and the certificate revoked.
                await check(context)
                await _write(context, reply)

    return guarded


async def _write(context: Any, reply: Any) -> None:
    """To a caller that has left, the library fails to write before it has cancelled the call."""
    try:
        await context.write(reply)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError("the caller has left") from error


def _stream_stream(behave: Any, around: Around) -> Any:
    async def guarded(requests: Any, context: Any) -> None:
        async with around(context):
            await behave((_readable(request) async for request in requests), context)

    return guarded
