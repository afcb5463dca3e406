"""Real clusters for the tests: started once per shape, given back whole by every test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.support.cluster import LocalCluster
from bench.support.preloaded import Preloaded
from support.clusters import PATIENT, end_jobs, make_whole
from support.folders import TEXT

#: Faults in jobs of these names alone, since agents learn of faults when they start.
FAULTS = [
    {
        "worker": {"node": "n2", "slot": 0},
        "point": "before:measure",
        "job": "bereaved",
        "action": "kill_node",
    }
]


@pytest.fixture
def text() -> str:
    """A real text that every checkout has."""
    return TEXT


@pytest.fixture(scope="package")
def standing_cluster(
    tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded
) -> Iterator[LocalCluster]:
    state_dir = tmp_path_factory.mktemp("standing") / "state"
    options = (*PATIENT, "--master-flag=--metrics-listen=127.0.0.1:0")
    with LocalCluster(
        3, state_dir=state_dir, fault_plan=FAULTS, options=options, preloaded=preloaded
    ) as cluster:
        yield cluster


@pytest.fixture
def small_cluster(standing_cluster: LocalCluster) -> Iterator[LocalCluster]:
    """Three nodes without a job, whatever the test before has left."""
    make_whole(standing_cluster, {"n1", "n2", "n3"})
    yield standing_cluster
    end_jobs(standing_cluster)


@pytest.fixture(scope="package")
def standing_wide_cluster(
    tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded
) -> Iterator[LocalCluster]:
    state_dir = tmp_path_factory.mktemp("wide") / "state"
    with LocalCluster(
        2, state_dir=state_dir, workers_per_node=2, options=PATIENT, preloaded=preloaded
    ) as cluster:
        yield cluster


@pytest.fixture
def wide_cluster(standing_wide_cluster: LocalCluster) -> Iterator[LocalCluster]:
    """Two nodes of two workers each, without a job."""
    make_whole(standing_wide_cluster, {"n1", "n2"}, "--workers", "2")
    yield standing_wide_cluster
    end_jobs(standing_wide_cluster)


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """Two nodes just as an operator starts them, for a test that takes the cluster itself down or
    looks at all of its processes."""
    with LocalCluster(2, state_dir=tmp_path / "state", options=PATIENT) as cluster:
        yield cluster
