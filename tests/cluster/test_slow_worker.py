"""A worker that gets less of a processor than the others: operators see it, and when it is over.
One that gets next to nothing stands by until then, and the training is the same."""

import json

import pytest

from bench.support.cluster import LocalCluster
from bench.support.throttle import throttled
from oobleck.core.job.file import parse_job
from support.reference import train_reference

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

#: Of a processor; the slow one has much less.
FAIR, LITTLE, HARDLY_ANY = 0.25, 0.08, 0.05
#: More than are done, and so few that workers do not wait between them (`bench.support.preloaded`).
STEPS = 9_000


def job(text: str) -> dict[str, object]:
    return {
        "name": "throttled",
        "model": {"kind": "gpt", "layers": 4, "hidden": 64, "heads": 2, "sequence_length": 32},
        "data": {"text": [text]},
        "training": {"steps": STEPS, "global_batch": 8, "microbatch": 1},
        "fault_tolerance": 1,
        "profile": "estimate",
    }


def rate(cluster: LocalCluster) -> float:
    """Of the slow one."""
    return float(cluster.nodes()["n2"]["workers"][1]["rate"])


def test_a_throttled_worker_is_slow_until_it_is_not(wide_cluster: LocalCluster, text: str) -> None:
    cluster = wide_cluster
    # Who has more to do than others, by a plan around the slow one, uses up a quota sooner.
    job_id = cluster.submit({**job(text), "recovery": {"policy": "templates"}})
    cluster.wait_step(job_id, 1)
    with throttled(cluster.worker_pids(), FAIR) as shares:
        assert rate(cluster) == 1.0

        shares["n2/1"].set(LITTLE)
        cluster.wait(lambda: rate(cluster) < 0.7, "a slow worker", poll_s=0.2)
        nodes = json.loads(cluster.oobleck("nodes", "--json").stdout)
        assert [w["rate"] for w in nodes[1]["workers"]] == [1.0, rate(cluster)]
        shares["n2/1"].set(FAIR)
        cluster.wait(lambda: rate(cluster) == 1.0, "its pace of before", poll_s=0.2)

    told = cluster.events(job_id, "rate_changed")
    assert {(record["node"], record["slot"]) for record in told} == {("n2", 1)}
    assert told[0]["rate"] < 0.7
    assert told[-1]["rate"] == 1
    text_lines = cluster.oobleck("events", job_id).stdout
    assert "worker n2/1 computes at 0." in text_lines
    assert "worker n2/1 computes at the others' pace again" in text_lines
    lines = cluster.oobleck("events", job_id, "--incidents", "--json").stdout.splitlines()
    incident = json.loads(lines[0])
    (slow,) = incident["slow"]
    assert (incident["root_cause"]["kind"], incident["outcome"]) == ("slow worker", "recovered")
    assert (slow["worker"], slow["rate"] < 0.7, slow["well"]) == ("n2/1", True, True)
    shown = cluster.oobleck("events", job_id, "--incidents").stdout
    assert f"slow worker n2/1 (rank {slow['ranks'][0]}): 0." in shown


def test_a_worker_that_hardly_runs_stands_by(small_cluster: LocalCluster, text: str) -> None:
    cluster = small_cluster
    wanted = job(text)
    # A micro-batch each: nobody can have fewer and take part.
    training = {"global_batch": 3, "microbatch": 1, "precision": "fp64"}
    job_id = cluster.submit({**wanted, "training": {"steps": STEPS, **training}})
    cluster.wait_step(job_id, 1)

    def state_of_n3() -> tuple[str, bool]:
        """Why it is idle, and whether it is in the plan."""
        here = cluster.status(job_id)["generation"] == cluster.nodes()["n3"]["generation"]
        return str(cluster.nodes()["n3"]["reason"]), here

    def causes() -> list[str]:
        return [record["cause"] for record in cluster.events(job_id, "reconfigured")]

    # To the end, so that none of the others, which give way to all else that runs, is slow as well.
    with throttled(cluster.worker_pids(), FAIR) as shares:
        shares["n3/0"].set(HARDLY_ANY)
        cluster.wait(
            lambda: "stands by: n3/0 computes at" in state_of_n3()[0], "n3 idle", poll_s=0.2
        )
        shares["n3/0"].set(FAIR)
        cluster.wait(lambda: state_of_n3() == ("", True), "n3 in the plan", poll_s=0.2)
        # Until it is fed, the others go on by the plan of before.
        cluster.wait(lambda: causes()[-1:] == ["worker well"], "its first step", poll_s=0.2)
        cluster.wait_step(job_id, cluster.last_step(job_id) + 3)
        cluster.oobleck("cancel", job_id)
        cluster.wait_end(job_id)

    told = [(r["cause"], r["rule"]) for r in cluster.events(job_id, "reconfigured")]
    assert ("worker slow", "stand by") in told
    assert told[-1][0] == "worker well"
    back = cluster.events(job_id, "reconfigured")[-1]
    assert back["fed_bytes"] == back["received_bytes"] > 0
    assert [r["rate"] for r in cluster.events(job_id, "rate_changed") if r.get("alone")][-1:] == [1]
    metrics = cluster.metrics(job_id)
    spec = {**wanted, "training": {"steps": len(metrics), **training}}
    expected = train_reference(parse_job(json.dumps(spec))).steps
    assert [line["samples_digest"] for line in metrics] == [s.samples_digest for s in expected]
    assert [line["loss"] for line in metrics] == pytest.approx(
        [step.loss for step in expected], rel=1e-12, abs=0
    )
