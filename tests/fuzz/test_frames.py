"""Wrong bytes on the other wires: between an agent and its workers, and from a master to an agent.

Every reader says that it does not understand, in the ways that its callers expect.
"""

import asyncio
import contextlib
import socket
from random import Random

import msgspec
import pytest
from fuzz.mutation import change_bytes, mutated
from google.protobuf.message import DecodeError

from oobleck.core.ids import Generation, Incarnation, JobId
from oobleck.core.messages import (
    Assign,
    Committed,
    Failed,
    Fork,
    Forked,
    FromWarm,
    FromWorker,
    Measure,
    PhaseReached,
    Ready,
    Rendezvous,
    StepRecord,
    Stop,
    ToWarm,
    ToWorker,
)
from oobleck.core.messages import Record as RecordWish
from oobleck.host.ipc.channel import Channel, frame, read_frame
from oobleck.proto import control_pb2 as pb
from oobleck.proto.assignments import assignment_message, read_assignment
from oobleck.proto.bounds import check_bounds
from oobleck.proto.detection import read_welcome
from oobleck.proto.types import Assignment
from support import loops
from support.plans import plan_of_cuts
from support.scripted_master import job

CASES = 1500
PLAN = plan_of_cuts(([2, 2], 4), ([4], 4))
MEETING = Rendezvous(host="127.0.0.1:4000", prefix="job/1/abc")
RIGHT: dict[str, tuple[object, list[object]]] = {
    "to a worker": (
        ToWorker,
        [
            Assign(plan=PLAN, rendezvous=MEETING, boundary=False),
            RecordWish(number=1, first_step=2, last_step=3),
            Stop(reason="over"),
        ],
    ),
    "from a worker": (
        FromWorker,
        [
            Ready(pid=7, card="127.0.0.1:4000", data="ab"),
            PhaseReached(generation=Generation(1), phase="joined", committed_step=3),
            Failed(kind="user", message="no such file"),
            Committed(
                record=StepRecord(
                    step=1,
                    loss=2.0,
                    grad_norm=1.0,
                    tokens=8,
                    samples_digest="ab",
                    generation=Generation(1),
                    step_seconds=0.1,
                    time=1.0,
                )
            ),
        ],
    ),
    "to the warm process": (ToWarm, [Fork(slot=0, incarnation=Incarnation("abcd"))]),
    "from the warm process": (FromWarm, [Forked(incarnation=Incarnation("abcd"), pid=7)]),
}


def wrong(random: Random, messages: list[object]) -> bytes:
    """Some frames, and something in them that is not right."""
    data = b"".join(frame(random.choice(messages)) for _ in range(random.randint(1, 3)))
    for _ in range(random.choice((0, 1, 1, 2, 5))):
        data = change_bytes(random, data)
    return data


@pytest.mark.parametrize("wire", RIGHT)
def test_wrong_frames_are_told_apart(wire: str) -> None:
    kind, messages = RIGHT[wire]
    read = 0
    for number in range(CASES // len(RIGHT)):
        ours, theirs = socket.socketpair()
        channel: Channel[object] = Channel(ours, kind)
        data = wrong(Random(f"{wire}/{number}"), messages)
        with theirs, contextlib.closing(channel):
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            # What a worker's and the warm process's loops take for the end of the channel.
            with contextlib.suppress(ValueError, ConnectionError):
                while channel.receive() is not None:
                    read += 1
        assert loops.run(_by_the_agent(data, kind)) >= 0, number
    assert read > CASES // len(RIGHT) // 4


async def _by_the_agent(data: bytes, kind: object) -> int:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    decoder: msgspec.json.Decoder[object] = msgspec.json.Decoder(kind)
    read = 0
    with contextlib.suppress(ValueError, ConnectionError):
        while (body := await read_frame(reader)) is not None:
            decoder.decode(body)
            read += 1
    return read


def from_a_master() -> list[pb.MasterMessage]:
    assignment = assignment_message(
        Assignment(
            version=3,
            job_id=JobId("demo-1"),
            job=job("demo"),
            assign=Assign(plan=PLAN, rendezvous=MEETING, boundary=False),
            worker_incarnations=(Incarnation("abcd"), Incarnation("ef01")),
        )
    )
    measure = assignment_message(
        Assignment(
            version=4, job_id=JobId("demo-1"), job=job("demo"), measure=Measure(attempt=1, gpus=1)
        )
    )
    return [
        pb.MasterMessage(assignment=assignment),
        pb.MasterMessage(assignment=measure),
        pb.MasterMessage(welcome=pb.Welcome(detection=pb.Detection(heartbeat_s=1, lease_s=5))),
        pb.MasterMessage(refused=pb.Refused(reason="no", temporary=True)),
        pb.MasterMessage(ack=pb.Ack(job_id="demo-1", through_step=4)),
    ]


def test_an_agent_survives_a_wrong_master() -> None:
    """What it reads is either a message or a ValueError, which its session survives."""
    read = 0
    for number in range(CASES):
        random = Random(f"master/{number}")
        message = pb.MasterMessage()
        try:
            message.ParseFromString(mutated(random, random.choice(from_a_master())))
        except DecodeError:
            continue
        with contextlib.suppress(ValueError):
            match message.WhichOneof("body"):
                case "assignment":
                    read_assignment(message.assignment)
                case "welcome":
                    read_welcome(message.welcome)
                case _:
                    pass
            read += 1
    assert read > CASES // 10


def test_bounds_have_an_answer_for_every_message() -> None:
    for number in range(CASES):
        random = Random(f"bounds/{number}")
        message = pb.MasterMessage()
        with contextlib.suppress(DecodeError, ValueError):
            message.ParseFromString(mutated(random, random.choice(from_a_master())))
            check_bounds(message)
