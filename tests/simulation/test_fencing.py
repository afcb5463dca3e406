"""What is stale changes nothing, whichever message: of another start of an agent, of a session that
a newer one has replaced, or of a worker process that the newest plan does not count on any more.

The messages are walked from the protocol's types, so that none can be forgotten.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import grpc
import pytest
from simulation.drill import TIMING
from simulation.network import Stream
from simulation.world import World

from oobleck.core.ids import Incarnation, JobId, NodeName
from oobleck.core.orders import Done
from oobleck.master.state.cluster import ClusterState
from oobleck.proto import control_pb2 as pb
from oobleck.proto.examinations import examined_message
from oobleck.proto.reports import report_bytes
from oobleck.proto.types import Happening, WorkerReport
from support.jobs import job_spec
from support.reports import REPORTS
from support.scenario import copied

JOB = "demo-1"
_BROKEN = (grpc.StatusCode.UNAVAILABLE, "Socket closed")
NODES = ("n1", "n2", "n3", "n4")


def tag_of(what: Happening) -> str:
    return str(what.__struct_config__.tag)


def reports(incarnation: str) -> Iterator[tuple[str, pb.AgentMessage]]:
    for what in REPORTS:
        report = WorkerReport(
            job_id=JobId(JOB), slot=0, incarnation=Incarnation(incarnation), what=what
        )
        yield tag_of(what), pb.AgentMessage(report=report_bytes(report))


def messages() -> dict[str, pb.AgentMessage]:
    """One of each kind that an agent sends, by the field of `AgentMessage`."""
    record = pb.StepRecord(
        step=1, loss=1.0, grad_norm=1.0, tokens=1, samples_digest="0" * 64, generation=1,
        step_seconds=0.1, time=1.0,
    )  # fmt: skip
    return {
        "register": pb.AgentMessage(register=pb.Register(node="n1")),
        "status": pb.AgentMessage(status=pb.NodeStatus()),
        "report": next(message for _, message in reports("0000")),
        "records": pb.AgentMessage(records=pb.StepRecords(job_id=JOB, records=[record])),
        "log": pb.AgentMessage(log=pb.LogLines(job_id=JOB, slot=0, lines=["stale"])),
        "recorded": pb.AgentMessage(recorded=pb.Recorded(job_id=JOB, slot=0, recording="{}")),
        "clock": pb.AgentMessage(clock=pb.ClockRead(number=1, monotonic_ns=1, boot="b")),
        "examined": pb.AgentMessage(examined=examined_message(1, Done())),
        "job_told": pb.AgentMessage(job_told=pb.JobTold(number=1, job="x")),
    }


def fields_of(message: Any, oneof: str) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.oneofs_by_name[oneof].fields}


def test_no_message_is_forgotten() -> None:
    assert set(messages()) == fields_of(pb.AgentMessage, "body")
    assert set(map(type, REPORTS)) == set(get_args(Happening))


class Cluster:
    """A job that has trained in two generations: the worker of n1 was killed and replaced."""

    def __init__(self, state_dir: Path) -> None:
        self.world = World(3, state_dir, TIMING, 1000.0)
        self.stale = ""

    async def start(self) -> None:
        world = self.world
        world.start_master()
        for name in NODES:
            world.start_agent(NodeName(name), 1)
        spec = job_spec("demo", steps=400, f=1, min_nodes=1, checkpoint=1, evaluate=7)
        await self.core.requests.submit("r", spec)
        await self.until(lambda: self.job.state == "running")
        (trainer,) = world.agents[NodeName("n1")].trainers.values()
        self.stale = trainer.incarnation
        world.end_worker(trainer, signal=9)
        await self.until(lambda: self.job.current.generation == 2 and self.job.state == "running")
        # ... and has got on, so that what is sent below is behind it.
        await self.until(lambda: self.job.seen.steps.committed_step >= 20)

    @property
    def core(self) -> Any:
        assert self.world.master is not None
        return self.world.master.core

    @property
    def job(self) -> Any:
        return self.core.state.jobs[JOB]

    async def until(self, condition: Callable[[], object]) -> None:
        for _ in range(2000):
            if condition():
                return
            await asyncio.sleep(0.05)
        raise AssertionError("it does not come to that")

    async def unchanged_by(self, say: Callable[[], None]) -> None:
        """Nothing but `say` happens meanwhile."""
        for agent in self.world.agents.values():
            agent.stop_host()
        await asyncio.sleep(0.5)  # what is on the way arrives
        before, lines = settled(self.core.state), self.lines()
        say()
        await asyncio.sleep(0.5)
        assert settled(self.core.state) == before
        assert self.lines() == lines
        for agent in self.world.agents.values():
            agent.continue_host()

    def lines(self) -> list[tuple[str, bytes]]:
        """All that is written for the job."""
        folder = self.world.config.job_directory(JOB)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return [(path.name, path.read_bytes()) for path in files]

    def stream(self, node: str) -> Stream:
        """The one that the node's agent talks over."""
        streams = [s for s in self.world.wires[NodeName(node)].streams if s._ended is None]
        return streams[-1]


