"""Evaluations on real workers equal those of one process, on any plan and whatever fails."""

import functools
from pathlib import Path

import pytest

from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.spec import DataSpec, EvaluationSpec, JobSpec, TrainingSpec
from oobleck.core.messages import FaultRule
from oobleck.core.plan import Plan
from support.director import Director, WarmWorkers, make_plan
from support.folders import TEXT
from support.reference import ReferenceRun, train_reference
from support.samples import Samples

STEPS = 5
DUE = [2, 4, 5]


def job(**evaluation: object) -> JobSpec:
    """With the default of 709 windows 71 are held out."""
    return JobSpec(
        name="evaluation",
        model=ModelSpec(layers=3, hidden=16, heads=2, sequence_length=16, dropout=0.1),
        data=DataSpec(text=(TEXT,)),
        training=TrainingSpec(
            steps=STEPS,
            global_batch=8,
            microbatch=2,
            precision="fp64",
            optimizer=OptimizerSpec(lr=1e-2),
        ),
        evaluation=EvaluationSpec(every=2, **(evaluation or {"fraction": 0.1})),  # type: ignore[arg-type]
    )


@functools.cache
def reference() -> ReferenceRun:
    return train_reference(job())


PLAN = make_plan(1, [[("a", 2), ("b", 3)], [("c", 5)]], [3, 1])
WITHOUT_B = make_plan(2, [[("a", 2), ("c", 3)]], [4])


def check(cluster: Director, expected: ReferenceRun) -> None:
    assert list(cluster.losses()) == [step.step for step in expected.steps]
    assert [step.loss for step in expected.steps] == pytest.approx(
        list(cluster.losses().values()), rel=1e-12
    )
    assert list(cluster.evaluations) == list(expected.evaluations) == DUE
    for step, records in cluster.evaluations.items():
        assert len({(record.loss, record.samples) for record in records}) == 1
        assert records[0].loss == pytest.approx(expected.evaluations[step], rel=1e-12)


def finish(cluster: Director, plan: Plan) -> None:
    cluster.assign(plan)
    cluster.wait_finished(plan)
    cluster.stop()


def test_undisturbed_it_equals_one_process_and_all_workers_tell_it_once(warm: WarmWorkers) -> None:
    with Director(warm, job()) as cluster:
        cluster.start("a", "b", "c")
        finish(cluster, PLAN)
        check(cluster, reference())
        assert {
            step: len(records) for step, records in cluster.evaluations.items()
        } == dict.fromkeys(DUE, 3)
        assert cluster.evaluations[2][0].samples == 71, "the last micro-batch has one row"
        digests = {step: records[0].samples_digest for step, records in cluster.records.items()}
    documented = Samples(Path(TEXT).read_bytes(), sequence_length=16, fraction=0.1)
    assert digests == {step: documented.digest(step, 8, seed=0) for step in range(1, STEPS + 1)}


def killed(node: str, point: str, step: int, microbatch: int | None = None) -> FaultRule:
    worker = WorkerId(NodeName(node), 0)
    return FaultRule(
        worker=worker, point=point, step=step, microbatch=microbatch, action="kill_worker"
    )


@pytest.mark.parametrize(
    "fault",
    [
        killed("b", "evaluating", 2),
        killed("b", "evaluating", 4, microbatch=20),
        killed("b", "evaluating", 5, microbatch=25),
        killed("b", "before:LoadTokens", 3),
    ],
    ids=["at its begin", "in the middle", "after the last step", "in the step after it"],
)
def test_a_loss_repeats_it_and_nothing_else_changes(warm: WarmWorkers, fault: FaultRule) -> None:
    with Director(warm, job(), [fault]) as cluster:
        cluster.start("a", "b", "c")
        cluster.assign(PLAN)
        cluster.wait(lambda: cluster.workers[fault.worker].gone, "the scripted kill")
        finish(cluster, WITHOUT_B)
        check(cluster, reference())
        again = fault.point == "evaluating"
        for step, records in cluster.evaluations.items():
            of_before = {record.generation for record in records} == {1}
            assert of_before == (step < fault.step or (step == fault.step and not again))


def test_who_has_no_result_takes_over_that_of_others(warm: WarmWorkers) -> None:
    hold = FaultRule(
        worker=WorkerId(NodeName("c"), 0), point="before:LoadTokens", step=3, action="hold"
    )
    with Director(warm, job(), [hold, killed("b", "before:Forward", 3)]) as cluster:
        cluster.start("a", "b", "c")
        cluster.assign(PLAN)
        cluster.wait(lambda: cluster.workers[WorkerId(NodeName("b"), 0)].gone, "the kill")
        cluster.start("n")
        plan = make_plan(2, [[("n", 1), ("c", 2), ("a", 2)]], [4])
        finish(cluster, plan)
        check(cluster, reference())
        # The newcomer tells of it too, in the words of those who measured.
        assert [record.generation for record in cluster.evaluations[2]] == [1, 1, 1, 1]


def test_data_of_its_own(warm: WarmWorkers, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_bytes(Path(__file__).read_bytes())
    own = job(data=DataSpec(text=(f"{tmp_path}/own.txt",)), samples=21)
    expected = train_reference(own)
    with Director(warm, own) as cluster:
        cluster.start("a", "b", "c")
        finish(cluster, PLAN)
        check(cluster, expected)
        assert cluster.evaluations[2][0].samples == 21
