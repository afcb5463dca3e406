"""Same training, whatever fails: losses, samples and final weights against plain PyTorch.

Every case trains the same job on a real cluster (master, agents, workers, the operator's command)
and is held against the unsplit model trained by a plain loop in one process. Kills are real and
happen at exact points of a step; each case proves that its fault has happened.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.cluster import LocalCluster, read_lines
from oobleck.planner.jobfile import parse_job
from oobleck.worker.output import read_output
from support.reference import ReferenceRun, assert_same_weights, train_reference

# Longer than any wait in vain, which ends with a report.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

TEXT = str(Path(__file__).parents[2] / "LICENSE")
#: While training is held up for a node that starts, nobody shall take it for a hang.
PATIENT = ("--master-flag=--stall-s=100",)
#: Relative difference that another order of sums explains.
LOSS_TOLERANCE = {"fp32": 1e-6, "fp64": 1e-12}
WEIGHT_TOLERANCE = {"fp32": 1e-4, "fp64": 1e-10}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What happens in a run, and what the run must tell of it."""

    name: str
    #: (victim, point, step, action) of each scripted fault.
    faults: tuple[tuple[str, str, int, str], ...] = ()
    #: Rules of the expected reconfigurations, in order.
    rules: tuple[str, ...] = ()
    steps: int = 30
    #: With 4 nodes, a second loss is only survived by pipelines that fit on one node.
    min_nodes_of_4: int = 2
    #: Nodes that are started again once the job has come to a step, and join it there.
    returns: Mapping[str, int] = field(default_factory=dict)


LOCAL_RULE = "takeover|reinstantiate|borrow|merge|reshape"
CASES = [
    Case(name="undisturbed"),
    Case(
        name="start",
        faults=(("n2", "before:Forward", 10, "kill_node"),),
        rules=(LOCAL_RULE,),
    ),
    Case(
        name="middle",
        faults=(("n4", "after:Backward", 10, "kill_node"),),
        rules=(LOCAL_RULE,),
    ),
    Case(
        name="sync",
        faults=(("n1", "after:SyncGradient", 10, "kill_node"),),
        rules=(LOCAL_RULE,),
    ),
    Case(
        name="twice",
        faults=(
            ("n3", "before:Backward", 8, "kill_node"),
            ("n2", "before:Backward", 20, "kill_node"),
        ),
        rules=(LOCAL_RULE, LOCAL_RULE),
        min_nodes_of_4=1,
    ),
    Case(
        name="worker",
        faults=(("n3", "after:Forward", 10, "kill_worker"),),
        rules=("replace",),
    ),
    Case(
        name="rejoin",
        faults=(("n4", "after:Forward", 8, "kill_node"),),
        rules=(LOCAL_RULE, "join"),
        returns={"n4": 9},
        steps=60,
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


@functools.cache
def reference(precision: str, steps: int) -> ReferenceRun:
    return train_reference(parse_job(json.dumps(job_text("reference", precision, steps))))


def job_name(case: Case, precision: str) -> str:
    return f"{case.name}-{precision}"


def fault_plan() -> list[dict[str, object]]:
    return [
        {
            "worker": {"node": victim, "slot": 0},
            "point": point,
            "job": job_name(case, precision),
            "step": step,
            "action": action,
        }
        for case in CASES
        for precision in LOSS_TOLERANCE
        for victim, point, step, action in case.faults
    ]


@dataclass(frozen=True, kw_only=True)
class Drilled:
    """A cluster whose agents all know the script."""

    cluster: LocalCluster
    plan_file: Path

    def bring_back(self, name: str) -> None:
        self.cluster.start_node(name, "--fault-plan", str(self.plan_file))

    def bring_into(self, job_id: str, name: str) -> None:
        """Start the node while training is held up, until the plan with it is made: whatever the
        machine's speed, the node is neither late nor does it cost many steps."""
        with self.cluster.frozen("n1"):
            before = self.cluster.status(job_id)["generation"]
            self.bring_back(name)
            self.cluster.wait(
                lambda: self.cluster.status(job_id)["generation"] > before,
                f"a plan with {name}",
                poll_s=0.5,
            )

    def heal(self, nodes: int) -> None:
        """Start again whatever the last case has killed, and wait until all nodes are live."""

        def live() -> set[str]:
            return {n for n, node in self.cluster.nodes().items() if node["state"] == "live"}

        wanted = {f"n{number + 1}" for number in range(nodes)}
        for name in sorted(wanted - live()):
            self.bring_back(name)
        self.cluster.wait(lambda: live() == wanted, "all nodes live", poll_s=0.3)


@pytest.fixture(scope="module", params=[4, 5], ids=["4nodes", "5nodes"])
def drilled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, Drilled]]:
    directory = tmp_path_factory.mktemp("equality")
    plan_file = directory / "faults.json"
    plan_file.write_text(json.dumps(fault_plan()))
    nodes: int = request.param
    with LocalCluster(
        nodes, state_dir=directory / "state", options=["--fault-plan", str(plan_file), *PATIENT]
    ) as cluster:
        yield nodes, Drilled(cluster=cluster, plan_file=plan_file)


@pytest.mark.parametrize("precision", sorted(LOSS_TOLERANCE))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_is_the_same(
    drilled: tuple[int, Drilled], case: Case, precision: str, tmp_path: Path
) -> None:
    nodes, drill = drilled
    cluster = drill.cluster
    drill.heal(nodes)
    output = tmp_path / "weights"
    min_nodes = case.min_nodes_of_4 if nodes == 4 else 2
    job_id = cluster.submit(
        job_text(
            job_name(case, precision), precision, case.steps, min_nodes=min_nodes, output=output
        )
    )
    for name, step in case.returns.items():
        cluster.wait_step(job_id, step)
        drill.bring_into(job_id, name)
    assert cluster.wait_end(job_id) == "succeeded", cluster.end_of(job_id)

    told = cluster.events(job_id, "reconfigured")
    assert len(told) == len(case.rules), told
    for record, rule in zip(told, case.rules, strict=True):
        assert record["rule"] in rule.split("|"), record
        assert record["to_generation"] == record["from_generation"] + 1
    for (victim, _, _, action), record in zip(case.faults, told, strict=False):
        lost = record["nodes_lost"] if action == "kill_node" else record["workers_lost"]
        assert lost == [victim if action == "kill_node" else f"{victim}/0"], record

    expected = reference(precision, case.steps)
    metrics = cluster.metrics(job_id)
    assert [line["step"] for line in metrics] == list(range(1, case.steps + 1))
    assert [line["samples_digest"] for line in metrics] == [
        step.samples_digest for step in expected.steps
    ]
    tolerance = LOSS_TOLERANCE[precision]
    assert [line["loss"] for line in metrics] == pytest.approx(
        [step.loss for step in expected.steps], rel=tolerance, abs=0
    )
    evaluations = read_lines(cluster.state_dir / "jobs" / job_id / "evaluations.jsonl")
    assert [(line["step"], line["samples"]) for line in evaluations] == [
        (step, 16) for step in range(10, case.steps + 1, 10)
    ]
    assert [line["loss"] for line in evaluations] == pytest.approx(
        list(expected.evaluations.values()), rel=tolerance, abs=0
    )
    assert_same_weights(
        read_output(output),
        expected.weights,
        rtol=WEIGHT_TOLERANCE[precision],
    )
