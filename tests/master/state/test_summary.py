"""Sentences about what failed say why, as the event does."""

from oobleck.master.state.incident import Setback
from oobleck.master.state.incident_summary import headline


def test_a_node_that_trains_an_unknown_job_was_not_started_anew() -> None:
    reason = "it trains job other-1, which this master does not know"
    setback = Setback(
        kind="agent restarted", node="n1", reason=reason, evidence_at=1.0, declared_at=1.0
    )
    assert headline(setback) == f"node n1 was lost: {reason}"
