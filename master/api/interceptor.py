"""Interceptor of all calls: checks the caller, limits concurrent calls, and counts outcomes.

A holder of certificates may have many connections with many calls each, and no limit of gRPC spans
connections. So calls, bytes and turns of the event loop are counted here for each holder. Calls of
one holder wait for each other: few are handled in one turn of the loop. Must not know what the
calls do.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from oobleck.host.metrics import Durations
from oobleck.master.api.access import (
    MOST_DETAILS,
    MOST_OF_HOLDER,
    MOST_RECEIVING,
    MOST_SENDING,
    UNARY_S,
    Context,
    caller,
    deadline_s,
    most_bytes,
)
from oobleck.master.inbox import MasterEnded, Turns
from oobleck.master.state.trust import Denied, StillFresh, TooSoon
from oobleck.master.storage.disk import StorageFailed
from oobleck.proto import control_pb2 as pb
from oobleck.proto.bounds import check_bounds, check_encoded

log = logging.getLogger(__name__)


#: Names of status codes by gRPC's numbers.
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}
_UNBOUNDED = 1 << 30
#: Marks the end of the requests.
_END = grpc.aio.EOF  # type: ignore[attr-defined] # the stubs lack it
_FOREIGN = (
    "the request is not an uncompressed message of this service; install the same version on both "
    "sides"
)


class Calls:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        #: Calls in progress by the name of the method alone, as in GetJob.
        self.open: Counter[str] = Counter()
        #: Ended calls by method and status. Counters that alerts use exist from the start, since
        #: Prometheus sees no increase in a counter that begins at 1.
        self.ended: Counter[tuple[str, str]] = Counter(
            {
                (method.name, grpc.StatusCode.INTERNAL.name): 0
                for service in pb.DESCRIPTOR.services_by_name.values()
                for method in service.methods
            }
        )
        #: Durations of calls that are no streams, by method.
        self.took: dict[str, Durations] = {}

    @asynccontextmanager
    async def count(self, method: str, context: Any, *, stream: bool) -> AsyncIterator[None]:
        """Count one call of `method` (/service/name), from entry to exit of the context."""
        name, began = method.rpartition("/")[2], self._now()
        self.open[name] += 1
        cancelled = True
        try:
            yield
            cancelled = False
        except Exception:
            cancelled = False
            raise
        finally:
            self.open[name] -= 1
            self.ended[name, "CANCELLED" if cancelled else _status(context)] += 1
            if not stream:
                self.took.setdefault(name, Durations()).add(self._now() - began)


def _status(context: Any) -> str:
    code = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else _CODES.get(code or 0, "UNKNOWN")


class TooMany(Exception):
    """Error of a holder that has too many calls; the text says the fix."""


@dataclass(slots=True, eq=False)
class Share:
    """The calls of one holder."""

    open: int = 0
    #: Calls of these that send more than one message.
    sending: int = 0
    #: Held while the first message of a call is received.
    receiving: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_RECEIVING))
    turns: Turns = field(default_factory=Turns)


class Shares:
    def __init__(self, denied: Callable[[str], Awaitable[None]]) -> None:
        """Begin without callers. `denied` gets the peers of calls that are too many, and returns
        when one may be answered."""
        self._denied = denied
        #: Shares of holders that have calls, by their names in certificates.
        self._of: dict[str, Share] = {}
        #: Share of the callers in the clear: all agents of a host may be one.
        self._free = Share(receiving=asyncio.Semaphore(_UNBOUNDED), turns=Turns(_UNBOUNDED))

    @asynccontextmanager
    async def hold(self, context: Context, *, sends: bool) -> AsyncIterator[Share]:
        """Count a call while it lasts. `sends`: more than one message. Raises TooMany."""
        identity = caller(context)
        if identity is None:
            yield self._free
            return
        share = self._of.setdefault(identity.uri, Share())
        if share.open >= MOST_OF_HOLDER or (sends and share.sending >= MOST_SENDING):
            await self._denied(context.peer())
            raise TooMany(
                f"{identity.uri} has too many calls at a time (at most {MOST_OF_HOLDER}, "
                f"{MOST_SENDING} of them sending); close pages of its dashboards, or end commands "
                "that follow jobs"
            )
        share.open += 1
        share.sending += sends
        try:
            await share.turns.take()
            yield share
        finally:
            share.open -= 1
            share.sending -= sends
            if not share.open:
                del self._of[identity.uri]


#: A grpc.RpcMethodHandler; its stubs lack most of it.
Handler = Any
#: Check that ends the call of that context where its caller may not make it.
Check = Callable[[Any], Awaitable[None]]
#: Parser of bytes to a message. Raises _Malformed.
Read = Callable[[bytes], Any]
Around = Callable[[Any], AbstractAsyncContextManager[Share]]
Count = Callable[[Any], AbstractAsyncContextManager[None]]
Holding = Callable[[Any], AbstractAsyncContextManager[Share]]


class _Malformed(ValueError):
    """Error: a request could not be read."""


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # not at run time
    def __init__(
        self, check: Callable[[str, Any], Awaitable[None]], calls: Calls, shares: Shares
    ) -> None:
        """Guard calls by `check`, which gets a method and its context. It ends the call where its
        caller may not make it."""
        self._check = check
        self._calls = calls
        self._shares = shares

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method; gRPC answers itself
            return handler
        method = handler_call_details.method
        check = partial(self._check, method)
        streams = handler.request_streaming or handler.response_streaming
        count = partial(self._calls.count, method, stream=streams)
        holding = partial(self._shares.hold, sends=handler.request_streaming)
        around = partial(_answering, check, count, holding)
        read = partial(_read, _request_kind(handler), most_bytes(method))
        if handler.response_streaming:
            guarded = _many_replies(handler, read, around, check)
            return grpc.stream_stream_rpc_method_handler(
                _letting_go(guarded), response_serializer=handler.response_serializer
            )
        return grpc.stream_unary_rpc_method_handler(
            _letting_go(_one_reply(handler, read, around, deadline_s(method))),
            response_serializer=handler.response_serializer,
        )


def _request_kind(handler: Handler) -> type[Message]:
    """Return the message whose `FromString` is the deserializer."""
    kind: type[Message] = handler.request_deserializer.__self__
    return kind


def _read(kind: type[Message], most_bytes: int, data: bytes) -> Any:
    """Decode and check a request. Raises _Malformed."""
    if len(data) > most_bytes:
        raise _Malformed(f"the request has {len(data)} bytes; at most {most_bytes} are taken")
    try:
        check_encoded(kind.DESCRIPTOR, data)  # type: ignore[arg-type] # equal at run time
        message = kind.FromString(data)
        check_bounds(message)
    except DecodeError:
        raise _Malformed(_FOREIGN) from None
    except ValueError as error:
        raise _Malformed(str(error)) from None
    return message


# Not gRPC's own iterator of requests: a cycle of references in it keeps the call alive.
async def _each(context: Any, read: Read, share: Share) -> AsyncIterator[Any]:
    """Yield the requests of a stream in the share's turns. Raises _Malformed."""
    while (request := await context.read()) is not _END:
        await share.turns.take()
        yield read(request)


