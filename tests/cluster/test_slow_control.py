"""An agent whose way to the master is slow, breaks, or gets stuck, while its data flow."""

from pathlib import Path

import pytest

from bench.support.cluster import LocalCluster
from support.clusters import bring_into
from support.proxy import Proxy

# Longer than any wait in vain, which ends with a report.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def go_on(cluster: LocalCluster, job_id: str, steps: int = 20) -> None:
    cluster.wait_step(job_id, cluster.last_step(job_id) + steps)


def test_training_does_not_wait_for_a_bad_way_to_the_master(
    small_cluster: LocalCluster, text: str, tmp_path: Path
) -> None:
    cluster = small_cluster
    cluster.kill_node("n3")
    job_id = cluster.submit(
        {
            "name": "far",
            "model": {"layers": 2, "hidden": 16, "heads": 2, "sequence_length": 16},
            "data": {"text": [text]},
            "training": {"steps": 1_000_000, "global_batch": 6, "microbatch": 2},
            "fault_tolerance": 1,
            "profile": "estimate",
        }
    )
    cluster.wait_step(job_id, 3)
    with Proxy(cluster.address) as proxy:
        bring_into(cluster, job_id, "n3", "--master", proxy.address)
        joined = "its first step"
        cluster.wait(lambda: bool(cluster.events(job_id, "reconfigured")), joined)
        before, workers = cluster.status(job_id)["generation"], cluster.worker_pids()

        proxy.delay_s, proxy.bytes_per_s = 0.3, 20_000
        go_on(cluster, job_id)
        assert proxy.cut() > 0
        go_on(cluster, job_id)
        proxy.delay_s, proxy.bytes_per_s = 0.0, None
        cluster.wait(lambda: "n3" in cluster.live(), "n3 to be back", poll_s=0.1)
        assert cluster.status(job_id)["generation"] == before
        assert cluster.worker_pids() == workers

        with proxy.stalled():
            lost = "n3 to be given up"
            cluster.wait(lambda: bool(cluster.events(job_id, "node_lost")), lost)
            go_on(cluster, job_id)
        cluster.wait(
            lambda: cluster.events(job_id, "reconfigured")[-1]["nodes_joined"] == ["n3"],
            "the return of n3",
        )
        go_on(cluster, job_id)
    steps = [line["step"] for line in cluster.metrics(job_id)]
    assert steps == list(range(1, len(steps) + 1))
