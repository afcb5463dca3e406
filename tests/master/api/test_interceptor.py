"""What stands around every method, where callers leave."""

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest

from oobleck.master.api.interceptor import CallInterceptor, Calls, Shares
from oobleck.proto import control_pb2 as pb
from support import loops


class Context:
    """Of a caller that leaves after the first reply: gRPC fails to send the second one."""

    def __init__(self) -> None:
        self.written: list[int] = []

    async def write(self, reply: int) -> None:
        if self.written:
            raise grpc.aio.InternalError('Failed "execute_batch"')
        self.written.append(reply)

    def code(self) -> None:
        return None

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise grpc.aio.AbortError(details)

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}


async def at_once(peer: str) -> None: ...


class Details:
    method = "/oobleck.Operator/Logs"


async def one_request() -> AsyncIterator[bytes]:
    yield b""


def test_a_caller_that_leaves_a_stream_leaves_no_word_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed = False

    async def replies(request: object, context: object) -> AsyncIterator[int]:
        nonlocal closed
        try:
            for number in range(10):
                yield number
        finally:
            closed = True

    async def anybody(method: str, context: object) -> None: ...

    async def run() -> None:
        calls, context = Calls(lambda: 0.0), Context()

        async def handler(details: object) -> Any:
            return grpc.unary_stream_rpc_method_handler(
                replies,  # type: ignore[arg-type]
                request_deserializer=pb.LogsRequest.FromString,
            )

        guard = CallInterceptor(anybody, calls, Shares(at_once))
        guarded = await guard.intercept_service(handler, Details())  # type: ignore[arg-type]
        call = asyncio.create_task(guarded.stream_stream(one_request(), context))
        with suppress(asyncio.CancelledError):
            await call
        assert call.cancelled(), "so gRPC takes it for a call that was cancelled"
        assert (context.written, closed) == ([0], True)
        assert (calls.open["Logs"], calls.ended["Logs", "CANCELLED"]) == (0, 1)

    with caplog.at_level(logging.INFO):
        loops.run(run())
    assert caplog.records == []


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
def test_nothing_of_a_request_is_taken_before_its_caller_may_make_the_call(kind: str) -> None:
    class Refused(Exception):
        pass

    taken: list[str] = []

    async def nobody(method: str, context: object) -> None:
        raise Refused

    async def requests() -> AsyncIterator[bytes]:
        taken.append("bytes")
        yield b""

    class Request:
        @classmethod
        def FromString(cls, data: bytes) -> object:
            taken.append("a message")
            return cls()

    async def behave(request: object, context: object) -> None:
        taken.append("a call")

    async def handler(details: object) -> Any:
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(behave, request_deserializer=Request.FromString)

    async def run() -> None:
        guard = CallInterceptor(nobody, Calls(lambda: 0.0), Shares(at_once))
        guarded = await guard.intercept_service(handler, Details())  # type: ignore[arg-type]
        call = guarded.stream_stream or guarded.stream_unary
        with pytest.raises(Refused):
            await call(requests(), Context())

    loops.run(run())
    assert taken == []


@pytest.mark.parametrize("said", [b"", b"no message"])
def test_what_ends_a_call_does_not_keep_its_request(said: bytes) -> None:
    """gRPC keeps it for a while, and with it all that its traceback reaches."""
    kept: list[str] = []

    async def refuse(request: object, context: Any) -> None:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such job")

    async def handler(details: object) -> Any:
        return grpc.unary_unary_rpc_method_handler(
            refuse,  # type: ignore[arg-type]
            request_deserializer=pb.LogsRequest.FromString,
        )

    async def anybody(method: str, context: object) -> None: ...

    async def requests() -> AsyncIterator[bytes]:
        yield said

    async def run() -> None:
        guard = CallInterceptor(anybody, Calls(lambda: 0.0), Shares(at_once))
        guarded = await guard.intercept_service(handler, Details())  # type: ignore[arg-type]
        with pytest.raises(grpc.aio.AbortError) as refused:
            await guarded.stream_unary(requests(), Context())
        assert refused.value.__context__ is None
        for frame, _ in traceback.walk_tb(refused.value.__traceback__):
            kept.extend(name for name in frame.f_locals if name in ("request", "data"))

    loops.run(run())
    assert kept == []
