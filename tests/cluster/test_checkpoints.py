"""Checkpoints of a whole cluster: on demand, when nobody has the model any more, and resumed."""

import json
import os
import signal
from pathlib import Path

import pytest

from bench.support.cluster import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def job(text: str, path: Path, steps: int) -> dict[str, object]:
    return {
        "name": "kept",
        "model": {"layers": 2, "hidden": 16, "heads": 2, "sequence_length": 16},
        "data": {"text": [text]},
        "training": {"steps": steps, "global_batch": 8, "microbatch": 2, "precision": "fp64"},
        "profile": "estimate",
        "checkpoint": {"path": str(path), "every": 100_000, "at_end": False},
    }


def workers(cluster: LocalCluster) -> list[int]:
    return [worker["pid"] for node in cluster.nodes().values() for worker in node["workers"]]


def test_taken_on_demand_gone_back_to_when_all_is_lost_and_resumed(
    small_cluster: LocalCluster, text: str, tmp_path: Path
) -> None:
    cluster = small_cluster
    job_id = cluster.submit(job(text, tmp_path, 100_000))
    cluster.wait_step(job_id, 3)
    step, path = cluster.oobleck("checkpoint", job_id).stdout.removeprefix("step ").split()
    assert Path(path).parent == tmp_path
    (saved,) = cluster.events(job_id, "checkpoint_saved")
    assert (saved["step"], saved["path"], saved["request"]) == (int(step), path, 1)

    cluster.wait_step(job_id, int(step) + 3)
    for pid in workers(cluster):
        os.kill(pid, signal.SIGKILL)
    cluster.wait(lambda: bool(cluster.events(job_id, "restored")), "the checkpoint takes over")
    (restored,) = cluster.events(job_id, "restored")
    assert (restored["step"], restored["path"]) == (int(step), path)
    reached = int(step) + restored["lost_steps"]
    assert reached >= int(step) + 3
    cluster.wait_step(job_id, reached + 3)
    steps = [line["step"] for line in cluster.metrics(job_id)]
    assert steps == list(range(1, len(steps) + 1))
    told = cluster.oobleck("cancel", job_id, "--checkpoint").stdout.splitlines()
    assert told[0] == f"{job_id} cancelled"
    first, step, path = step, *told[1].removeprefix("newest checkpoint: step ").split()
    assert int(step) >= reached + 3
    assert Path(path, "manifest.json").exists()

    listed, before = json.loads(cluster.oobleck("checkpoint", "list", job_id, "--json").stdout)
    assert (listed["step"], listed["path"], listed["state"]) == (int(step), path, "complete")
    assert before["step"] == int(first)
    assert cluster.oobleck("checkpoint", "verify", str(tmp_path)).stdout.endswith("ok\n")
    again = cluster.submit(job(text, tmp_path, int(step) + 5))
    assert cluster.wait_end(again) == "succeeded", cluster.end_of(again)
    assert [e["step"] for e in cluster.events(again, "resumed")] == [int(step)]
    steps = [line["step"] for line in cluster.metrics(again)]
    assert steps == list(range(int(step) + 1, int(step) + 6))
    victim = next(Path(path).glob("layer-*"))
    victim.write_bytes(victim.read_bytes()[:-1])
    done = cluster.oobleck("checkpoint", "verify", path, check=False)
    assert done.returncode == 1
    assert f"{victim.name}: has " in done.stdout

    refused = cluster.oobleck("checkpoint", job_id, check=False)
    assert refused.returncode == 2
    assert "is cancelled: it trains no more" in refused.stderr
    refused = cluster.oobleck("cancel", job_id, "--checkpoint", check=False)
    assert f"no checkpoint: {job_id} is cancelled and cannot take one" in refused.stderr
