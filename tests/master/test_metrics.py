"""What the master counts and reads for its metrics, without a cluster."""

import pytest

from oobleck.master.events.jobs import JobCancelled
from oobleck.master.events.nodes import NodeLost
from oobleck.master.metrics.tally import Tally
from oobleck.master.state.cluster import ClusterState
from oobleck.planner.ids import Incarnation, JobId, NodeName

LOST = NodeLost(
    node=NodeName("n1"), incarnation=Incarnation("a"), cause="lease", reason="silent", detect_s=1.0
)


def test_an_event_that_cannot_be_counted_ends_no_master(caplog: pytest.LogCaptureFixture) -> None:
    tally, state = Tally(), ClusterState()
    unknown = JobCancelled(job_id=JobId("gone-1"))
    for event in (unknown, LOST, unknown):
        tally.note(state, event)
    assert tally.nodes_lost["lease"] == 1
    (told,) = (record for record in caplog.records if record.levelname == "ERROR")
    assert told.exc_info is not None
