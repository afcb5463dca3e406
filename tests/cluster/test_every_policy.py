"""Losses of a node under every policy, on 4 and 6 nodes of 1 and 2 workers, of which 0 to 2 may be
lost: the same losses as by plain PyTorch.

A node is killed at an exact point of a step, and of two that may be lost another one later. The
change must be by the policy that the job names, if it names one. A job goes on until all plans
behind it have come, however long that takes, and what it trained is held against as many steps of
the reference.
"""

import functools
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from bench.support.client import ClusterError, Record
from bench.support.cluster import LocalCluster
from bench.support.preloaded import Preloaded
from oobleck.core.job.file import parse_job
from oobleck.core.job.spec import RecoveryPolicy
from oobleck.core.profile import format_profile
from oobleck.planner.profile.estimate import estimate_profile
from support.clusters import PATIENT, end_jobs, make_whole
from support.folders import TEXT
from support.reference import ReferenceRun, assert_same_steps, train_reference

log = logging.getLogger(__name__)
pytestmark = [pytest.mark.soak, pytest.mark.cluster, pytest.mark.timeout(900)]

#: Its node is lost in this step, where it gets to one of these points.
VICTIM, STEP = "n2", 4
POINTS = ("before:Forward", "after:Forward", "before:Backward", "after:Backward", "reduced")


@dataclass(frozen=True, kw_only=True)
class Case:
    nodes: int
    workers: int
    tolerance: int
    policy: str
    precision: str
    point: str

    @property
    def name(self) -> str:
        return f"{self.policy}-{self.nodes}-{self.workers}-{self.tolerance}"

    @property
    def returns(self) -> bool:
        """Return whether the state comes from a checkpoint."""
        return self.tolerance == 0 or self.policy == "morph"

    @property
    def min_nodes(self) -> int:
        """Return a size that makes one pipeline if only shadows, or nobody, shall hold a layer
        too."""
        if self.tolerance == 0:
            return self.nodes - (self.policy != "wait")
        return self.nodes if self.policy == "shadow" else 2

    @property
    def answers(self) -> tuple[str, ...]:
        """Return the policies of the plans that the first loss brings, or of the first ones."""
        if self.returns:
            return ("morph",)
        match self.policy:
            case "auto":  # any: what is best differs by case
                return ()
            case "reroute" | "stay":
                return ("reroute",)
            case "normalise":
                return ("normalise",)
            case "shadow":
                return ("reroute", "shadow")
        return ("templates",)


CASES = [
    Case(
        nodes=nodes,
        workers=workers,
        tolerance=tolerance,
        policy=policy,
        precision="fp64" if (number + number // 3) % 3 else "fp32",
        point=POINTS[number % len(POINTS)],
    )
    for number, (nodes, workers, policy, tolerance) in enumerate(
        product((4, 6), (1, 2), get_args(RecoveryPolicy), (0, 1, 2))
    )
]


def job_of(precision: str) -> dict[str, object]:
    return {
        "name": "reference",
        "model": {"layers": 7, "hidden": 64, "heads": 2, "sequence_length": 16},
        "data": {"text": [TEXT]},
        "training": {
            "steps": 5_000,
            "global_batch": 10,
            "microbatch": 1,
            "seed": 7,
            "precision": precision,
            "pipeline_schedule": "1f1b",  # the faults' points are its instructions
            "optimizer": {"name": "adamw", "lr": 1.0e-4},
            "schedule": {"name": "constant"},  # of any number of steps the first ones are the same
        },
    }


def slow_to_move(precision: str, workers: int) -> str:
    """Return a profile by which state moves for seconds and a step is mostly compute: a re-route
    pays until templates are there."""
    job = parse_job(json.dumps(job_of(precision)))
    known = estimate_profile(job, gpus_per_node=workers, memory_per_worker_bytes=2 << 30)
    layers = tuple(
        replace(
            layer,
            forward_s={gpus: 0.01 / gpus for gpus in layer.forward_s},
            backward_s={gpus: 0.02 / gpus for gpus in layer.forward_s},
            backward_input_s={gpus: 0.02 / gpus for gpus in layer.forward_s},
            gradient_bytes=1,
            sum_bytes=0,
            tied_bytes=0,
        )
        for layer in known.layers
    )
    rate = 15e5 if precision == "fp64" else 75e4
    links = replace(known.links, inter_node_bytes_per_s=rate)
    return format_profile(replace(known, layers=layers, links=links))


@functools.cache
def reference(precision: str, steps: int) -> ReferenceRun:
    job = job_of(precision)
    job["training"] |= {"steps": steps}  # type: ignore[operator]
    return train_reference(parse_job(json.dumps(job)))


@pytest.fixture(scope="module")
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded
) -> Iterator[LocalCluster]:
    nodes, workers = request.param
    faults = [
        {
            "worker": {"node": VICTIM, "slot": 0},
            "point": case.point,
            "job": case.name,
            "step": STEP,
            # A node that comes back does this step again.
            **({"generation": 1} if case.policy == "wait" else {}),
            # Until there is a checkpoint, and the node is killed.
            "action": "hold" if case.returns else "kill_node",
        }
        for case in CASES
        if (case.nodes, case.workers) == (nodes, workers)
    ]
    with LocalCluster(
        nodes,
        state_dir=tmp_path_factory.mktemp("policies") / "state",
        workers_per_node=workers,
        fault_plan=faults,
        options=PATIENT,
        preloaded=preloaded,
    ) as cluster:
        yield cluster


