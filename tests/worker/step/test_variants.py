"""A loss costs nothing but time whatever the job trains with: other optimizers and transports."""

from dataclasses import replace

import pytest

from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.optimization import OptimizerSpec, ScheduleSpec
from oobleck.core.job.spec import DataPlane, DataSpec, JobSpec, TrainingSpec
from oobleck.core.messages import FaultRule
from support.devices import Transport
from support.director import Director, WarmWorkers, make_plan
from support.folders import TEXT
from support.reference import train_reference

BEFORE = make_plan(1, [[("a", 2), ("b", 3)], [("c", 1), ("d", 2), ("e", 2)]], [4, 4])
AFTER = make_plan(2, [[("a", 2), ("b", 3)], [("c", 3), ("d", 2)]], [5, 3])
NESTEROV = OptimizerSpec(name="sgd", lr=0.3, momentum=0.9, nesterov=True, weight_decay=0.01)


def job(**training: object) -> JobSpec:
    values: dict[str, object] = {"steps": 5, "global_batch": 8, "precision": "fp64", **training}
    return JobSpec(
        name="variants",
        model=ModelSpec(layers=3, hidden=32, heads=2, sequence_length=16, dropout=0.1),
        data=DataSpec(text=(TEXT,)),
        training=TrainingSpec(**values),  # type: ignore[arg-type]
    )


def test_sums_in_bf16_change_losses_by_their_rounding_alone(warm: WarmWorkers) -> None:
    trained = job(precision="fp32", gradient_sums="bf16", optimizer=NESTEROV)
    with Director(warm, trained, transport="nccl") as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(BEFORE)
        cluster.wait_finished(BEFORE)
        cluster.stop()
        losses = cluster.losses()
    expected = {step.step: step.loss for step in train_reference(trained).steps}
    assert losses == pytest.approx(expected, rel=5e-3)
    assert losses[1] == pytest.approx(expected[1], rel=1e-6), "nothing was summed before it"
    assert losses[5] != pytest.approx(expected[5], rel=1e-6)


MOMENTUM = {"optimizer": NESTEROV, "schedule": ScheduleSpec(name="linear", warmup=1)}
RECOMPUTED = {"recompute": "layer"}
COSINE = {"schedule": ScheduleSpec(name="cosine")}


@pytest.mark.parametrize(
    ("training", "transport", "data_plane"),
    [
        # Of momentum that moves with its layer.
        pytest.param(MOMENTUM, "staged", "sealed", id="momentum-staged-sealed"),
        pytest.param(RECOMPUTED, "links", "sealed", id="recomputed-links-sealed"),
        pytest.param(RECOMPUTED, "links", "clear", id="recomputed-links-clear"),
        pytest.param(COSINE, "nccl", "clear", id="cosine-nccl-clear"),
        pytest.param(
            MOMENTUM, "staged", "clear", id="momentum-staged-clear", marks=pytest.mark.soak
        ),
        pytest.param(COSINE, "nccl", "sealed", id="cosine-nccl-sealed", marks=pytest.mark.soak),
    ],
)
def test_losses_are_those_of_one_process(
    warm: WarmWorkers, training: dict[str, object], transport: Transport, data_plane: DataPlane
) -> None:
    trained = replace(job(**training), data_plane=data_plane)
    victim = WorkerId(NodeName("e"), 0)
    fault = FaultRule(worker=victim, point="before:Backward", step=3, action="kill_worker")
    with Director(warm, trained, [fault], transport=transport) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(BEFORE)
        cluster.wait(lambda: cluster.workers[victim].gone, "the scripted kill")
        cluster.assign(AFTER)
        cluster.wait_finished(AFTER)
        cluster.stop()
        losses = cluster.losses()
    expected = {step.step: step.loss for step in train_reference(trained).steps}
    assert losses == pytest.approx(expected, rel=1e-12)


def test_a_loss_changes_nothing_in_float8(warm: WarmWorkers) -> None:
    """Scales follow from a micro-batch alone. With the same shares, sums are in the same order."""
    trained = job(precision="fp8", fp8_recipe="rowwise")
    victim = WorkerId(NodeName("e"), 0)
    fault = FaultRule(worker=victim, point="before:Backward", step=3, action="kill_worker")
    after = make_plan(2, [[("a", 2), ("b", 3)], [("c", 3), ("d", 2)]], [4, 4])
    found = []
    for faults in ([], [fault]):
        with Director(warm, trained, faults) as cluster:
            cluster.start("a", "b", "c", "d", "e")
            cluster.assign(BEFORE)
            if faults:
                cluster.wait(lambda: cluster.workers[victim].gone, "the scripted kill")
                cluster.assign(after)
            cluster.wait_finished(after if faults else BEFORE)
            cluster.stop()
            found.append(cluster.losses())
    assert found[1] == found[0]
    expected = {step.step: step.loss for step in train_reference(trained).steps}
    assert found[0] == pytest.approx(expected, rel=2e-3)
