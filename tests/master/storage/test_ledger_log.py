"""Lines of the master's log about events: their level, words and fields."""

import logging

import pytest

from oobleck.core.ids import Incarnation, JobId, NodeName
from oobleck.core.messages import SaveFailed
from oobleck.host.log import FieldFormatter
from oobleck.master.events.jobs import JobFailed, JobStarted, JobWaiting, SaveProblem
from oobleck.master.events.nodes import NodeLost
from oobleck.master.events.unions import Journaled
from oobleck.master.storage.ledger import log_event

JOB = JobId("demo-1")


def lost(cause: str) -> NodeLost:
    return NodeLost(
        node=NodeName("n2"),
        incarnation=Incarnation("a"),
        cause=cause,  # type: ignore[arg-type]
        reason="silent",
        detect_s=1.0,
    )


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (lost("lease"), "WARNING {} a node is lost node=n2 cause=lease reason=silent"),
        (lost("left"), "INFO {} a node has left node=n2 cause=left reason=silent"),
        (JobFailed(job_id=JOB, reason="boom"), "ERROR {} the job failed job=demo-1 reason=boom"),
        (
            JobWaiting(job_id=JOB, causes=("a", "b")),
            'WARNING {} the job waits for nodes job=demo-1 reason="a; b"',
        ),
        (
            SaveProblem(job_id=JOB, failed=SaveFailed(what="checkpoint", step=5, reason="full")),
            "WARNING {} the checkpoint could not be written job=demo-1 step=5 reason=full",
        ),
        (JobStarted(job_id=JOB), "INFO {} job started job=demo-1"),
    ],
    ids=["lost", "left", "failed", "waiting", "save", "started"],
)
def test_failures_are_warnings_or_errors_in_words(
    event: Journaled, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        log_event(event)
    (record,) = caplog.records
    _, _, told = FieldFormatter().format(record).partition("Z ")
    assert told == line.format("master.storage.ledger")
