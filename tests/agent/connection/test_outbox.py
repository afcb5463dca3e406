"""What is sent of a worker's reports: all that the master takes, and nothing that it refuses."""

import logging

import pytest

from oobleck.agent.connection.outbox import (
    GATHER_LINES_S,
    HOLD_S,
    LINES_PER_MESSAGE,
    Outbox,
)
from oobleck.agent.processes.output import LINE_BYTES, Tail
from oobleck.core.checkpoint import folder_name
from oobleck.core.ids import Generation, Incarnation, JobId
from oobleck.core.job.spec import CheckpointSpec
from oobleck.core.messages import CheckpointSaved, PeerLost, PhaseReached, Restored
from oobleck.core.orders import Marks, Unable
from oobleck.host.detection import GATHER_REPORTS_S
from oobleck.proto.bounds import MOST_RECEIVED_BYTES
from oobleck.proto.control_pb2 import AgentMessage
from oobleck.proto.examinations import read_answer
from oobleck.proto.reports import read_report
from oobleck.proto.types import NodeStatus, WorkerReport
from support.jobs import record


def saved(path: str) -> WorkerReport:
    what = CheckpointSaved(step=1, path=path, bytes=1, seconds=1.0)
    return WorkerReport(job_id=JobId("demo-1"), slot=2, incarnation=Incarnation("abcd"), what=what)


def sent(*reports: WorkerReport) -> list[WorkerReport]:
    """What the master reads of them, in two sessions."""
    outbox = Outbox(Incarnation("0123"))
    for report in reports:
        outbox.report(report, 0.0)
    first = outbox.take(0.0)
    outbox.session_began(list(reports), 0.0)
    assert outbox.take(0.0) == first
    return [read_report(message.report) for message in first]