def settled(state: ClusterState) -> ClusterState:
    """A copy without when each node was last heard of."""
    copy: ClusterState = copied(state)
    for node in copy.nodes.values():
        node.seen = replace(node.seen, last_heard=0.0, heard_at=None)
    return copy


@contextlib.contextmanager
def cluster(state_dir: Path) -> Iterator[Cluster]:
    made = Cluster(state_dir)
    try:
        made.world.loop.run_until_complete(made.start())
        yield made
    finally:
        made.world.end()


def test_another_start_of_an_agent_changes_nothing(tmp_path: Path) -> None:
    with cluster(tmp_path) as made:
        for message in messages().values():
            message.incarnation = "0123456789abcdef"
            requests = made.stream("n1")._requests
            say = lambda m=message, r=requests: r.put_nowait(m)  # noqa: E731
            made.world.loop.run_until_complete(made.unchanged_by(say))
        assert made.core.sessions.refused["message of another incarnation"] == len(messages())


def test_a_session_that_was_replaced_changes_nothing(tmp_path: Path) -> None:
    """Its stream is half-open: the agent has a newer one, and what it sent before comes late."""
    with cluster(tmp_path) as made:
        old = made.stream("n1")
        (session,) = (s for s in made.core.sessions if s.node == "n1")
        old._end(*_BROKEN)
        made.world.loop.run_until_complete(
            made.until(
                lambda: made.core.state.nodes["n1"].seen.session not in (None, session.number)
            )
        )
        for message in messages().values():
            if message.WhichOneof("body") == "register":
                continue  # ends the stream, which is over
            message.incarnation = session.incarnation
            say = lambda m=message: old._requests.put_nowait(m)  # noqa: E731
            made.world.loop.run_until_complete(made.unchanged_by(say))


@pytest.mark.parametrize("what", sorted(map(tag_of, REPORTS)))
def test_a_process_that_was_replaced_changes_nothing(what: str, tmp_path: Path) -> None:
    """Its agent told of it in its old generation, and the stream ended before that arrived."""
    with cluster(tmp_path) as made:
        agent = made.world.agents[NodeName("n1")]
        (message,) = (m for name, m in reports(made.stale) if name == what)
        message.incarnation = agent.outbox._incarnation
        requests = made.stream("n1")._requests
        made.world.loop.run_until_complete(made.unchanged_by(lambda: requests.put_nowait(message)))


@pytest.mark.parametrize(
    "what", ["evaluated", "link_measured", "measured", "peer_lost", "phase", "restored"]
)
def test_an_older_generation_changes_nothing(what: str, tmp_path: Path) -> None:
    """A process that still counts told of it in the generation before, and it comes late; what it
    tells of itself, such as its end, is of no generation."""
    with cluster(tmp_path) as made:
        agent = made.world.agents[NodeName("n2")]
        (trainer,) = agent.trainers.values()
        (message,) = (m for name, m in reports(trainer.incarnation) if name == what)
        message.incarnation = agent.outbox._incarnation
        requests = made.stream("n2")._requests
        made.world.loop.run_until_complete(made.unchanged_by(lambda: requests.put_nowait(message)))
