"""`oobleck.local`: a real cluster from Python, a node that dies in it, and that nothing stays."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import oobleck
from bench.support.preloaded import Preloaded
from support.waiting import PATIENCE_S, all_gone

pytestmark = pytest.mark.cluster


def test_each_step_comes_once_while_a_node_is_killed(text: str, tmp_path: Path) -> None:
    job = {
        "name": "tiny",
        "model": {"layers": 2, "hidden": 16, "heads": 2, "sequence_length": 16},
        "data": {"text": [text]},
        "training": {"steps": 100_000, "global_batch": 8, "microbatch": 1},
        "fault_tolerance": 1,
        "profile": "estimate",
        "checkpoint": {"path": str(tmp_path / "saved")},
    }
    others = set(psutil.Process().children(recursive=True))
    family: list[psutil.Process] = []
    folders: list[Path] = []

    def interrupted() -> None:
        with oobleck.local(nodes=2) as cluster:
            folders.append(cluster.state_dir)
            try_out(cluster, job, family)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    all_gone(set(family) - others)
    assert not folders[0].exists()


def try_out(
    cluster: oobleck.LocalCluster, job: dict[str, Any], family: list[psutil.Process]
) -> None:
    """`family`: gets all processes of the cluster."""
    client = cluster.client
    assert sorted(cluster.nodes) == ["n1", "n2"]
    tiny = client.submit(job)
    steps = []
    killed = cancelled = False
    for record in client.metrics(tiny, follow=True):
        steps.append(record.step)
        assert record.loss is not None
        if not killed:
            killed = True
            assert client.checkpoint(tiny).path.startswith(job["checkpoint"]["path"])
            family += psutil.Process().children(recursive=True)
            cluster.kill("n2")
            with pytest.raises(oobleck.NotFound, match="running: n1"):
                cluster.kill("n2")
        if record.generation > 1 and not cancelled:
            cancelled = True
            client.cancel(tiny)
    assert steps == list(range(1, len(steps) + 1))
    assert cancelled
    told = [event["event"] for event in client.events(tiny)]
    assert "node_lost" in told
    assert "reconfigured" in told
    family += psutil.Process().children(recursive=True)


_PROGRAM = """
import time, oobleck
with oobleck.local(nodes=1):
    print("ready", flush=True)
    time.sleep(1000)
"""


def test_nothing_outlives_a_process_that_is_killed(
    preloaded: Preloaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", preloaded.python_path)
    command = [sys.executable, "-c", _PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            family = psutil.Process(process.pid).children(recursive=True)
            assert len(family) >= 3
        finally:
            process.kill()
            process.wait(PATIENCE_S)
    all_gone(family)


_NOTEBOOK = """
import oobleck
block = oobleck.local(nodes=1)
cluster = block.__enter__()
raise SystemExit(f"{cluster.state_dir} is in use")
"""


def test_a_program_may_end_within_the_block(
    preloaded: Preloaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", preloaded.python_path)
    command = [sys.executable, "-c", _NOTEBOOK]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    (line,) = ended.stderr.splitlines()
    folder, _, said = line.partition(" ")
    assert (said, ended.returncode) == ("is in use", 1)
    assert not Path(folder).exists()


def test_a_cluster_that_cannot_start_says_why() -> None:
    with pytest.raises(oobleck.Refused, match=r"no local cluster: .*nodes"), oobleck.local(nodes=0):
        pass
