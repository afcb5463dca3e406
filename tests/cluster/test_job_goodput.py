"""`oobleck goodput` of a real job that lost a node and later all of its workers."""

import json
import os
import signal
from pathlib import Path

import pytest

from bench.support.client import Record
from bench.support.cluster import LocalCluster
from oobleck.planner.simulate.costs import parse_costs
from support.clusters import end_jobs, job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def goodput(cluster: LocalCluster, job_id: str) -> Record:
    found: Record = json.loads(cluster.oobleck("goodput", job_id, "--json").stdout)
    spent = found["seconds"]
    assert sum(spent.values()) == found["wall_s"]
    for badput in (found["badput"], found["badput_types"]):
        assert spent["useful"] + sum(badput.values()) == found["wall_s"]
    return found


def test_goodput_is_the_time_of_committed_steps_and_the_rest_has_causes(
    small_cluster: LocalCluster, text: str, tmp_path: Path
) -> None:
    cluster = small_cluster
    checkpoint = {"path": str(tmp_path), "every": 100_000, "at_end": False}
    job_id = cluster.submit(job(text, fault_tolerance=1, checkpoint=checkpoint))
    cluster.wait_step(job_id, 5)
    cluster.oobleck("checkpoint", job_id)
    cluster.kill_node("n2")
    cluster.wait(lambda: bool(cluster.events(job_id, "reconfigured")), "the recovery")
    cluster.wait_step(job_id, cluster.last_step(job_id) + 5)
    live = goodput(cluster, job_id)
    assert 0 < live["node_goodput"] < live["goodput"] <= 1
    assert live["seconds"]["stalled"] > 0
    (change,) = cluster.events(job_id, "reconfigured")
    told = cluster.oobleck("goodput", job_id, "--costs").stdout
    costs = parse_costs(told)  # as 'oobleck simulate' reads them
    assert costs.detect_s == change["phases"]["detect"]
    assert costs.meeting_s == change["phases"]["rendezvous"]
    assert "checkpoint_every_s" not in told, "there is one"

    for node in cluster.nodes().values():
        for worker in node["workers"]:
            os.kill(worker["pid"], signal.SIGKILL)
    cluster.wait(lambda: bool(cluster.events(job_id, "restored")), "the checkpoint takes over")
    again = sum(one["lost_steps"] for one in cluster.events(job_id, "restored"))
    cluster.wait_step(job_id, cluster.last_step(job_id) + again + 5)
    end_jobs(cluster)
    found = goodput(cluster, job_id)
    lines, events = cluster.metrics(job_id), cluster.events(job_id)
    began, ended = events[0]["time"], events[-1]["time"]
    assert found["wall_s"] == pytest.approx(ended - began, abs=1e-6)
    # The clock that times a step is not the calendar that dates its end.
    stepped = sum(line["step_seconds"] for line in lines if line["time"] <= ended)
    assert found["seconds"]["useful"] == pytest.approx(stepped, rel=0.02, abs=0.05)
    assert found["ettr"] == found["seconds"]["useful"] / found["wall_s"]
    assert found["returns"] == 1
    assert found["badput"]["redone_checkpoint"] > 0
    assert found["steps"] == len(lines)
    changes = [one["phases"] for one in events if one["event"] == "reconfigured"]
    assert 0 < found["badput"]["meeting"] <= sum(one["rendezvous"] for one in changes) + 1e-6
    shown = cluster.oobleck("goodput", job_id).stdout
    assert f"goodput {100 * found['goodput']:.1f}%" in shown
