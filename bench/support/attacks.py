"""Attacks on a master by somebody who has credentials, for `bench.hostile`.

Each is a coroutine that has so many calls under way until it is cancelled, each call again as soon
as the last one has ended, and counts the ends by status. Requests are bytes, so no bound of ours
holds them back.
"""

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from bench.support.daemons import CHECKOUT, with_parent
from oobleck.core.ids import Incarnation, NodeName
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.host.security.credentials import read_credentials
from oobleck.host.security.pki import read_token
from oobleck.host.system.process import allow_open_files
from oobleck.master.api.access import MOST_REQUEST_BYTES
from oobleck.proto import control_pb2 as pb
from oobleck.proto.bounds import MOST_RECEIVED_BYTES, MOST_SLOTS
from oobleck.proto.protocol import NEWEST, OLDEST
from oobleck.proto.secure import open_aio_channel
from oobleck.proto.status import register_message
from oobleck.proto.types import NodeFacts, NodeStatus, Registration

#: Channel options: a separate connection per channel, without limits on the client's side.
_OWN = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)
_CALL_S = 20.0
#: As long as requests may be.
_SMALL, _LARGE = MOST_REQUEST_BYTES, MOST_RECEIVED_BYTES - 64
#: An item of a list without content: field 2, and its length.
_EMPTY = b"\x12\x00"
#: Time for an attacker's process to end.
_END_S = 4.0
#: Niceness of attackers, so that the job runs as if they were on other hosts.
_NICE = 5
#: Line printed when an attack begins; the statuses of its calls are printed at its end.
BEGUN = "begun"
Requests = tuple[bytes, ...]


def methods() -> list[str]:
    services = pb.DESCRIPTOR.services_by_name.values()
    return [f"/oobleck.{one.name}/{method.name}" for one in services for method in one.methods]


def filled(size: int) -> bytes:
    """Return a message whose first text has so many characters."""
    return pb.JobRequest(job_id="x" * size).SerializeToString()


