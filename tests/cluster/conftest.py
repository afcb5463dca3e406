"""Real clusters for the tests: started once per shape, given back whole by every test."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.cluster import ENDED, LocalCluster


@pytest.fixture
def text() -> str:
    """A real text that every checkout has."""
    return str(Path(__file__).parents[2] / "LICENSE")


@pytest.fixture(scope="session")
def standing_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(3, state_dir=tmp_path_factory.mktemp("standing") / "state") as cluster:
        yield cluster


@pytest.fixture
def small_cluster(standing_cluster: LocalCluster) -> LocalCluster:
    """Three nodes without a job, whatever the test before has left."""
    cluster = standing_cluster
    for job in json.loads(cluster.oobleck("jobs", "--json").stdout):
        if job["state"] not in ENDED:
            cluster.oobleck("cancel", job["job_id"])
    wanted = {"n1", "n2", "n3"}
    for name in sorted(set(cluster.agents) - wanted):
        cluster.kill_node(name)
    for name in sorted(wanted - set(cluster.agents)):
        cluster.start_node(name)

    def live() -> set[str]:
        return {name for name, node in cluster.nodes().items() if node["state"] == "live"}

    cluster.wait(lambda: live() == wanted, "three live nodes", poll_s=0.3)
    return cluster


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """Two nodes for a test that takes the cluster itself down."""
    with LocalCluster(2, state_dir=tmp_path / "state") as cluster:
        yield cluster
