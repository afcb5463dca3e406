"""A real master under a stream of wrong messages, and what must stay as it was meanwhile.

A case is one call, or one session of an agent with some messages; number `n` of a seed is always
the same. A job and an agent that the cases have nothing to do with are the witnesses.
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from random import Random

import grpc
import psutil
from fuzz.mutation import REQUESTS, agent_message, mutated, register
from google.protobuf.message import DecodeError

from oobleck.core.job.file import format_job
from oobleck.proto import control_pb2 as pb
from oobleck.proto import control_pb2_grpc as rpc
from support.jobs import job_spec
from support.live_agent import FakeAgent
from support.masters import MasterProcess

#: Cases under way at a time.
AT_ONCE = 8
#: Cases over one connection, after which the master is looked at. Where the master ends a call
#: while we write to it, the write never ends in our library, and the call counts as one of the 64
#: that the connection may have: with so many, no other one would begin.
BATCH = 60
MESSAGES = 8
_CASE_S = 60.0
#: How long the first message of a call that follows a job is waited for.
_FOLLOWED_S = 0.5
#: Codes that say what is wrong, or that nothing was.
ANSWERS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
}
#: Else all channels to an address share a connection.
_OWN = (("grpc.use_local_subchannel_pool", 1),)
#: What our end of a call says where the master has ended it while we write.
OWN_LIBRARY = "Internal error from Core"
#: What would tell of the master's inside.
INTERNALS = ("Traceback", "_pb2", " at 0x", "Error(", "oobleck.master")


class Broken(AssertionError):
    """An invariant does not hold; the text says how to see it again."""


class Fuzzer:
    def __init__(self, master: MasterProcess, seed: int) -> None:
        self._master = master
        self._seed = seed
        self.answers: Counter[grpc.StatusCode] = Counter()
        self.mutations = 0
        #: By lane, the case that is under way and since when.
        self._under_way: dict[int, tuple[int, float]] = {}

    async def run(self, cases: Iterable[int]) -> None:
        numbers = iter(cases)
        while batch := list(itertools.islice(numbers, BATCH)):
            queue = iter(batch)
            async with grpc.aio.insecure_channel(self._master.address, _OWN) as channel:
                lanes = (self._lane(channel, queue, lane) for lane in range(AT_ONCE))
                await asyncio.gather(*lanes)
            self._check(batch)

    async def _lane(self, channel: grpc.aio.Channel, queue: Iterable[int], lane: int) -> None:
        for number in queue:
            self._under_way[lane] = number, time.monotonic()
            try:
                async with asyncio.timeout(_CASE_S):
                    code, details = await self._case(channel, number, f"f{lane}")
            except TimeoutError as error:
                raise self._broken([number], f"has no end; {self._describe()}") from error
            finally:
                del self._under_way[lane]
            if details == OWN_LIBRARY:
                continue
            self.answers[code] += 1
            if code not in ANSWERS or any(word in details for word in INTERNALS):
                raise self._broken([number], f"was answered {code.name}: {details}")

    async def _case(
        self, channel: grpc.aio.Channel, number: int, name: str
    ) -> tuple[grpc.StatusCode, str]:
        """What it was answered."""
        random = Random(f"{self._seed}/{number}")
        if random.random() < 0.5:
            path = random.choice(sorted(REQUESTS))
            request = type(REQUESTS[path])()
            request.CopyFrom(REQUESTS[path])
            self.mutations += 1
            return await self._call(channel, path, mutated(random, request))
        incarnation = f"{random.getrandbits(64):016x}"
        first = register(random, name, incarnation)
        wrong_first = random.random() < 0.2
        messages = [mutated(random, first) if wrong_first else first.SerializeToString()]
        for _ in range(random.randint(1, MESSAGES)):
            whose = incarnation if random.random() < 0.95 else "beef"
            messages.append(mutated(random, agent_message(random, whose)))
        self.mutations += len(messages) - (not wrong_first)
        return await self._session(channel, messages)

    async def _call(
        self, channel: grpc.aio.Channel, path: str, data: bytes
    ) -> tuple[grpc.StatusCode, str]:
        call = channel.unary_stream(path)(data)
        # What follows a job that goes on may have nothing to say.
        patience_s = _FOLLOWED_S if _follows(path, data) else None
        with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
            async with asyncio.timeout(patience_s):
                if await anext(aiter(call), None) is None:
                    return await call.code(), await call.details() or ""
        call.cancel()
        return await call.code(), await call.details() or ""

    async def _session(
        self, channel: grpc.aio.Channel, messages: list[bytes]
    ) -> tuple[grpc.StatusCode, str]:
        call = channel.stream_stream("/oobleck.Control/Session")()
        talking = asyncio.create_task(_talk(call, messages))
        ended = asyncio.create_task(call.code())
        try:
            # gRPC's own write may wait for ever in a call that is over.
            await asyncio.wait((talking, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            talking.cancel()
            await asyncio.gather(talking, return_exceptions=True)
        return await ended, await call.details() or ""

    def _describe(self) -> str:
        """Return which cases are under way, and for how long: they share a connection."""
        now = time.monotonic()
        ages = (f"{number} for {now - since:.1f} s" for number, since in self._under_way.values())
        return f"under way: {', '.join(ages)}"

    def _check(self, batch: list[int]) -> None:
        if self._master.process.poll() is not None:
            raise self._broken(batch, f"ended the master: {self._master.process.returncode}")
        errors = self._master.errors.read_text()
        if "Traceback" in errors:
            at = errors.index("Traceback")
            raise self._broken(batch, f"broke the master: {errors[at : at + 3000]}")

    def _broken(self, batch: list[int], what: str) -> Broken:
        again = f"OOBLECK_FUZZ={self._seed}:{batch[0]}-{batch[-1]}"
        return Broken(f"of seed {self._seed}, {batch[0]} to {batch[-1]} {what}\nagain: {again}")


async def _talk(call: grpc.aio.StreamStreamCall, messages: list[bytes]) -> None:
    """Say all, and hear what comes of it."""
    # Where the master ends it meanwhile, the call says why.
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        for message in messages:
            await call.write(message)
        await call.done_writing()
        async for _ in call:
            pass


def _follows(path: str, data: bytes) -> bool:
    request = type(REQUESTS[path])()
    with contextlib.suppress(DecodeError):
        request.ParseFromString(data)
    return bool(getattr(request, "follow", False))


@contextlib.asynccontextmanager
async def witnessed(master: MasterProcess) -> AsyncIterator[None]:
    """A job that has ended, one that cases may disturb, and an agent that none of them is."""
    agent = FakeAgent("witness")
    async with grpc.aio.insecure_channel(master.address) as channel:
        control = rpc.OperatorStub(channel)  # type: ignore[no-untyped-call]
        text = format_job(job_spec("target"))
        target = (await control.Submit(pb.SubmitRequest(request_id="t", job=text))).job_id
        text = format_job(job_spec("witness"))
        ended = (await control.Submit(pb.SubmitRequest(request_id="w", job=text))).job_id
        await control.CancelJob(pb.CancelRequest(request_id="e", job_id=ended))
        await agent.connect(master.address)
        try:
            before = await control.GetJob(pb.JobRequest(job_id=ended))
            yield
            assert await control.GetJob(pb.JobRequest(job_id=ended)) == before
            nodes = (await control.ListNodes(pb.ListNodesRequest())).nodes
            (own,) = [node for node in nodes if node.node == "witness"]
            assert own.state == "live", own
            assert agent.ended is None
            assert agent.refused is None
            await control.CancelJob(pb.CancelRequest(request_id="x", job_id=target))
            again = await control.Submit(pb.SubmitRequest(request_id="w", job=text))
            assert again.job_id == ended
        finally:
            await agent.disconnect()


def memory(master: MasterProcess) -> int:
    """Bytes that the master has in memory."""
    return int(psutil.Process(master.process.pid).memory_info().rss)