def answer_to(cluster: LocalCluster, case: Case, job_id: str, victim: str) -> list[Record]:
    """Wait until the plan that answers the loss and all behind it train, and return these."""
    if case.policy == "wait":
        waits = "waiting for nodes"
        cluster.wait(lambda: cluster.status(job_id)["state"] == waits, waits, poll_s=0.1)
        cluster.start_node(victim, "--workers", str(case.workers))

    def told() -> list[Record]:
        found = cluster.events(job_id, "reconfigured")
        lost = [victim in one["nodes_lost"] for one in found]
        return found[lost.index(True) :] if any(lost) else []

    def settled() -> bool:
        assert cluster.end_of(job_id) is None, cluster.end_of(job_id)
        status, plans = cluster.status(job_id), told()
        newest = [one["to_generation"] for one in plans[-1:]]
        return newest == [status["generation"]] and not status["then"]

    cluster.wait(settled, f"all plans behind the loss of {victim}", poll_s=0.2)
    cluster.wait_step(job_id, cluster.last_step(job_id) + 2)
    log.info("%s: %s", case.name, [(one["policy"], one["rule"], one["reason"]) for one in told()])
    return told()


@pytest.mark.parametrize(
    ("cluster", "case"),
    [pytest.param((case.nodes, case.workers), case, id=case.name) for case in CASES],
    indirect=["cluster"],
)
def test_a_loss_changes_nothing(cluster: LocalCluster, case: Case, tmp_path: Path) -> None:
    wanted = {f"n{n}" for n in range(1, case.nodes + 1)}
    make_whole(cluster, wanted, "--workers", str(case.workers))
    job = {
        **job_of(case.precision),
        "name": case.name,
        "fault_tolerance": case.tolerance,
        "resources": {"min_nodes_per_pipeline": case.min_nodes},
        "recovery": {"policy": case.policy},
        "profile": str(tmp_path / "profile.json"),
    }
    if case.returns:
        job["checkpoint"] = {"path": str(tmp_path / "saved"), "every": 2, "at_end": False}
    (tmp_path / "profile.json").write_text(slow_to_move(case.precision, case.workers))
    if case.tolerance == 0 and case.policy in ("reroute", "normalise", "shadow", "stay"):
        with pytest.raises(ClusterError, match="set fault_tolerance to 1 or more"):
            cluster.submit(job)
        return
    job_id = cluster.submit(job)
    try:
        train_through_losses(cluster, case, job_id)
    finally:
        end_jobs(cluster)
    cluster.wait_end(job_id)
    metrics = cluster.metrics(job_id)
    expected = reference(case.precision, 1 << len(metrics).bit_length()).steps[: len(metrics)]
    off = assert_same_steps(metrics, expected, case.precision)
    log.info("%s %s: %d steps, off by %.2g", case.name, case.precision, len(metrics), off)


def policies(case: Case, told: Sequence[Record]) -> tuple[str, ...]:
    """Return the policies of the plans. Where no move of a stage is worth it, the re-routed plan is
    that of `normalise`, and says so."""
    own = tuple(one["policy"] for one in told)
    if case.policy == "normalise" and "not by normalise" in told[0]["reason"]:
        return ("normalise" if own[0] == "reroute" else own[0], *own[1:])
    return own


def train_through_losses(cluster: LocalCluster, case: Case, job_id: str) -> None:
    if case.returns:
        logs = cluster.state_dir / "jobs" / job_id / "logs"
        cluster.wait(
            lambda: any("scripted fault" in file.read_text() for file in logs.glob("*.log")),
            "the victim at its point",
        )
        cluster.wait(lambda: bool(cluster.events(job_id, "checkpoint_saved")), "a checkpoint")
        cluster.kill_node(VICTIM)
    told = answer_to(cluster, case, job_id, VICTIM)
    assert policies(case, told)[: len(case.answers)] == case.answers
    assert told[0]["redo_step"] == (None if case.returns else STEP), told[0]
    restored = cluster.events(job_id, "restored")
    assert len(restored) == case.returns
    assert all(one["step"] < STEP for one in restored)
    if case.tolerance == 2:
        second = max(cluster.planned(job_id))
        cluster.kill_node(second)
        told = answer_to(cluster, case, job_id, second)
        first, *_ = policies(case, told)
        assert first in case.answers[:1] or case.policy == "auto", told[0]
