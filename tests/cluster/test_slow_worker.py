"""A worker that gets less of a processor than the others: operators see it, and when it is over."""

import json

import pytest

from bench.support.cluster import LocalCluster
from bench.support.throttle import throttled

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

#: Of a processor; the slow one has much less.
FAIR, LITTLE = 0.25, 0.08


def job(text: str) -> dict[str, object]:
    return {
        "name": "throttled",
        "model": {"kind": "gpt", "layers": 4, "hidden": 64, "heads": 2, "sequence_length": 32},
        "data": {"text": [text]},
        "training": {"steps": 100_000, "global_batch": 8, "microbatch": 1},
        "fault_tolerance": 1,
        "profile": "estimate",
    }


def rate(cluster: LocalCluster) -> float:
    """Of the slow one."""
    return float(cluster.nodes()["n2"]["workers"][1]["rate"])


def test_a_throttled_worker_is_slow_until_it_is_not(wide_cluster: LocalCluster, text: str) -> None:
    cluster = wide_cluster
    job_id = cluster.submit(job(text))
    cluster.wait_step(job_id, 1)
    with throttled(cluster.worker_pids(), FAIR) as shares:
        assert rate(cluster) == 1.0

        shares["n2/1"].set(LITTLE)
        cluster.wait(lambda: rate(cluster) < 0.7, "a slow worker", poll_s=0.2)
        nodes = json.loads(cluster.oobleck("nodes", "--json").stdout)
        assert [w["rate"] for w in nodes[1]["workers"]] == [1.0, rate(cluster)]
        shares["n2/1"].set(FAIR)
        cluster.wait(lambda: rate(cluster) == 1.0, "its pace of before", poll_s=0.2)

    told = cluster.events(job_id, "rate_changed")
    assert {(record["node"], record["slot"]) for record in told} == {("n2", 1)}
    assert told[0]["rate"] < 0.7
    assert told[-1]["rate"] == 1
    text_lines = cluster.oobleck("events", job_id).stdout
    assert "n2 worker 1 computes at 0." in text_lines
    assert "n2 worker 1 computes at the others' pace again" in text_lines
