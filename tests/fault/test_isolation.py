"""A node whose data network alone is cut, for longer than any meeting takes."""

from pathlib import Path

import pytest

from bench.support.client import Record
from bench.support.drill import PATIENCE_S, Drill
from bench.support.netcluster import NetCluster
from bench.support.network import unusable
from support.clusters import failures
from support.faulty import assert_equal_to_reference, job

pytestmark = [pytest.mark.soak, pytest.mark.cluster, pytest.mark.timeout(900)]

REST = ["n1", "n2", "n3"]
CUT = "n4"


def test_a_job_goes_on_without_a_node_that_is_cut_off(tmp_path: Path) -> None:
    if reason := unusable():
        pytest.skip(reason)
    options = ("--detection", "fast", "--quarantine-s", "15")
    with NetCluster(
        4, state_dir=tmp_path / "state", master_options=options, bytes_per_s=250_000
    ) as cluster:
        drill = Drill(cluster, job(checkpoints=tmp_path / "saved"))
        drill.settle("at the start")
        cluster.net.part([CUT], REST)

        def failed() -> list[Record]:
            return failures(cluster.events(drill.job_id))

        cluster.wait(lambda: bool(failed()), "the job to go on", PATIENCE_S, poll_s=0.2)
        cause = failed()[0]["root_cause"]
        assert (cause["kind"], cause["node"]) == ("network cut", CUT)
        assert cause["reason"].startswith(f"data network of {CUT} is cut: ")
        # Its agent was heard all the time.
        losses = [e for e in cluster.events(drill.job_id) if e["event"] == "node_lost"]
        assert losses == []
        cluster.wait_step(drill.job_id, cluster.last_step(drill.job_id) + 3)
        cluster.net.heal()
        drill.settle("after the link was whole again")
        cluster.oobleck("cancel", drill.job_id)
        assert cluster.wait_end(drill.job_id) == "cancelled"
        assert_equal_to_reference(drill)