async def _only(context: Any, read: Read, share: Share) -> Any:
    """Return the one request of a call. Raises _Malformed."""
    async with share.receiving:
        request = await context.read()
        if request is _END:
            raise _Malformed("the call came without a request")
        await share.turns.take()
        return read(request)


@asynccontextmanager
async def _answering(
    check: Check, count: Count, holding: Holding, context: Any
) -> AsyncIterator[Share]:
    """Check and count a call; the method runs inside. An error ends the call with a status."""
    async with count(context):
        await check(context)
        async with _errors_as_status(context), holding(context) as share:
            yield share


@asynccontextmanager
async def _errors_as_status(context: Any) -> AsyncIterator[None]:
    try:
        yield
    except _Malformed as malformed:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(malformed)[:MOST_DETAILS])
    except TooMany as refused:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(refused))
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
    except grpc.aio.BaseError as error:  # gRPC's own: the caller has left
        log.debug("a call could not be answered", extra={"reason": repr(error)[:MOST_DETAILS]})
    except Exception:
        log.exception("a call failed")
        await context.abort(grpc.StatusCode.INTERNAL, "the master failed; its log tells why")


def _letting_go(guarded: Callable[[Any], Awaitable[Any]]) -> Any:
    """Wrap a method so that an error does not keep its call alive. The call refers to the error,
    and the error's traceback to the call: a cycle, which only the collector frees."""

    async def answered(requests: object, context: Any) -> Any:
        del requests
        try:
            return await guarded(context)
        except grpc.aio.AbortError as aborted:
            aborted.__context__ = None
            del context  # else the traceback refers to it by this frame
            raise aborted.with_traceback(None) from None

    return answered


def _one_reply(handler: Handler, read: Read, around: Around, limit_s: float) -> Any:
    async def guarded(context: Any) -> Any:
        async with around(context) as share:

            async def answer() -> Any:
                if handler.request_streaming:
                    return await handler.stream_unary(_each(context, read, share), context)
                return await handler.unary_unary(await _only(context, read, share), context)

            return await _in_time(limit_s, context, answer)

    return guarded


def _many_replies(handler: Handler, read: Read, around: Around, check: Check) -> Any:
    async def guarded(context: Any) -> None:
        async with around(context) as share:
            if handler.request_streaming:
                await handler.stream_stream(_each(context, read, share), context)
                return
            request = await _in_time(UNARY_S, context, lambda: _only(context, read, share))
            async with aclosing(handler.unary_stream(request, context)) as replies:
                async for reply in replies:
                    await share.turns.take()
                    # The call may be old, and the certificate revoked.
                    await check(context)
                    await _write(context, reply)

    return guarded


async def _in_time(limit_s: float, context: Any, answer: Callable[[], Awaitable[Any]]) -> Any:
    try:
        async with asyncio.timeout(limit_s):
            return await answer()
    except TimeoutError:
        text = f"the master has no answer after {limit_s:g} s"
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)


async def _write(context: Any, reply: Any) -> None:
    """Write a reply. Raises CancelledError where the caller has left: gRPC fails the write before
    it cancels the call."""
    try:
        await context.write(reply)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError("the caller has left") from error
