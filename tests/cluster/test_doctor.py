"""`oobleck doctor` of a cluster that is well, and beside a job that trains."""

import json
from pathlib import Path

import pytest

from bench.support.cluster import LocalCluster

pytestmark = pytest.mark.cluster


def test_a_cluster_that_is_well_and_a_job_that_trains_on(
    small_cluster: LocalCluster, text: str, tmp_path: Path
) -> None:
    cluster = small_cluster
    saved = tmp_path / "saved"
    saved.mkdir()

    def examine(*options: str, nodes: tuple[str, ...] = ("n1", "n2", "n3")) -> dict[str, set[str]]:
        """Levels by check. Of other tests other nodes may be lost."""
        named = [word for name in nodes for word in ("--node", name)]
        told = cluster.oobleck("doctor", "--json", *named, *options, check=False)
        assert told.returncode == 0, told
        found: dict[str, set[str]] = {}
        for finding in json.loads(told.stdout)["findings"]:
            found.setdefault(finding["check"], set()).add(finding["level"])
        return found

    checks = examine("--checkpoints", str(saved), "--data", text)
    assert {"clock", "versions", "data", "shared", "ports", "bandwidth"} <= {*checks}
    assert "pairs" not in checks
    assert list(saved.iterdir()) == []
    unknown = cluster.oobleck("doctor", "--node", "n9", check=False)
    assert (unknown.returncode, "no node 'n9'" in unknown.stderr) == (3, True)

    job_id = cluster.submit(
        {
            "name": "examined",
            "model": {"layers": 4, "hidden": 32, "heads": 2, "sequence_length": 32},
            "data": {"text": [text]},
            "training": {"steps": 100_000, "global_batch": 8, "microbatch": 1},
            "fault_tolerance": 1,
            "profile": "estimate",
        }
    )
    cluster.wait_step(job_id, 3)
    gently = examine()
    assert ("bandwidth" in gently, "data" in gently, "pairs" in gently) == (False, True, True)
    assert "bandwidth" in examine("--pairs", nodes=("n1", "n2"))
    cluster.wait_step(job_id, cluster.last_step(job_id) + 3)
    lost = [*cluster.events(job_id, "node_lost"), *cluster.events(job_id, "worker_lost")]
    assert not lost, "nobody was lost meanwhile"
    cluster.oobleck("cancel", job_id)
    cluster.wait_end(job_id)
