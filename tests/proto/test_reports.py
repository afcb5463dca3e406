"""Whatever a worker says, its agent's messages are not refused for it."""

import pytest

from oobleck.core.codec import encode
from oobleck.core.ids import Generation, Incarnation, JobId
from oobleck.core.messages import Failed, LinkMeasured, Measured, PeerLost, Restored, SaveFailed
from oobleck.proto import control_pb2 as pb
from oobleck.proto.bounds import check_bounds
from oobleck.proto.reports import read_report, report_bytes
from oobleck.proto.status import read_status, status_message
from oobleck.proto.types import Happening, Hung, NodeStatus, WorkerExited, WorkerReport

#: Some libraries put a whole batch into the text of an exception.
LONG = "the begin " + "1.0, " * 100_000 + "the end"
GENERATION = Generation(1)

SAID: tuple[Happening, ...] = (
    WorkerExited(pid=1, exit_code=1, signal=None, log_tail=LONG),
    Hung(reason=LONG, seconds=8.0),
    PeerLost(generation=GENERATION, step=1, detail=LONG),
    Failed(kind="user", message=LONG),
    Measured(attempt=1, measurement=None, problem=LONG),
    LinkMeasured(attempt=1, scope="inter_node", link=None, problem=LONG),
    SaveFailed(what="output", step=1, reason=LONG),
    Restored(generation=GENERATION, step=1, path="saved", passed_over=(LONG,)),
)


@pytest.mark.parametrize("what", SAID, ids=lambda what: type(what).__name__)
def test_a_report_of_any_length_gets_through(what: Happening) -> None:
    report = WorkerReport(
        job_id=JobId("demo-1"),
        slot=0,
        incarnation=Incarnation("abcd"),
        what=what,
    )
    message = pb.AgentMessage(report=report_bytes(report))
    check_bounds(message)
    told = str(read_report(message.report).what)
    # What a worker printed last says most, and of a reason what it begins with.
    printed = isinstance(what, WorkerExited)
    assert ("the end" in told, "the begin" in told) == (printed, not printed)
    assert len(told) < (1 << 17 if printed else 1500)


def test_so_does_the_trouble_of_a_node() -> None:
    message = status_message(NodeStatus(trouble=LONG))
    check_bounds(message)
    trouble = read_status(message).trouble
    assert trouble.startswith("the begin")
    assert len(trouble.encode()) <= 1024


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"type": "exited", "pid": 1, "exit_code": 1, "signal": 9}, "exit_code: a process ends"),
        ({"type": "exited", "pid": 1, "exit_code": None, "signal": None}, "exit_code: a process"),
        (
            {
                "type": "link_measured",
                "attempt": 1,
                "scope": "intra_node",
                "link": {"scope": "inter_node", "latency_s": 1e-4, "bytes_per_s": 1e9},
            },
            "scope: intra_node, and the link is inter_node",
        ),
        (
            {
                "type": "evaluated",
                "record": {
                    "step": 0,
                    "loss": 2.0,
                    "samples": 4,
                    "generation": 1,
                    "seconds": 0.1,
                    "time": 1.7e9,
                },
            },
            "step: 0 is below 1",
        ),
    ],
)
def test_what_cannot_have_happened_is_refused(what: dict[str, object], reason: str) -> None:
    told = {"job_id": "demo-1", "slot": 0, "incarnation": "abcd", "what": what}
    with pytest.raises(ValueError, match=rf"^report: .*{reason}"):
        read_report(encode(told))
