"""What stands around every method, where callers leave."""

import asyncio
import gc
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
    """Of a caller that sends one request and leaves after the first reply: gRPC fails to send the
    second one."""

    def __init__(self, request: bytes = b"") -> None:
        self._requests = [request]
        self.read_once = False
        self.written: list[int] = []

    async def read(self) -> object:
        self.read_once = True
        return self._requests.pop() if self._requests else grpc.aio.EOF

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


DEADLINE_S = 30.0


async def at_once(peer: str) -> None: ...


class Details:
    method = "/oobleck.Operator/Logs"


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
        call = asyncio.create_task(guarded.stream_stream(None, context))
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
            await call(None, context := Context())
        assert not context.read_once

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

    async def run() -> None:
        guard = CallInterceptor(anybody, Calls(lambda: 0.0), Shares(at_once))
        guarded = await guard.intercept_service(handler, Details())  # type: ignore[arg-type]
        with pytest.raises(grpc.aio.AbortError) as refused:
            await guarded.stream_unary(None, Context(said))
        assert refused.value.__context__ is None
        for frame, _ in traceback.walk_tb(refused.value.__traceback__):
            kept.extend(name for name in frame.f_locals if name in ("request", "data"))

    loops.run(run())
    assert kept == []


class Service(grpc.GenericRpcHandler):  # type: ignore[misc] # its stub has no types
    """Methods of which each ends its calls in another way."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        name = details.method.rpartition("/")[2]
        make = (
            grpc.unary_stream_rpc_method_handler
            if name == "stream"
            else grpc.stream_unary_rpc_method_handler
            if name == "sends"
            else grpc.unary_unary_rpc_method_handler
        )
        return make(
            getattr(self, name),
            request_deserializer=pb.JobRequest.FromString,
            response_serializer=pb.JobRequest.SerializeToString,
        )

    async def answer(self, request: Any, context: Any) -> Any:
        return request

    async def sends(self, requests: AsyncIterator[Any], context: Any) -> Any:
        return await anext(requests)

    async def stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield request

    async def refuse(self, request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such job")

    async def denied(self, request: Any, context: Any) -> None: ...


@pytest.mark.parametrize("method", ["answer", "sends", "stream", "refuse", "denied"])
def test_nothing_of_a_call_outlives_it_until_a_collection(method: str) -> None:
    """The master's collections leave out what has lived through one (`short_collections`)."""

    async def check(called: str, context: Any) -> None:
        if called.endswith("denied"):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "nobody may")

    def kept() -> int:
        return sum(type(one).__name__ == "_ServicerContext" for one in gc.get_objects())

    async def run() -> None:
        guard = CallInterceptor(check, Calls(lambda: 0.0), Shares(at_once))
        server = grpc.aio.server(interceptors=(guard,))
        server.add_generic_rpc_handlers((Service(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        gc.collect()
        gc.disable()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                call = channel.stream_stream(f"/oobleck.Test/{method}")(iter([b""]))
                async with asyncio.timeout(DEADLINE_S):
                    with suppress(grpc.aio.AioRpcError):
                        while await call.read() is not grpc.aio.EOF:
                            pass
                    while kept():  # noqa: ASYNC110 - nothing tells of it
                        await asyncio.sleep(0.01)
        finally:
            gc.enable()
            await server.stop(grace=None)

    loops.run(run())