class Attacker:
    def __init__(self, address: str, folder: Path, job: str) -> None:
        """`folder`: of credentials, named after their holder, or a file with a join token."""
        shown = read_token(folder.read_text()) if folder.is_file() else read_credentials(folder)
        self._endpoint = Endpoint(address=address, credentials=shown)
        self._job = pb.JobRequest(job_id=job).SerializeToString()
        self._node = NodeName(folder.name)
        self.ends: Counter[str] = Counter()

    def _channel(self, *options: tuple[str, int]) -> grpc.aio.Channel:
        return open_aio_channel(self._endpoint, (*_OWN, *options))

    async def call(self, channel: grpc.aio.Channel, method: str, requests: Requests) -> None:
        try:
            # Give each call a time-out, so that none waits for ever.
            call = channel.stream_stream(method, None, None)(iter(requests), timeout=_CALL_S)
            async for _ in call:
                pass
            self.ends[(await call.code()).name] += 1
        except grpc.aio.AioRpcError as error:
            self.ends[error.code().name] += 1
        except grpc.aio.UsageError:
            self.ends["USAGE"] += 1

    async def keep(
        self, connections: int, streams: int, requests: Mapping[str, Requests], *options: Any
    ) -> None:
        """Keep so many calls of all methods under way on each of so many connections."""
        async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            for _ in range(connections):
                channel = await stack.enter_async_context(self._channel(*options))
                for number in range(streams):
                    tasks.create_task(self._repeat(channel, number, requests))

    async def _repeat(
        self, channel: grpc.aio.Channel, first: int, requests: Mapping[str, Requests]
    ) -> None:
        for method, said in itertools.islice(itertools.cycle(requests.items()), first, None):
            await self.call(channel, method, said)
            await asyncio.sleep(0)

    def _session(self, *after: pb.AgentMessage | bytes) -> dict[str, Requests]:
        """Return the requests of a session of its node: the registration, then those in `after`."""
        incarnation = Incarnation(os.urandom(8).hex())
        facts = NodeFacts(
            node=self._node,
            incarnation=incarnation,
            hostname="hostile",
            address="127.0.0.1",
            pid=1,
            worker_slots=1,
            device="cpu",
            memory_per_worker_bytes=1 << 30,
            newest_protocol=NEWEST,
        )
        registration = Registration(protocol=OLDEST, facts=facts, status=NodeStatus())
        first = pb.AgentMessage(incarnation=incarnation, register=register_message(registration))
        said = [first.SerializeToString()]
        for message in after:
            if isinstance(message, pb.AgentMessage):
                message.incarnation = incarnation
                message = message.SerializeToString()
            said.append(message)
        return {"/oobleck.Control/Session": tuple(said)}

    # ---- the attacks

    def _every(self, request: bytes) -> dict[str, Requests]:
        return dict.fromkeys(methods(), (request,))

    async def large(self) -> None:
        await self.keep(4, 8, self._every(filled(_LARGE)))

    async def allowed(self) -> None:
        """Send requests as large as most methods allow."""
        await self.keep(8, 16, self._every(filled(_SMALL - 16)))

    async def empty(self) -> None:
        await self.keep(8, 8, self._every(_EMPTY * (_SMALL // len(_EMPTY))))

    async def empty_large(self) -> None:
        await self.keep(2, 8, self._every(_EMPTY * (_LARGE // len(_EMPTY))))

    async def compressed(self) -> None:
        gzip = ("grpc.default_compression_algorithm", 2)
        await self.keep(4, 8, self._every(bytes(_LARGE)), gzip)

    async def repeated(self) -> None:
        await self.keep(8, 64, self._every(self._job))

    def _following(self) -> dict[str, Requests]:
        follow = pb.EventsRequest(job_id=pb.JobRequest.FromString(self._job).job_id, follow=True)
        metrics = pb.MetricsRequest(job_id=follow.job_id, follow=True)
        logs = pb.LogsRequest(job_id=follow.job_id, follow=True)
        return {
            "/oobleck.Operator/WatchJob": (self._job,),
            "/oobleck.Operator/Events": (follow.SerializeToString(),),
            "/oobleck.Operator/Metrics": (metrics.SerializeToString(),),
            "/oobleck.Operator/Logs": (logs.SerializeToString(),),
        }

    async def streams(self) -> None:
        await self.keep(32, 64, self._following())

    async def held(self) -> None:
        """Open connections, one after the other, that stay open after a call."""
        async with contextlib.AsyncExitStack() as stack:
            while True:
                channel = await stack.enter_async_context(self._channel())
                await self.call(channel, "/oobleck.Operator/GetJob", (self._job,))

    async def unread(self) -> None:
        """Make calls without reading the answers."""
        async with contextlib.AsyncExitStack() as stack:
            calls = []
            for _ in range(16):
                channel = await stack.enter_async_context(self._channel())
                for method, (request,) in [*self._following().items()] * 2:
                    calls.append(channel.unary_stream(method, None, None)(request))
            await asyncio.get_running_loop().create_future()

    async def connections(self) -> None:
        async def one() -> None:
            while True:
                async with self._channel() as channel:
                    await self.call(channel, "/oobleck.Operator/GetJob", (self._job,))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(64):
                tasks.create_task(one())

    async def recordings(self) -> None:
        """Send unrequested recordings of an agent, as large as allowed."""
        recorded = pb.Recorded(job_id="x", slot=0, recording="x" * (_LARGE - 256))
        said = self._session(*[pb.AgentMessage(recorded=recorded)] * 4)
        await self.keep(4, 4, said)

    async def reports(self) -> None:
        """Send messages of an agent with as many records and output lines as allowed."""
        job = pb.JobRequest.FromString(self._job).job_id
        records = pb.StepRecords(job_id=job, records=[pb.StepRecord()] * 1024)
        lines = pb.LogLines(job_id=job, slot=0, lines=["x" * 1000] * 1000)
        said = [pb.AgentMessage(records=records), pb.AgentMessage(log=lines)] * 500
        await self.keep(2, 2, self._session(*said))

    async def registrations(self) -> None:
        await self.keep(8, 64, self._session())

    async def statuses(self) -> None:
        """Send messages of an agent with as many workers, or as many numbers, as allowed."""
        worker = pb.WorkerStatus(incarnation="0" * 16, also_entered=range(64), doing="x" * 1000)
        status = pb.AgentMessage(status=pb.NodeStatus(workers=[worker] * MOST_SLOTS))
        report = (
            b'{"job_id":"x","slot":0,"incarnation":"00","what":{"type":"measured","attempt":1,'
            b'"measurement":null,"alone_s":[' + b"1," * 500_000 + b"0]}}"
        )
        said = [status, pb.AgentMessage(report=report)] * 100
        await self.keep(2, 2, self._session(*said))


COMMON: tuple[str, ...] = (
    "large", "allowed", "empty", "empty_large", "compressed", "repeated", "streams", "held",
    "unread", "connections",
)  # fmt: skip
OF_AGENTS = (*COMMON, "recordings", "reports", "registrations", "statuses")


class Attacking:
    """Attacks of each kind in turn, each by a new process, which is killed if it does not end in
    time."""

    def __init__(
        self, address: str, shown: Path, job_id: str, kinds: Sequence[str], seconds: float
    ) -> None:
        self._told = (address, str(shown), job_id)
        self._kinds, self._each_s = kinds, seconds / len(kinds)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def goes_on(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        for kind in self._kinds:
            command = [*with_parent("bench.support.attacks"), *self._told]
            process = subprocess.Popen(
                [*command, kind, str(self._each_s), str(_NICE)],
                env={**os.environ, "PYTHONPATH": CHECKOUT},
                stdout=subprocess.PIPE,
                text=True,
            )
            assert process.stdout is not None
            begun = process.stdout.readline().strip()
            killed = threading.Timer(self._each_s + _END_S, process.kill)
            killed.start()
            said, _ = process.communicate()
            killed.cancel()
            how = (said.strip() or "killed amid its calls") if begun == BEGUN else "DID NOT BEGIN"
            print(f"  {kind}: {how}", flush=True)


async def attack(attacker: Attacker, kind: str, seconds: float) -> None:
    begun: Callable[[], Coroutine[Any, Any, None]] = getattr(attacker, kind)
    print(BEGUN, flush=True)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await begun()


def main() -> None:
    address, folder, job, kind, seconds, niceness = sys.argv[1:]
    os.nice(int(niceness))
    allow_open_files()
    attacker = Attacker(address, Path(folder), job)
    try:
        asyncio.run(attack(attacker, kind, float(seconds)))
    finally:
        told = ", ".join(f"{name} {n}" for name, n in attacker.ends.most_common(4))
        print(told or "no call has ended", flush=True)


if __name__ == "__main__":
    main()
