"""Timelines of a job that trains: `oobleck profile --timeline` before and after a node is lost, and
the dashboard's drawing."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.support.cluster import LocalCluster
from support.visitor import Dashboard

pytestmark = pytest.mark.cluster


def timeline(cluster: LocalCluster, job_id: str, path: Path) -> list[dict[str, Any]]:
    cluster.oobleck("profile", "--timeline", str(path), "--job", job_id, "--steps", "2")
    trace = json.loads(path.read_text())
    assert {c["within_us"] for c in trace["otherData"]["clocks"].values()} == {0.0}
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


def threads(events: list[dict[str, Any]]) -> set[tuple[int, int]]:
    return {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}


def test_timeline_of_a_running_job(small_cluster: LocalCluster, text: str, tmp_path: Path) -> None:
    cluster = small_cluster
    job_id = cluster.submit(
        {
            "name": "timed",
            "model": {"layers": 4, "hidden": 32, "heads": 2, "sequence_length": 32},
            "data": {"text": [text]},
            "training": {"steps": 100_000, "global_batch": 8, "microbatch": 1},
            "fault_tolerance": 1,
            "profile": "estimate",
        }
    )
    cluster.wait_step(job_id, 5)
    before = timeline(cluster, job_id, tmp_path / "before.json")
    assert len(threads(before)) == 3
    steps = {e["name"] for e in before if e["name"].startswith("step ")}
    assert len(steps) == 2
    for name in steps:  # the same on every worker, and at the same time
        same = [e for e in before if e["name"] == name]
        assert {(e["pid"], e["tid"]) for e in same} == threads(before)
        assert max(e["ts"] for e in same) < min(e["ts"] + e["dur"] for e in same)
    with Dashboard(tmp_path, "--master", cluster.address) as dashboard:
        operator = dashboard.visitor("operator")
        form = {"steps": "1", "as": "page"}
        page = operator.send(f"/jobs/{job_id}/timeline", **form)
    assert page.status == 200, page.told
    drawn = page.text.partition('<svg class="gantt"')[2]
    lanes = re.split(r">(n\d/0)</text>", drawn)[1:]
    assert lanes[::2] == ["n1/0", "n2/0", "n3/0"]
    for bars in lanes[1::2]:
        assert {"forward", "backward", "vote"} <= set(re.findall(r'<rect class="kind-(\w+)"', bars))
    assert re.search(r"<title>forward \d+: \d+\.\d{3} ms</title>", drawn)
    cluster.kill_node("n3")
    cluster.wait(lambda: bool(cluster.events(job_id, "reconfigured")), "the recovery")
    cluster.wait_step(job_id, int(cluster.metrics(job_id)[-1]["step"]) + 3)
    after = timeline(cluster, job_id, tmp_path / "after.json")
    assert len(threads(after)) == 2
    recovery = {e["name"] for e in after if e.get("cat") == "recovery"}
    named = {"leave", "rendezvous", "agree", "transfer", "first step"}
    assert named <= recovery
    told = " ".join(cluster.oobleck("timeline", job_id).stdout.split())
    phases = re.findall(r"[:,] ([a-z ]+) \d+\.\d ms", told)
    assert named <= set(phases), told  # another plan may have taken effect, without a wait for it
    cluster.oobleck("cancel", job_id)
    cluster.wait_end(job_id)
    refused = cluster.oobleck(
        "profile", "--timeline", str(tmp_path / "no.json"), "--job", job_id, check=False
    )
    assert refused.returncode == 2
    assert f"job {job_id} has ended (cancelled)" in refused.stderr
    assert not (tmp_path / "no.json").exists()
