"""Real clusters for the tests: started once per shape, given back whole by every test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.cluster import LocalCluster


@pytest.fixture
def text() -> str:
    """A real text that every checkout has."""
    return str(Path(__file__).parents[2] / "LICENSE")


@pytest.fixture
def small_cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(3, state_dir=tmp_path / "state") as cluster:
        yield cluster
