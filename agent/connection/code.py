"""Transfer of jobs' wheels: fetched from the master, and returned to one that has lost them."""

import asyncio
import logging
import random
from collections.abc import Callable

import grpc

from oobleck.agent.processes.code import NoCode
from oobleck.core.job.wheel import MOST_WHEEL_BYTES
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.proto import control_pb2 as pb
from oobleck.proto.control_pb2_grpc import ControlStub
from oobleck.proto.secure import open_aio_channel

logger = logging.getLogger(__name__)

#: For the largest wheel over a slow line; a master that is frozen is asked anew.
_CALL_TIMEOUT_S = 120.0
_PART_BYTES = 1 << 20
#: Longest wait before another try, a random part of which is waited.
_RETRY_S = 2.0
#: Answers that another try does not change.
_FINAL = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)


async def fetch(endpoint: Callable[[], Endpoint], digest: str) -> bytes:
    """Fetch the wheel with that hash, retrying until the master answers. Raises NoCode. `endpoint`:
    of the master, with the newest certificate."""
    told = ""
    while True:
        try:
            return await _once(endpoint(), digest)
        except grpc.aio.AioRpcError as error:
            if error.code() in _FINAL:
                raise NoCode(error.details() or error.code().name) from error
            if (reason := error.code().name) != told:
                told = reason
                logger.warning("no code for the job yet, trying on", extra={"reason": reason})
        await asyncio.sleep(random.uniform(0.0, _RETRY_S))


async def _once(endpoint: Endpoint, digest: str) -> bytes:
    content = bytearray()
    async with open_aio_channel(endpoint, ()) as channel:
        stub = ControlStub(channel)  # type: ignore[no-untyped-call]  # generated
        call = stub.GetCode(pb.CodeRequest(sha256=digest), timeout=_CALL_TIMEOUT_S)
        async for chunk in call:
            content += chunk.data
            if len(content) > MOST_WHEEL_BYTES:
                raise NoCode(f"code: the master sends more than {MOST_WHEEL_BYTES} bytes")
    return bytes(content)


async def give(endpoint: Callable[[], Endpoint], content: bytes) -> None:
    """Give a wheel back to the master, which has asked for it. Raises NoCode."""
    parts = range(0, len(content), _PART_BYTES)
    async with open_aio_channel(endpoint(), ()) as channel:
        stub = ControlStub(channel)  # type: ignore[no-untyped-call]  # generated
        try:
            await stub.GiveCode(
                (pb.CodeChunk(data=content[at : at + _PART_BYTES]) for at in parts),
                timeout=_CALL_TIMEOUT_S,
            )
        except grpc.aio.AioRpcError as error:
            raise NoCode(f"code: {error.details() or error.code().name}") from error
