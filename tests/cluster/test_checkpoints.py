"""Checkpoints of a whole cluster: on demand, when nobody has the model any more, and resumed."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.support.cluster import LocalCluster
from bench.support.scratch import mount_memory, unmount
from support.visitor import Dashboard

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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("to mount a disk needs root")
    disk = tmp_path / "disk"
    mount_memory(disk, 8)
    try:
        yield disk
    finally:
        unmount(disk)


def fill(path: Path) -> None:
    """Write the file until the disk has no room."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)) == 4096:
            pass


def test_checkpoints_that_fail_are_told_wherever_an_operator_looks(
    small_cluster: LocalCluster, text: str, tmp_path: Path, small_disk: Path
) -> None:
    cluster = small_cluster
    saved, ballast = small_disk / "saved", small_disk / "ballast"
    asked = job(text, saved, 100_000)
    job_id = cluster.submit({**asked, "checkpoint": {"path": str(saved), "every": 20}})
    cluster.wait_step(job_id, 3)
    fill(ballast)
    cluster.wait(lambda: bool(cluster.status(job_id)["save_failure"]), "a save that fails")
    why = f"not saved: cannot write to {saved}: "

    def shown() -> list[str]:
        with Dashboard(tmp_path, "--master", cluster.address) as dashboard:
            visitor = dashboard.visitor()
            return [visitor.get(path).text for path in (f"/jobs/{job_id}", "/")]

    red = ('<div class="tile bad"><dt>checkpoint</dt>', '<td class="minor bad-text">')
    for verb in (("jobs",), ("status", job_id)):
        told = cluster.oobleck(*verb).stdout
        assert why in told
        assert "No space left on device" in told
    for page, marked in zip(shown(), red, strict=True):
        assert marked in page
        assert why in page
    logs = "".join(path.read_text() for path in (cluster.state_dir / "log").glob("master*"))
    (first, *_) = [line for line in logs.splitlines() if "could not be written" in line]
    assert " WARNING " in first
    assert "No space left on device" in first

    ballast.unlink()
    cluster.wait(lambda: not cluster.status(job_id)["save_failure"], "a checkpoint")
    assert why not in cluster.oobleck("jobs").stdout
    for page, marked in zip(shown(), red, strict=True):
        assert marked not in page
    cluster.oobleck("cancel", job_id)
    assert cluster.wait_end(job_id) == "cancelled"
