"""Training with layers through torch's compiler, over a loss and changes of the plan."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.job.code import Json
from oobleck.core.job.model import ModelSpec, OwnModelSpec
from oobleck.core.job.spec import DataSpec, EvaluationSpec, JobSpec, TrainingSpec
from oobleck.core.messages import FaultRule
from oobleck.worker.describe import look_at
from oobleck.worker.runtime import code
from support.director import Director, WarmWorkers, make_plan, worker_named
from support.folders import ROOT, TEXT
from support.reference import train_reference

SUPPORT = str(ROOT / "tests" / "support")
PLANS = (
    # Two workers share the first layers.
    ([[("a", 2, 2), ("b", 4)], [("c", 6)]], [2, 2]),
    # b is lost
    ([[("a", 6)], [("c", 6)]], [3, 1]),
    ([[("c", 3), ("a", 3)]], [4]),
)
LOSS_AT, CHANGE_AT, STEPS = 4, 7, 24


def described(noted: str) -> JobSpec:
    """A job; `noted`: the file that layers which run as they are leave a line in; empty: it wants
    none compiled."""
    job = JobSpec(
        name="compiled",
        model=OwnModelSpec(
            python="compiled_models:alike",
            path=SUPPORT,
            arguments=Json(json.dumps({"noted": noted})),
        ),
        data=DataSpec(python="compiled_models:Points", path=SUPPORT),
        training=TrainingSpec(
            steps=STEPS, global_batch=8, microbatch=2, precision="fp64", compile=bool(noted)
        ),
        evaluation=EvaluationSpec(every=10, fraction=0.25, samples=5),
    )
    found = look_at(job, always=False)
    assert isinstance(job.model, OwnModelSpec)
    return replace(job, model=replace(job.model, described=Json(found.descriptions["model"])))


def trained(warm: WarmWorkers, job: JobSpec) -> tuple[dict[int, float | None], list[float | None]]:
    """The losses, and those of the evaluations, with a stage that two workers share, a node lost in
    the middle of a step and one change of the plan without a loss."""
    lost = WorkerId(NodeName("b"), 0)
    faults = [
        FaultRule(worker=lost, point="before:Backward", step=LOSS_AT, action="kill_worker"),
        # Until the next plan is there.
        FaultRule(
            worker=worker_named("c"), point="before:LoadTokens", step=CHANGE_AT, action="stop"
        ),
    ]
    first, second, third = (
        make_plan(number, cuts, shares, schedule="zb-h1" if number == 3 else "1f1b")
        for number, (cuts, shares) in enumerate(PLANS, 1)
    )
    with Director(warm, job, faults, workers=2) as cluster:
        cluster.start("a/0")  # what it compiles, the others read
        cluster.start("a/1", "b", "c")
        cluster.assign(first)
        cluster.wait(lambda: cluster.workers[lost].gone, "b is lost")
        cluster.assign(second)
        cluster.wait(lambda: cluster.has_faulted("c/0"), "steps without b")
        cluster.assign(third, boundary=True)
        cluster.let_go("c")
        cluster.wait_finished(third)
        cluster.stop()
        generations = {r.generation for records in cluster.records.values() for r in records}
        assert generations == {1, 2, 3}
        return cluster.losses(), evaluations(cluster)


def as_it_is(warm: WarmWorkers, job: JobSpec) -> tuple[dict[int, float | None], list[float | None]]:
    """The same of one worker, which nothing happens to."""
    plan = make_plan(1, [[("a", 6)]], [4])
    with Director(warm, job) as cluster:
        cluster.start("a")
        cluster.assign(plan)
        cluster.wait_finished(plan)
        cluster.stop()
        return cluster.losses(), evaluations(cluster)


def evaluations(cluster: Director) -> list[float | None]:
    """Their losses, in order."""
    return [cluster.evaluations[step][0].loss for step in sorted(cluster.evaluations)]


@pytest.mark.soak
def test_blocks_of_a_built_in_model_train_as_they_are_also_where_workers_share_them(
    warm: WarmWorkers,
) -> None:
    """With a split backward and a worker lost in the middle of a step, against plain PyTorch."""
    job = JobSpec(
        name="built-in",
        model=ModelSpec(layers=3, hidden=24, heads=2, sequence_length=16),
        data=DataSpec(text=(TEXT,)),
        training=TrainingSpec(
            steps=5, global_batch=12, microbatch=2, precision="fp64", compile=True
        ),
        evaluation=EvaluationSpec(every=2, fraction=0.02),
    )
    plain = replace(job, training=replace(job.training, compile=False))
    expected = train_reference(plain)
    before = make_plan(1, [[("a", 2, 2), ("b", 3)], [("c", 5)]], [3, 3])
    after = make_plan(2, [[("a", 3, 2), ("b", 2)]], [6], schedule="zb-h1")
    lost = WorkerId(NodeName("c"), 0)
    fault = FaultRule(worker=lost, point="before:Backward", step=3, action="kill_worker")
    with Director(warm, job, [fault], workers=2) as cluster:
        cluster.start("a/0")  # what it compiles, the others read
        cluster.start("a/1", "b", "c")
        cluster.assign(before)
        cluster.wait(lambda: cluster.workers[lost].gone, "c is lost")
        cluster.assign(after)
        cluster.wait_finished(after)
        cluster.stop()
        logs = [cluster.workers[worker].written() for worker in before.workers]
        assert all("kinds=3 compiled=1 " in log for log in logs)
        losses = [step.loss for step in expected.steps]
        assert list(cluster.losses().values()) == pytest.approx(losses, rel=1e-12)
        found = {step: records[0].loss for step, records in cluster.evaluations.items()}
        assert found == pytest.approx(expected.evaluations, rel=1e-12)


def test_losses_are_those_of_layers_as_they_are_and_no_step_runs_anything_else(
    warm: WarmWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code.allow((code.ANY,))
    noted = tmp_path / "noted"
    monkeypatch.syspath_prepend(SUPPORT)
    job = described(str(noted))
    noted.unlink()  # it was looked at as it is
    losses, evaluated = trained(warm, job)
    lines = noted.read_text().splitlines() if noted.exists() else []
    # Of a step that is done again, a layer may be the lowest one with a backward. The last
    # micro-batch of an evaluation has one row, which is compiled for workers that share layers.
    assert set(lines) <= {"True False"}
    expected, expected_evaluated = as_it_is(warm, described(""))
    assert losses == pytest.approx(expected, rel=1e-12)
    assert len(evaluated) == 3
    assert evaluated == pytest.approx(expected_evaluated, rel=1e-12)
