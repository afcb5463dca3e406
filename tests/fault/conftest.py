"""Clusters on hosts of their own, where this machine can have such."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.support.netcluster import NetCluster
from bench.support.network import unusable
from bench.support.preloaded import Preloaded
from support import gates


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded) -> Iterator[NetCluster]:
    """Four nodes with gates; every test leaves them whole."""
    if reason := unusable():
        pytest.skip(reason)
    state_dir: Path = tmp_path_factory.mktemp("fault") / "state"
    # Whoever stands at a gate is stopped, and on a busy machine for longer than a moment.
    patient = ("--hang-s", "15", "--stall-s", "16")
    with NetCluster(
        4,
        state_dir=state_dir,
        fault_plan=gates.rules(),
        master_options=patient,
        # The network is what steps take their time on, so that few of them are to be compared, and
        # the processor is free for whatever else runs.
        bytes_per_s=250_000,
        preloaded=preloaded,
    ) as cluster:
        yield cluster
