"""A cluster that is upgraded node by node while a job trains, from the release before this one.

That release is run from this checkout's history: masters, agents and workers as they were.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from bench.support.preloaded import Preloaded
from bench.support.separate import Daemons
from oobleck.core.codec import encode
from oobleck.core.job.file import parse_job
from oobleck.host.versions import ENGINE
from oobleck.proto.protocol import NEWEST, OLDEST
from support import compiled, earlier
from support.clusters import PATIENT
from support.reference import train_reference
from support.routes import random_listed, random_pipelines

#: More than are done before the job is cancelled.
STEPS = 100_000
PLANS = 60


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """What processes of the release before have in their environment."""
    if reason := earlier.unusable():
        pytest.skip(reason)
    return earlier.environment(tmp_path_factory.mktemp("earlier"))


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    cluster = Daemons(tmp_path / "cluster")
    with contextlib.closing(cluster):
        yield cluster


def at_once(cluster: Daemons, job_id: str, name: str, other: str) -> None:
    """Of one engine with those that train: the upgraded node joins them."""
    with cluster.frozen(other):
        alone = cluster.status(job_id)["generation"]
        cluster.start_node(name)
        cluster.wait(
            lambda: cluster.status(job_id)["generation"] > alone, f"a plan with {name}", poll_s=0.1
        )
    cluster.wait(lambda: cluster.planned(job_id) == {name, other}, f"{name} trains", poll_s=0.1)


def apart(cluster: Daemons, job_id: str, name: str, other: str) -> None:
    """Of another engine: the upgraded node waits until no other is left."""
    why = f"engine {ENGINE}, where the job's other nodes have "
    with cluster.frozen(other):
        cluster.start_node(name)
        cluster.wait(lambda: why in cluster.nodes()[name]["reason"], f"{name} waits", poll_s=0.1)
    assert cluster.planned(job_id) == {other}


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_cluster_is_upgraded_node_by_node_while_a_job_trains(
    before: Mapping[str, str], daemons: Daemons, preloaded: Preloaded, text: str, tmp_path: Path
) -> None:
    flags = [flag.removeprefix("--master-flag=") for flag in PATIENT]
    training = {"steps": STEPS, "global_batch": 4, "microbatch": 1, "precision": "fp64"}
    spec = {
        "name": "upgraded",
        # Sums of layers go in several frames.
        "model": {"kind": "gpt", "layers": 2, "hidden": 45, "heads": 5, "sequence_length": 8},
        "data": {"text": [text]},
        "training": training,
        "fault_tolerance": 0,
        "profile": "estimate",
        "checkpoint": {"path": str(tmp_path / "saved"), "every": STEPS},
    }
    cluster, nodes = daemons, ("n1", "n2")
    cluster.environment = before
    cluster.start_master(*flags)
    for name in nodes:
        cluster.start_node(name)
    cluster.wait(lambda: cluster.live() == {*nodes}, "two nodes", poll_s=0.1)
    job_id = cluster.submit(spec)
    cluster.wait(lambda: cluster.planned(job_id) == {*nodes}, "training on two nodes", poll_s=0.1)

    cluster.environment = {"PYTHONPATH": preloaded.python_path}
    # The job trains meanwhile, and is held up only so that it does not end.
    with cluster.frozen("n1"):
        generation = cluster.status(job_id)["generation"]
        cluster.end(cluster.master_pid)
        cluster.start_master(*flags)
        cluster.wait(lambda: cluster.live() == {*nodes}, "both nodes again", poll_s=0.1)
    cluster.wait_step(job_id, cluster.last_step(job_id) + 5)
    assert cluster.status(job_id)["generation"] == generation, "it has adopted what runs"
    told = cluster.nodes().values()
    assert {node["protocol"] for node in told} == {OLDEST}
    mixes = {node["versions"]["engine"] for node in told} == {ENGINE}

    cluster.end(cluster.agents["n1"])  # its work moves off it first
    (at_once if mixes else apart)(cluster, job_id, "n1", "n2")
    assert {n: node["protocol"] for n, node in cluster.nodes().items()} == {
        "n1": NEWEST, "n2": OLDEST,
    }  # fmt: skip
    cluster.wait_step(job_id, cluster.last_step(job_id) + 5)
    cluster.end(cluster.agents["n2"])
    at_once(cluster, job_id, "n2", "n1")
    cluster.wait_step(job_id, cluster.last_step(job_id) + 5)
    assert {node["protocol"] for node in cluster.nodes().values()} == {NEWEST}
    cluster.oobleck("cancel", job_id)
    assert cluster.wait_end(job_id) == "cancelled"
    # Once, from the checkpoint of the last node that left, where engines do not mix.
    assert len(cluster.events(job_id, "restored")) == (0 if mixes else 1)

    records = cluster.metrics(job_id)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    done = {**spec, "training": {**training, "steps": len(records)}}
    reference = train_reference(parse_job(json.dumps(done)))
    losses = [record["loss"] for record in records]
    assert losses == pytest.approx([step.loss for step in reference.steps], rel=1e-12)
    assert [record["samples_digest"] for record in records] == [
        step.samples_digest for step in reference.steps
    ]


def engine_of(environment: Mapping[str, str]) -> str:
    """Of the release that processes with the environment run."""
    told = "from oobleck.host import versions; print(versions.ENGINE)"
    command = [sys.executable, "-P", "-c", told]
    return subprocess.check_output(command, env={**os.environ, **environment}, text=True).strip()


def test_both_releases_make_the_same_programs_of_a_plan(before: Mapping[str, str]) -> None:
    if engine_of(before) != ENGINE:
        pytest.skip("the engine has grown since, so that their workers never train together")
    draw = random.Random(7)
    plans = [random_pipelines(draw) for _ in range(PLANS)] + [
        random_listed(draw) for _ in range(PLANS)
    ]
    lines = b"\n".join(map(encode, plans))
    made = [
        subprocess.run(
            [sys.executable, "-P", compiled.__file__],
            env={**os.environ, **environment},
            input=lines,
            capture_output=True,
            check=True,
            timeout=400,
        ).stdout
        for environment in ({}, before)
    ]
    assert made[0] == made[1]
    assert len(made[0].splitlines()) > 3 * PLANS
