"""Nodes that go away on purpose: no step is done again, and the training is the same."""

import json
import re
import signal
from pathlib import Path

import psutil
import pytest

from bench.support.client import Record
from bench.support.cluster import LocalCluster
from oobleck.core.job.file import parse_job
from support.clusters import end_jobs, make_whole
from support.reference import train_reference
from support.visitor import Dashboard
from support.waiting import all_gone

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def job(text: str, steps: int = 100_000) -> dict[str, object]:
    """Pipelines have two nodes or more: three make one, and every layer is with one node alone."""
    return {
        "name": "moving",
        "model": {"kind": "gpt", "layers": 4, "hidden": 16, "heads": 2, "sequence_length": 8},
        "data": {"text": [text]},
        "training": {"steps": steps, "global_batch": 4, "microbatch": 1, "precision": "fp64"},
        "fault_tolerance": 0,
        "resources": {"min_nodes_per_pipeline": 2},
        "profile": "estimate",
    }


def state_of(cluster: LocalCluster, node: str) -> str:
    return str(cluster.nodes()[node]["state"])


def moves(cluster: LocalCluster, job_id: str) -> list[Record]:
    return cluster.events(job_id, "reconfigured")


def put_back(cluster: LocalCluster, job_id: str, node: str) -> None:
    """Undrain it while training is held up, until the plan with it is made."""
    before = cluster.status(job_id)["generation"]
    with cluster.frozen("n1"):
        cluster.oobleck("node", "undrain", node)
        cluster.wait(
            lambda: cluster.status(job_id)["generation"] > before, f"a plan with {node}", poll_s=0.1
        )


def test_nodes_are_drained_and_agents_told_to_end(small_cluster: LocalCluster, text: str) -> None:
    cluster = small_cluster
    job_id = cluster.submit(job(text))
    cluster.wait_step(job_id, 3)

    told = cluster.oobleck("node", "drain", "n3", "--reason", "new memory", "--wait").stdout
    assert told.endswith("n3 drained: new memory\n")
    (drained,) = moves(cluster, job_id)
    assert (drained["cause"], drained["boundary"]) == ("node drained", True)
    cluster.wait(lambda: cluster.nodes()["n3"]["workers"] == [], "n3 idle", poll_s=0.1)

    # One node is too few: the next one is kept, and goes when n3 is back. The job must not end
    # while the command waits.
    short = ("--wait", "--timeout", "1s")
    with cluster.frozen("n1"):
        refused = cluster.oobleck("node", "drain", "n2", *short, check=False)
    assert refused.stdout.startswith("n2 draining: ")
    assert refused.stderr.startswith("oobleck: --timeout 1s: n2 draining: ")
    assert refused.returncode == 1
    kept = f"kept so far: job {job_id} needs it"
    cluster.wait(lambda: kept in cluster.nodes()["n2"]["reason"], "n2 kept", poll_s=0.1)
    put_back(cluster, job_id, "n3")
    cluster.wait(lambda: state_of(cluster, "n2") == "drained", "n2 drained", poll_s=0.1)

    # As before a machine is taken back.
    put_back(cluster, job_id, "n2")
    agent = psutil.Process(cluster.agents["n3"])
    agent.send_signal(signal.SIGTERM)
    cluster.wait(lambda: state_of(cluster, "n3") == "left", "the end of n3", poll_s=0.1)
    assert cluster.nodes()["n3"]["reason"] == "its agent has ended, as it was told to"
    all_gone([agent])

    cluster.oobleck("cancel", job_id)
    assert cluster.wait_end(job_id) == "cancelled"
    assert [record["boundary"] for record in moves(cluster, job_id)] == [True] * 4
    assert all(r["fed_bytes"] == r["received_bytes"] > 0 for r in moves(cluster, job_id))
    assert [record["redo_step"] for record in moves(cluster, job_id)] == [None] * 4
    metrics = cluster.metrics(job_id)
    expected = train_reference(parse_job(json.dumps(job(text, len(metrics)))))
    assert [line["samples_digest"] for line in metrics] == [
        step.samples_digest for step in expected.steps
    ]
    assert [line["loss"] for line in metrics] == pytest.approx(
        [step.loss for step in expected.steps], rel=1e-12, abs=0
    )


def forgets(cluster: LocalCluster, node: str) -> str:
    """Why the node is not forgotten; empty: it is."""
    done = cluster.oobleck("node", "forget", node, node, check=False)  # twice is once
    assert (done.stdout == f"{node} is forgotten\n") == (done.returncode == 0)
    return done.stderr