@pytest.mark.parametrize("path", ["x" * 1025, "no-break\u00a0space", "left\u200bout"])
def test_a_report_that_the_master_would_refuse_is_told_and_left_out(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = WorkerReport(
        job_id=JobId("demo-1"),
        slot=2,
        incarnation=Incarnation("abcd"),
        what=Restored(generation=Generation(1), step=1, path=""),
    )
    with caplog.at_level(logging.ERROR):
        assert sent(saved(path), other) == [other]
    record = caplog.records[0]
    assert record.message == "a worker's report cannot be sent"
    assert (record.job, record.slot) == ("demo-1", 2)
    assert str(record.reason).startswith("report: path: ")


@pytest.mark.parametrize(
    "path",
    ["x" * 900, f"s3://bucket/{'é' * 880}", f"s3://b/{'?token=a' * 80}", "a b/\u3042\U0001f600"],
)
def test_any_place_that_a_job_may_name_can_be_reported(path: str) -> None:
    spec = CheckpointSpec(path=path)
    assert not spec.why_not_reportable()
    report = saved(f"{path}/{folder_name(999_999_999, 'meeting')}")
    assert sent(report) == [report]


def lines_of(messages: list[AgentMessage]) -> list[str]:
    return [line for message in messages for line in message.log.lines]


def test_lines_wait_for_others_unless_they_are_many_or_the_last() -> None:
    outbox, job = Outbox(Incarnation("0123")), JobId("demo-1")
    outbox.log(job, 0, ["one"], now=10.0)
    outbox.log(job, 0, ["two"], now=10.0 + GATHER_LINES_S / 2)
    assert outbox.take(10.0 + GATHER_LINES_S / 2) == []
    due = outbox.next_due(10.0)
    assert due == 10.0 + GATHER_LINES_S
    assert lines_of(outbox.take(due)) == ["one", "two"]
    assert outbox.next_due(due) is None

    outbox.log(job, 0, ["three"], now=20.0)
    outbox.hurry(20.0)
    assert lines_of(outbox.take(20.0)) == ["three"]

    many = [str(number) for number in range(LINES_PER_MESSAGE)]
    outbox.log(job, 0, many, now=30.0)
    assert lines_of(outbox.take(30.0)) == many


def test_lines_without_text_are_in_messages_that_the_master_receives() -> None:
    outbox = Outbox(Incarnation("0123"))
    lines = Tail().feed(b"\xff" * LINE_BYTES * 2 * LINES_PER_MESSAGE)
    outbox.log(JobId("demo-1"), 0, lines, now=10.0)
    messages = outbox.take(10.0)
    assert lines_of(messages) == lines == ["\ufffd" * LINE_BYTES] * 2 * LINES_PER_MESSAGE
    assert max(message.ByteSize() for message in messages) <= MOST_RECEIVED_BYTES


def test_an_answer_that_the_master_would_refuse_is_told_instead() -> None:
    outbox = Outbox(Incarnation("0123"))
    outbox.examined(1, Marks(found={"/shared": ("n1",) * 5000}))
    (message,) = outbox.take(0.0)
    told = read_answer(message.examined)
    assert isinstance(told, Unable)
    assert "5000 items are more than 4096" in told.reason


def reported(what: PhaseReached | PeerLost) -> WorkerReport:
    return WorkerReport(job_id=JobId("demo-1"), slot=0, incarnation=Incarnation("abcd"), what=what)


def test_phases_wait_for_others_and_tell_for_how_long() -> None:
    outbox = Outbox(Incarnation("0123"))
    generation = Generation(2)
    outbox.report(reported(PhaseReached(generation=generation, phase="aborted")), 10.0)
    outbox.report(reported(PhaseReached(generation=generation, phase="transferred")), 10.125)
    assert outbox.take(10.125) == []
    assert outbox.next_due(10.125) == 10.0 + GATHER_REPORTS_S
    told = [read_report(message.report).what for message in outbox.take(10.25)]
    assert [(what.phase, what.seconds_ago) for what in told if isinstance(what, PhaseReached)] == [
        ("aborted", 0.25),
        ("transferred", 0.125),
    ]
    assert outbox.next_due(10.25) is None


def test_what_the_master_acts_on_takes_what_waits_along() -> None:
    outbox = Outbox(Incarnation("0123"))
    generation = Generation(2)
    outbox.report(reported(PhaseReached(generation=generation, phase="transferred")), 10.0)
    outbox.status(NodeStatus(generation=generation), 10.0, hold_s=HOLD_S)
    assert outbox.take(10.0) == []
    outbox.report(reported(PeerLost(generation=generation, step=3, detail="closed")), 10.0)
    assert [message.WhichOneof("body") for message in outbox.take(10.0)] == [
        "report",
        "report",
        "status",
    ]


@pytest.mark.parametrize("hold_s", [0.0, HOLD_S])
def test_the_way_into_a_plan_is_told_with_its_first_step(hold_s: float) -> None:
    outbox, generation = Outbox(Incarnation("0123")), Generation(2)
    outbox.status(NodeStatus(), 9.0, hold_s=hold_s)
    outbox.report(reported(PhaseReached(generation=generation, phase="transferred")), 10.0)
    outbox.status(NodeStatus(generation=generation), 10.0, hold_s=hold_s)
    assert outbox.take(10.0) == []
    outbox.record(JobId("demo-1"), record(5, generation), 10.1)
    told = [message.WhichOneof("body") for message in outbox.take(10.1)]
    assert told == ["report", *([] if hold_s else ["records"]), "status"]


def test_a_status_with_more_than_the_plan_in_it_is_sent_at_once() -> None:
    outbox = Outbox(Incarnation("0123"))
    outbox.status(NodeStatus(leaving=True), 10.0, hold_s=HOLD_S)
    assert [message.WhichOneof("body") for message in outbox.take(10.0)] == ["status"]


def test_an_agent_that_ends_sends_what_waits() -> None:
    outbox = Outbox(Incarnation("0123"))
    outbox.report(reported(PhaseReached(generation=Generation(2), phase="joined")), 10.0)
    outbox.hurry(10.0)
    assert len(outbox.take(10.0)) == 1
