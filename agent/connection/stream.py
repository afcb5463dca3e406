"""Stream to the master: sending and receiving a message on it, and the meaning of its end.

Turns whatever gRPC raises into `SessionEnded` or `Refused`. Must not know what the messages say,
except a refusal's answer to the first one.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from oobleck.proto import control_pb2 as pb

_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in grpc-stubs

#: Answers to a registration that another try does not change.
_FINAL = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)


class SessionEnded(Exception):
    """End of the stream; the text says why."""


class Refused(Exception):
    """Refusal by the master; the text says why."""

    def __init__(self, reason: str, *, temporary: bool, denied: bool = False) -> None:
        """Keep the reason. `temporary`: another try may succeed. `denied`: the certificate is not
        valid."""
        super().__init__(reason)
        self.temporary, self.denied = temporary, denied


def refused(message: pb.Refused) -> Refused:
    return Refused(message.reason, temporary=message.temporary, denied=message.revoked)


class Stream:
    def __init__(self, call: Any, answer_s: float) -> None:
        """Wrap a gRPC call. `answer_s`: time-out of each message sent, and of the first answer."""
        self.answer_s = answer_s
        self._call = call

    async def register(self, message: pb.AgentMessage) -> pb.MasterMessage:
        """Register, and return the master's answer. Raises Refused, where no other try helps,
        SessionEnded."""
        try:
            await self.send(message)
            async with asyncio.timeout(self.answer_s):
                first: pb.MasterMessage = await self._call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            first = _EOF
        if first is not _EOF:
            return first
        async with asyncio.timeout(self.answer_s):
            if (code := await self._call.code()) in _FINAL:
                denied = code is not grpc.StatusCode.INVALID_ARGUMENT
                raise Refused(await self._call.details(), temporary=False, denied=denied)
        raise await self._end()

    async def send(self, message: pb.AgentMessage) -> None:
        async with asyncio.timeout(self.answer_s):
            await self._call.write(message)

    async def close(self) -> None:
        """End sending; the master then ends the stream."""
        await self._call.done_writing()

    async def receive(self) -> pb.MasterMessage:
        """Return the master's next message. Raises SessionEnded."""
        message: pb.MasterMessage = await self._call.read()
        if message is _EOF:
            raise await self._end()
        return message

    async def _end(self) -> SessionEnded:
        async with asyncio.timeout(self.answer_s):
            code, details = await self._call.code(), await self._call.details()
        if code is grpc.StatusCode.OK:
            return SessionEnded("the master ended the session")
        return SessionEnded(_explain(code, details))


@contextmanager
def opened(call: Any, answer_s: float) -> Iterator[Stream]:
    """Yield the stream of a call, and end it afterwards. Raises SessionEnded."""
    try:
        yield Stream(call, answer_s)
    except grpc.aio.AioRpcError as error:
        raise SessionEnded(_explain(error.code(), error.details())) from error
    except (TimeoutError, asyncio.InvalidStateError, OSError) as error:
        raise SessionEnded(str(error) or "no answer in time") from error
    finally:
        call.cancel()


def _explain(code: grpc.StatusCode, details: str | None) -> str:
    """Return gRPC's explanation without its list of everything that it tried on the way."""
    return f"{code.name}: {(details or '').rpartition('last error: ')[2]}"