def test_a_node_that_was_taken_away_is_no_fault_and_can_be_forgotten(
    small_cluster: LocalCluster, text: str, tmp_path: Path
) -> None:
    cluster = small_cluster
    job_id = cluster.submit(job(text))
    cluster.wait_step(job_id, 3)
    assert "node n3 is live, and kept: its agent is not known to have ended" in forgets(
        cluster, "n3"
    )
    cluster.oobleck("node", "drain", "n3", "--reason", "sold", "--wait")
    assert "node n3 is drained, and kept" in forgets(cluster, "n3")
    cluster.kill_node("n3")
    cluster.wait(lambda: state_of(cluster, "n3") == "left", "the end of n3", poll_s=0.1)

    told = json.loads(cluster.oobleck("doctor", "--json", check=False).stdout)["findings"]
    (about,) = [one for one in told if one.get("node") == "n3"]
    assert (about["level"], about["fix"]) == (
        "pass",
        "oobleck node forget n3, if it is not to come back",
    )
    with Dashboard(tmp_path, "--master", cluster.address) as dashboard:
        page = dashboard.visitor("operator").get("/").text
    rows = dict(re.findall(r'<tr id="node-(n\d)"(.*?)</tr>', page, re.DOTALL))
    assert "nodes/n2/drain" in rows["n2"]
    assert 'class="quiet"' in rows["n3"]
    assert "drain" not in re.sub(r"drained, also when it is back", "", rows["n3"])
    assert forgets(cluster, "n3") == ""
    assert "n3" not in cluster.nodes()
    assert "no node 'n3'" in forgets(cluster, "n3")

    # What a job may still need is kept.
    cluster.kill_node("n2")
    cluster.wait(lambda: state_of(cluster, "n2") == "lost", "the loss of n2", poll_s=0.1)
    assert f"node n2 is lost, and kept: job {job_id} may still need" in forgets(cluster, "n2")
    cluster.oobleck("cancel", job_id)
    assert cluster.wait_end(job_id) == "cancelled"
    assert forgets(cluster, "n2") == ""


def test_a_drain_that_costs_the_fault_tolerance_wants_force(
    small_cluster: LocalCluster, text: str
) -> None:
    cluster = small_cluster
    job_id = cluster.submit({**job(text), "fault_tolerance": 1, "resources": {}})
    cluster.wait_step(job_id, 3)
    unknown = cluster.oobleck("node", "drain", "n2", "n4", check=False)
    assert "no node 'n4'" in unknown.stderr
    assert state_of(cluster, "n2") == "live", "all are drained, or none"
    # Each alone could go; they are asked for together.
    asked = cluster.oobleck("node", "drain", "n2", "n3").stdout.splitlines()
    assert [line.split()[0] for line in asked] == ["n2", "n3"]
    why = f"job {job_id} needs it: without it 0 nodes can be lost, but fault_tolerance is 1"

    def kept() -> list[str]:
        return [name for name in ("n2", "n3") if why in str(cluster.nodes()[name]["reason"])]

    def drained() -> list[str]:
        return [name for name in ("n2", "n3") if state_of(cluster, name) == "drained"]

    cluster.wait(lambda: len(drained()) == 1 and len(kept()) == 1, "one to go", poll_s=0.1)
    (stays,) = kept()
    told = cluster.oobleck("node", "drain", stays).stdout
    assert told.startswith(f"{stays} draining: ")
    assert why in told
    assert f"'oobleck node drain {stays} --force' drains it all the same" in told
    assert cluster.status(job_id)["can_lose"] == 1
    cluster.oobleck("node", "drain", stays, "--force", "--wait")
    assert state_of(cluster, stays) == "drained"
    assert cluster.planned(job_id) == {"n1"}
    cluster.oobleck("cancel", job_id)
    assert cluster.wait_end(job_id) == "cancelled"
    back = cluster.oobleck("node", "undrain", "n2", "n9", "n3", check=False)
    assert [line.split()[0] for line in back.stdout.splitlines()] == ["n2", "n3"]
    assert (back.returncode, "no node 'n9'" in back.stderr) == (3, True)


def test_a_shared_cluster_is_whole_again_whatever_a_failed_test_has_left(
    small_cluster: LocalCluster, text: str
) -> None:
    cluster = small_cluster
    job_id = cluster.submit(job(text))
    cluster.wait_step(job_id, 3)
    cluster.oobleck("node", "drain", "n3", "--wait")
    cluster.kill_node("n3")
    cluster.wait(lambda: state_of(cluster, "n3") == "left", "the end of n3", poll_s=0.1)
    end_jobs(cluster)
    make_whole(cluster, {"n1", "n2", "n3"})
    assert cluster.wait_end(job_id) == "cancelled"
    assert cluster.live() == {"n1", "n2", "n3"}
