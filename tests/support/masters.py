"""Real masters for tests: as a process, or in the test's own process."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import grpc

from bench.support.ports import choose_address
from oobleck.host.detection import DETECTIONS, Detection
from oobleck.host.system.environment import Environment
from oobleck.master.config import MasterConfig, Retention
from oobleck.master.loop import Master
from oobleck.master.planning.requests import Planner
from oobleck.master.storage.journal import Journal
from oobleck.proto import control_pb2 as pb
from oobleck.proto import control_pb2_grpc as rpc
from support.forked import Forked

DEADLINE_S = 240.0
#: Short spans, so that a test waits for little. Leases stay long: made-up agents live in the test's
#: own process, which a busy machine may keep from sending heartbeats.
QUICK = ("--heartbeat-s", "0.2", "--join-settle-s", "0.2")
#: Leases that outlast any pause of a busy machine.
PATIENT = DETECTIONS["wan"]


class MasterProcess:
    """`oobleck-master` as a process, at an address that the next one can have too."""

    def __init__(
        self,
        state_dir: Path,
        *options: str,
        listen: str | None = None,
        spans: Sequence[str] = QUICK,
    ) -> None:
        self.errors = state_dir.with_name(state_dir.name + ".stderr")
        self._options = ("--state-dir", str(state_dir), *spans, *options)
        self._start(listen or choose_address())

    def _start(self, listen: str) -> None:
        options = ("--listen", listen, *self._options)
        self.process = Forked("oobleck-master", *options, errors=self.errors)
        line = self.process.stdout.readline()
        if not line.startswith("listening on "):
            self.close()
            raise AssertionError(line + self.errors.read_text())
        self.address = line.split()[-1]

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def restart(self, listen: str | None = None) -> None:
        """Kill it, and start the next one on its directory; None: at the same address."""
        self.kill()
        self._start(listen or self.address)

    def close(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=DEADLINE_S)
        self.process.stdout.close()
        return code


@contextlib.contextmanager
def master(
    state_dir: Path,
    *options: str,
    listen: str | None = None,
    spans: Sequence[str] = QUICK,
) -> Iterator[MasterProcess]:
    running = MasterProcess(state_dir, *options, listen=listen, spans=spans)
    try:
        yield running
    finally:
        running.close()


@contextlib.asynccontextmanager
async def operator(address: str) -> AsyncIterator[rpc.OperatorStub]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield rpc.OperatorStub(channel)


async def state_of(control: rpc.OperatorStub, job_id: str, wanted: str) -> pb.JobStatus:
    """Return the job's status once it is in the wanted state."""
    async with asyncio.timeout(DEADLINE_S):
        async for status in control.WatchJob(pb.JobRequest(job_id=job_id)):
            if status.state == wanted:
                return status
    raise AssertionError(f"{job_id} ended as {status.state}, never {wanted}")


@contextlib.asynccontextmanager
async def running(
    state_dir: Path,
    *,
    timing: Detection = PATIENT,
    retention: Retention | None = None,
    environment: Environment | None = None,
    planner: Planner | None = None,
    validate: bool = False,
) -> AsyncIterator[Master]:
    """Run a master in this process; raise what ends its loop early, or TimeoutError."""
    config = MasterConfig(
        listen="127.0.0.1:0",
        state_dir=state_dir,
        timing=timing,
        retention=retention or Retention(),
        validate=validate,
    )
    made = Master(config, Journal(state_dir / "journal.log"), environment, planner)
    loop, body = asyncio.create_task(made.run()), asyncio.current_task()
    assert body is not None

    def give_up(_: object) -> None:
        body.cancel()

    loop.add_done_callback(give_up)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield made
    finally:
        loop.remove_done_callback(give_up)
        loop.cancel()
        (end,) = await asyncio.gather(loop, return_exceptions=True)
        made.close()
        if isinstance(end, Exception):
            raise end
