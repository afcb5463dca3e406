"""Same training, whatever fails: losses, samples and final weights against plain PyTorch.

Every case trains the same job on a real cluster (master, agents, workers, the operator's command)
and is held against the unsplit model trained by a plain loop in one process. Kills are real and
happen at exact points of a step; each case proves that its fault has happened.

Four nodes are equal pipelines, five are not. Most cases run on both, in one precision each, such
that both numbers of nodes see both precisions. Moments of a step that differ little share the two.
One cluster serves all: the nodes that a case has lost start again before the next.
"""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.support.client import Record, read_lines
from bench.support.cluster import LocalCluster
from bench.support.preloaded import Preloaded
from bench.support.throttle import throttled
from oobleck.core.job.file import parse_job
from support.clusters import PATIENT, bring_into, make_whole
from support.folders import TEXT
from support.outputs import read_output
from support.reference import (
    LOSS_TOLERANCE,
    ReferenceRun,
    assert_same_steps,
    assert_same_weights,
    train_reference,
)

# Longer than any wait in vain, which ends with a report.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

WEIGHT_TOLERANCE = {"fp32": 1e-4, "fp64": 1e-10}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What happens in a run, and what the run must tell of it."""

    name: str
    #: On so many nodes.
    nodes: tuple[int, ...] = (4, 5)
    #: (victim, point, step, action) of each scripted fault.
    faults: tuple[tuple[str, str, int, str], ...] = ()
    #: Rules of the expected reconfigurations, in order.
    rules: tuple[str, ...] = ()
    steps: int = 10
    #: With 4 nodes, a second loss is only survived by pipelines that fit on one node.
    min_nodes_of_4: int = 2
    #: A node that is started again once the job has come to a step, and joins it there.
    returns: tuple[str, int] | None = None
    #: Of recovery.
    policy: str = "templates"
    shadows: str = "none"
    #: Nodes that a pipeline has at least; with five nodes.
    min_nodes: int = 2
    #: Steps between two checkpoints; 0: there are none.
    every: int = 0


#: Rules that are policies of the same name.
NAMED = ("reroute", "normalise", "shadow")
LOCAL_RULE = "takeover|reinstantiate|borrow|merge|reshape"
CASES = [
    Case(name="undisturbed"),
    Case(
        name="start",
        nodes=(4,),
        faults=(("n2", "before:Forward", 5, "kill_node"),),
        rules=(LOCAL_RULE,),
    ),
    Case(
        name="middle",
        faults=(("n4", "after:Backward", 5, "kill_node"),),
        rules=(LOCAL_RULE,),
    ),
    Case(
        name="sync",
        nodes=(5,),
        faults=(("n1", "after:SyncGradient", 5, "kill_node"),),
        rules=(LOCAL_RULE,),
    ),
    Case(
        name="twice",
        faults=(
            ("n3", "before:Backward", 4, "kill_node"),
            ("n2", "before:Backward", 7, "kill_node"),
        ),
        rules=(LOCAL_RULE, LOCAL_RULE),
        min_nodes_of_4=1,
    ),
    Case(
        name="worker",
        nodes=(4,),
        faults=(("n3", "after:Forward", 5, "kill_worker"),),
        rules=("replace",),
    ),
    Case(
        name="rejoin",
        faults=(("n4", "after:Forward", 8, "kill_node"),),
        rules=(LOCAL_RULE, "join"),
        returns=("n4", 9),
        steps=40,
    ),
    Case(
        name="rerouted",
        nodes=(4,),
        faults=(("n3", "after:Forward", 8, "kill_node"),),
        rules=("reroute", "replace"),  # it takes its place of before again
        returns=("n3", 9),
        steps=40,
        policy="reroute",
    ),
    Case(
        name="normalised",
        nodes=(5,),
        faults=(("n3", "after:Forward", 8, "kill_node"),),
        rules=("reroute", "normalise", "normalise", "replace"),
        returns=("n3", 9),
        steps=60,
        policy="reroute",
    ),
    Case(
        name="shadowed",  # one pipeline: only shadows have what n3 has
        faults=(("n3", "after:Backward", 8, "kill_node"),),
        rules=("reroute", "shadow"),
        steps=20,
        policy="shadow",
        shadows="auto",
        min_nodes=5,
        min_nodes_of_4=4,
    ),
    Case(
        name="waited",  # on the same nodes as before
        nodes=(4,),
        faults=(("n3", "after:Forward", 8, "kill_node"),),
        rules=("replace",),
        returns=("n3", 7),
        steps=20,
        policy="wait",
    ),
    Case(
        name="morphed",  # all state is there, and comes from the newest checkpoint nevertheless
        nodes=(4,),
        faults=(("n3", "after:Forward", 16, "kill_node"),),
        rules=(LOCAL_RULE,),
        steps=20,
        policy="morph",
        every=2,
    ),
]


def job_text(
    name: str, precision: str, steps: int, *, min_nodes: int = 2, output: Path | None = None
) -> dict[str, object]:
    job: dict[str, object] = {
        "name": name,
        "model": {"layers": 4, "hidden": 32, "heads": 2, "sequence_length": 32},
        "data": {"text": [TEXT]},
        "training": {
            "steps": steps,
            "global_batch": 16,
            "microbatch": 2,
            "seed": 7,
            "precision": precision,
            "pipeline_schedule": "1f1b",  # the faults' points are its instructions
            "optimizer": {"name": "adamw", "lr": 1.0e-3},  # at 3e-3 rounding alone grows a 1e4-fold
            "schedule": {"name": "cosine", "warmup": 5},
        },
        "evaluation": {"every": 10, "fraction": 0.1, "samples": 16},
        "fault_tolerance": 1,
        "resources": {"min_nodes_per_pipeline": min_nodes},
        "profile": "estimate",  # the same plans in every run
    }
    return job if output is None else {**job, "output": str(output)}


#: Keeps the job BEYOND where it is until its first plan is no more.
BEYOND = "beyond"
HELD: dict[str, object] = {
    "worker": {"node": "n4", "slot": 0},
    "point": "before:Forward",
    "job": BEYOND,
    "generation": 1,
    "step": 8,
    "action": "hold",
}


#: A node is lost here as well, and another one while a plan with the first one is prepared.
PREPARED = "prepared"
LOST: list[dict[str, object]] = [
    {"worker": {"node": node, "slot": 0}, "job": PREPARED, "action": "kill_node", **at}
    for node, at in {
        "n4": {"point": "after:Forward", "step": 8},
        "n2": {"point": "prepared", "generation": 3},
    }.items()
]


@functools.cache
def reference(precision: str, steps: int) -> ReferenceRun:
    return train_reference(parse_job(json.dumps(job_text("reference", precision, steps))))


def fault_plan() -> list[dict[str, object]]:
    return [
        {
            "worker": {"node": victim, "slot": 0},
            "point": point,
            "job": case.name,
            "step": step,
            "action": action,
            # The node is to live when it does this step again.
            **({"generation": 1} if case.policy == "wait" else {}),
        }
        for case in CASES
        for victim, point, step, action in case.faults
    ] + [HELD, *LOST]


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded
) -> Iterator[LocalCluster]:
    state_dir = tmp_path_factory.mktemp("equality") / "state"
    with LocalCluster(
        4, state_dir=state_dir, fault_plan=fault_plan(), options=PATIENT, preloaded=preloaded
    ) as cluster:
        yield cluster


#: The other number of nodes shows these too.
SOAKS = {(5, "twice"), (5, "rejoin"), (5, "middle"), (4, "shadowed")}
RUNS = [
    pytest.param(
        *(case, nodes, precision),
        id=f"{nodes}nodes-{case.name}-{precision}",
        marks=[pytest.mark.soak] if (nodes, case.name) in SOAKS else [],
    )
    for nodes in (4, 5)
    for number, case in enumerate(CASES)
    for precision in [("fp64", "fp32")[(number + nodes) % 2]]
    if nodes in case.nodes
]


@pytest.mark.parametrize(("case", "nodes", "precision"), RUNS)
def test_training_is_the_same(
    cluster: LocalCluster, case: Case, nodes: int, precision: str, tmp_path: Path
) -> None:
    make_whole(cluster, {f"n{number}" for number in range(1, nodes + 1)})
    output = tmp_path / "weights"
    min_nodes = case.min_nodes_of_4 if nodes == 4 else case.min_nodes
    job = job_text(case.name, precision, case.steps, min_nodes=min_nodes, output=output)
    job["recovery"] = {"policy": case.policy, "shadows": case.shadows}
    if case.every:
        job["checkpoint"] = {"path": str(tmp_path / "saved"), "every": case.every}
    job_id = cluster.submit(job)
    if case.returns is not None:
        name, step = case.returns
        cluster.wait_step(job_id, step)
        if case.policy == "wait":
            waits = "waiting for nodes"
            cluster.wait(lambda: cluster.status(job_id)["state"] == waits, waits)
            cluster.start_node(name)
        else:
            # Where training is held up, no plan that is on its way comes.
            cluster.wait(
                lambda: len(cluster.events(job_id, "reconfigured")) == len(case.rules) - 1,
                "the plans before it",
                poll_s=0.1,
            )
            bring_into(cluster, job_id, name)
    assert cluster.wait_end(job_id) == "succeeded", cluster.end_of(job_id)

    told = cluster.events(job_id, "reconfigured")
    assert len(told) == len(case.rules), told
    for record, rule in zip(told, case.rules, strict=True):
        assert record["rule"] in rule.split("|"), record
        assert record["to_generation"] == record["from_generation"] + 1
        other = "morph" if case.policy == "morph" else "templates"
        assert record["policy"] == (rule if rule in NAMED else other), record
        assert record["received_bytes"] == 0 or rule != "reroute", record
        # What a plan for a step boundary needs is there before it begins.
        assert record["fed_bytes"] == (record["received_bytes"] if record["boundary"] else 0)
    for (victim, _, _, action), record in zip(case.faults, told, strict=False):
        lost = record["nodes_lost"] if action == "kill_node" else record["workers_lost"]
        assert lost == [victim if action == "kill_node" else f"{victim}/0"], record

    returns = cluster.events(job_id, "restored")
    assert len(returns) == (case.policy == "morph")
    assert all(case.every <= record["step"] < 16 for record in returns)
    expected = reference(precision, case.steps)
    assert_same_steps(cluster.metrics(job_id), expected.steps, precision)
    evaluations = read_lines(cluster.state_dir / "jobs" / job_id / "evaluations.jsonl")
    assert [(line["step"], line["samples"]) for line in evaluations] == [
        (step, 16) for step in range(10, case.steps + 1, 10)
    ]
    assert [line["loss"] for line in evaluations] == pytest.approx(
        list(expected.evaluations.values()), rel=LOSS_TOLERANCE[precision], abs=0
    )
    assert_same_weights(
        read_output(output),
        expected.weights,
        rtol=WEIGHT_TOLERANCE[precision],
    )


def test_more_nodes_at_once_than_a_plan_can_lose_cost_steps_and_no_more(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    make_whole(cluster, {"n1", "n2", "n3", "n4"})
    steps, saved = 12, 5
    output = tmp_path / "weights"
    job = job_text(BEYOND, "fp64", steps, output=output)
    checkpoint = {"path": str(tmp_path / "saved"), "every": saved, "at_end": False}
    job_id = cluster.submit({**job, "checkpoint": checkpoint})
    cluster.wait_step(job_id, 7)
    cluster.wait(lambda: bool(cluster.events(job_id, "checkpoint_saved")), "a checkpoint")
    status = cluster.status(job_id)
    assert status["can_lose"] == 1
    # All that hold the first layers.
    victims = [pipeline["nodes"][0] for pipeline in status["plan"]["pipelines"]]
    assert len(victims) == 2
    assert "n4" not in victims
    cluster.kill_nodes(*victims)
    assert cluster.wait_end(job_id) == "succeeded", cluster.end_of(job_id)

    (restored,) = cluster.events(job_id, "restored")
    assert (restored["step"], restored["lost_steps"]) == (saved, 7 - saved)
    lost = [event["node"] for event in cluster.events(job_id, "node_lost") if event["in_plan"]]
    assert sorted(lost) == sorted(victims)
    expected = reference("fp64", steps)
    assert_same_steps(cluster.metrics(job_id), expected.steps, "fp64")
    assert_same_weights(read_output(output), expected.weights, rtol=WEIGHT_TOLERANCE["fp64"])


def test_a_loss_while_a_plan_is_prepared_changes_nothing(cluster: LocalCluster) -> None:
    make_whole(cluster, {"n1", "n2", "n3", "n4"})
    steps = 40
    job_id = cluster.submit(job_text(PREPARED, "fp64", steps, min_nodes=1))
    cluster.wait_step(job_id, 9)
    bring_into(cluster, job_id, "n4")
    assert cluster.wait_end(job_id) == "succeeded", cluster.end_of(job_id)

    told = cluster.events(job_id, "reconfigured")
    assert [n for record in told for n in record["nodes_lost"]] == ["n4", "n2"]
    assert all("superseded_by" in record for record in told if record["to_generation"] == 3)
    expected = reference("fp64", steps)
    assert_same_steps(cluster.metrics(job_id), expected.steps, "fp64")


#: Of a processor; slow workers have much less.
FAIR, LITTLE = 0.4, 0.08


def test_losses_beside_slow_workers_change_nothing(cluster: LocalCluster) -> None:
    """Around two slow workers there is a plan; then somebody who helped is lost, and one of the
    slow ones; then the other one is well."""
    make_whole(cluster, {"n1", "n2", "n3", "n4"})
    job = job_text("slow", "fp64", 9_000)  # workers wait between the steps of longer jobs
    del job["evaluation"]
    # The steps are many, and how many is not known.
    how = {"optimizer": {"name": "adamw", "lr": 1.0e-4}, "schedule": {"name": "constant"}}
    job["training"] |= how  # type: ignore[operator]
    job_id = cluster.submit({**job, "recovery": {"shadows": "auto"}})
    cluster.wait_step(job_id, 1)

    def told() -> list[Record]:
        return cluster.events(job_id, "reconfigured")

    # Each half of the model is with a slow one and with one that is not.
    (slow, _), (helper, other) = (
        pipeline["nodes"] for pipeline in cluster.status(job_id)["plan"]["pipelines"]
    )
    with throttled(cluster.worker_pids(), FAIR) as shares:
        for name in (slow, other):
            shares[f"{name}/0"].set(LITTLE)
        cluster.wait(lambda: bool(told()), "a plan around the slow workers")
        cluster.kill_node(helper)
        cluster.wait(lambda: told()[-1]["cause"] == "few holders", "shadows")
        cluster.kill_node(slow)
        cluster.wait(lambda: any(plan["nodes_lost"] == [slow] for plan in told()), "the last plan")
        shares[f"{other}/0"].set(FAIR)
        cluster.wait_step(job_id, cluster.last_step(job_id) + 5)
    cluster.oobleck("cancel", job_id)
    cluster.wait_end(job_id)

    first, second = told()[:2]
    assert (first["cause"], first["can_lose"]) == ("worker slow", 1)
    assert second["nodes_lost"] == [helper]
    metrics = cluster.metrics(job_id)
    job["training"] |= {"steps": len(metrics)}  # type: ignore[operator]
    expected = train_reference(parse_job(json.dumps(job)))
    assert_same_steps(metrics, expected.steps, "fp64")
