"""The operator's drill kills nodes and the master, and starts them again, while a job trains."""

import os
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.support.client import BIN
from bench.support.drill import Drill
from bench.support.netcluster import HEAD, NetCluster
from bench.support.network import unusable
from support.faulty import assert_equal_to_reference, job

pytestmark = [pytest.mark.soak, pytest.mark.cluster, pytest.mark.timeout(900)]

KINDS = {"kill-node", "kill-master"}
#: With this seed both come, more than once.
SCHEDULE = ("--seed", "1", "--mtbf", "10s", "--for", "40s")


def on_the_masters_host(cluster: NetCluster, *arguments: str) -> str:
    """What the operator's command says there: it looks for the master among its own ports."""
    assert cluster.credentials is not None
    shown = {"OOBLECK_MASTER": cluster.address, "OOBLECK_CREDENTIALS": str(cluster.credentials)}
    done = subprocess.run(
        [*cluster.net.on(HEAD), str(BIN / "oobleck"), *arguments],
        env={**os.environ, **shown},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_drill_kills_nodes_and_the_master(tmp_path: Path) -> None:
    if reason := unusable():
        pytest.skip(reason)
    with NetCluster(4, state_dir=tmp_path / "state", bytes_per_s=250_000) as cluster:
        drill = Drill(cluster, job(checkpoints=tmp_path / "saved"))
        drill.settle("at the start")
        wishes = tmp_path / "wishes"
        wishes.mkdir()
        # Started again by the cluster, which knows where, and ends them.
        again = ("--restart-command", f"touch {wishes}/{{node}}")
        again += ("--restart-master", f"touch {wishes}/master")
        chaos = ("chaos", drill.job_id, "--kinds", ",".join(sorted(KINDS)), *SCHEDULE, *again)
        planned = on_the_masters_host(cluster, *chaos, "--dry-run")
        assert all(kind in planned for kind in KINDS)
        with ThreadPoolExecutor(1) as operator:
            drilled = operator.submit(on_the_masters_host, cluster, *chaos)
            while not drilled.done() or any(wishes.iterdir()):
                for wish in sorted(wishes.iterdir()):
                    wish.unlink()
                    if wish.name == "master":
                        cluster.start_master()
                    else:
                        cluster.start_node(wish.name)
                time.sleep(0.05)
        told = drilled.result()
        struck = re.findall(r"(kill-\S+) .*\(pid ", told)
        assert set(struck) == KINDS
        assert told.count("goes on; longest time without a new step") == len(struck)
        drill.settle("after the drill")
        lost = cluster.events(drill.job_id, "node_lost")
        assert len(lost) == struck.count("kill-node")
        cluster.oobleck("cancel", drill.job_id)
        assert cluster.wait_end(drill.job_id) == "cancelled"
        assert_equal_to_reference(drill)
