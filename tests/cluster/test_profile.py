"""Measured profiles on a real cluster: used, stored, and no hindrance when a node dies."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.support.cluster import LocalCluster
from bench.support.preloaded import Preloaded
from oobleck.core.job.file import parse_job
from oobleck.core.profile import format_profile, parse_profile
from oobleck.planner.profile.estimate import estimate_profile
from support.clusters import PATIENT
from support.reference import train_reference

pytestmark = pytest.mark.cluster


def job(text: str, name: str) -> dict[str, object]:
    return {
        "name": name,
        "model": {"layers": 3, "hidden": 32, "heads": 2, "sequence_length": 32},
        "data": {"text": [text]},
        "training": {"steps": 5, "global_batch": 8, "microbatch": 2},
        "fault_tolerance": 1,
    }


def test_a_job_is_measured_once_and_the_next_one_uses_that(
    wide_cluster: LocalCluster, text: str
) -> None:
    cluster = wide_cluster
    first = cluster.submit(job(text, "first"))
    assert cluster.wait_end(first) == "succeeded", cluster.end_of(first)
    kinds = [event["event"] for event in cluster.events(first)]
    assert kinds[:4] == ["submitted", "profiling", "profile", "started"]
    (profiling,) = cluster.events(first, "profiling")
    assert profiling["workers"] == ["n1/0", "n1/1", "n2/0", "n2/1"]
    (chosen,) = cluster.events(first, "profile")
    assert chosen["source"] == "measured"
    stored = cluster.state_dir / "profiles" / f"{chosen['key']}.json"
    assert len(parse_profile(stored.read_bytes()).layers) == 5
    notes = json.loads(stored.read_text())["measured"]
    assert (notes["workers"], notes["intra_node_link"], notes["inter_node_link"]) == (
        4,
        "measured",
        "measured",
    )
    second = cluster.submit(job(text, "second"))
    assert cluster.wait_end(second) == "succeeded", cluster.end_of(second)
    assert cluster.events(second, "profiling") == []
    (again,) = cluster.events(second, "profile")
    assert (again["source"], again["key"]) == ("stored", chosen["key"])
    assert cluster.status(second)["profile"] == "stored"


def test_a_node_that_dies_while_it_measures_is_done_without(
    small_cluster: LocalCluster, text: str
) -> None:
    cluster = small_cluster
    job_id = cluster.submit(job(text, "bereaved"))
    assert cluster.wait_end(job_id) == "succeeded", cluster.end_of(job_id)
    asked = [event["workers"] for event in cluster.events(job_id, "profiling")]
    # n2 was to measure the link, so the others begin anew.
    assert asked == [["n1/0", "n2/0", "n3/0"], ["n1/0", "n3/0"]]
    (chosen,) = cluster.events(job_id, "profile")
    assert (chosen["source"], chosen["reason"]) == ("measured", "measured by 2 workers")
    (started,) = cluster.events(job_id, "started")
    nodes = {stage["node"] for pipeline in started["pipelines"] for stage in pipeline}
    assert nodes == {"n1", "n3"}


def test_workers_of_a_node_share_stages_by_a_profile_for_several_gpus(
    text: str, tmp_path: Path, preloaded: Preloaded
) -> None:
    named = job(text, "roomy") | {
        "model": {"layers": 1, "hidden": 32, "heads": 2, "sequence_length": 32},
        "profile": str(tmp_path / "p.json"),
    }
    alone = estimate_profile(
        parse_job(json.dumps(named)), gpus_per_node=4, memory_per_worker_bytes=1 << 30
    )
    shared = {name: {1: 0.2, 2: 0.1} for name in ("forward_s", "backward_s")}
    layers = tuple(replace(layer, **shared) for layer in alone.layers)
    (tmp_path / "p.json").write_text(format_profile(replace(alone, layers=layers)))
    fault = {"worker": {"node": "n2", "slot": 0}, "point": "after:Backward", "step": 2}
    with LocalCluster(
        2,
        workers_per_node=4,
        fault_plan=[fault | {"action": "kill_node"}],
        options=PATIENT,
        preloaded=preloaded,
    ) as cluster:
        job_id = cluster.submit(named)
        assert cluster.wait_end(job_id) == "succeeded", cluster.end_of(job_id)
        (started,) = cluster.events(job_id, "started")
        assert "idle" not in started["reason"]
        (change,) = cluster.events(job_id, "reconfigured")
        before, after = (
            [[stage["workers"] for stage in stages] for stages in change[f"pipelines_{when}"]]
            for when in ("before", "after")
        )
        assert [sum(workers) for workers in before] == [4, 4]
        assert [sum(workers) for workers in after] == [4]
        assert max(after[0]) == 2
        losses = [record["loss"] for record in cluster.metrics(job_id)]
    expected = [step.loss for step in train_reference(parse_job(json.dumps(named))).steps]
    assert losses == pytest.approx(expected, rel=1e-5)
