"""Hugging Face models on real worker processes, with a loss: as transformers trains them whole."""

import dataclasses
from pathlib import Path

import pytest

from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.spec import DataSpec, EvaluationSpec, JobSpec, TrainingSpec
from oobleck.core.messages import FaultRule
from oobleck.core.schedules import Schedule
from support import foreign
from support.director import Director, WarmWorkers, make_plan
from support.folders import TEXT
from support.outputs import read_output
from support.reference import ReferenceRun, assert_same_weights, train_reference

BYTES = {"vocab_size": 256}


def make_job(
    model: ModelSpec,
    output: Path,
    precision: str = "fp64",
    microbatch: int = 1,
    steps: int = 4,
) -> JobSpec:
    return JobSpec(
        name="foreign",
        model=model,
        data=DataSpec(text=(TEXT,)),
        training=TrainingSpec(
            steps=steps,
            global_batch=6,
            microbatch=microbatch,
            precision=precision,  # type: ignore[arg-type]
            optimizer=OptimizerSpec(lr=1e-2),
        ),
        evaluation=EvaluationSpec(every=2, fraction=0.05, samples=5),
        output=str(output),
    )


def train(warm: WarmWorkers, job: JobSpec, schedule: Schedule = "1f1b") -> Director:
    """Two pipelines of two stages, cut differently; in step 2 the last stage of one is killed."""
    victim = WorkerId(NodeName("d"), 0)
    fault = FaultRule(worker=victim, point="after:Forward", step=2, action="kill_worker")
    before = make_plan(1, [[("a", 2), ("b", 2)], [("c", 1), ("d", 3)]], [3, 3])
    after = make_plan(2, [[("a", 1), ("b", 3)], [("c", 4)]], [4, 2])
    before, after = (dataclasses.replace(plan, schedule=schedule) for plan in (before, after))
    with Director(warm, job, [fault]) as cluster:
        cluster.start("a", "b", "c", "d")
        cluster.assign(before)
        cluster.wait(lambda: cluster.workers[victim].gone, "the scripted kill")
        cluster.assign(after)
        cluster.wait_finished(after)
        cluster.stop()
        return cluster


@pytest.mark.parametrize(
    ("kind", "schedule", "precision", "config"),
    [
        ("gpt2", "zb-h1", "fp64", {}),
        ("llama", "1f1b", "fp64", {"num_key_value_heads": 2}),
        ("bert", "1f1b", "fp64", {"vocab_size": 257, "mask_token_id": 256}),
        ("bert", "1f1b", "fp32", {"vocab_size": 257, "mask_token_id": 256}),
    ],
)
def test_trains_as_the_whole_model_does(
    warm: WarmWorkers,
    tmp_path: Path,
    kind: str,
    schedule: Schedule,
    precision: str,
    config: dict[str, object],
) -> None:
    model = foreign.spec(kind, sequence_length=16, **{**BYTES, **config})
    job = make_job(model, tmp_path / "out", precision)
    cluster = train(warm, job, schedule)
    check(cluster, job, train_reference(job), within=1e-12 if precision == "fp64" else 1e-6)


def check(cluster: Director, job: JobSpec, reference: ReferenceRun, *, within: float) -> None:
    assert list(cluster.losses().values()) == pytest.approx(
        [step.loss for step in reference.steps], rel=within
    )
    assert reference.evaluations == {
        step: pytest.approx(records[0].loss, rel=within)
        for step, records in cluster.evaluations.items()
    }
    digests = {step.step: step.samples_digest for step in reference.steps}
    found = {step: records[0].samples_digest for step, records in cluster.records.items()}
    assert found == digests
    assert job.output is not None
    assert_same_weights(read_output(job.output), reference.weights, rtol=10 * within)


def train_alone(warm: WarmWorkers, job: JobSpec) -> Director:
    """All of the model on one worker."""
    with Director(warm, job) as cluster:
        cluster.start("alone")
        plan = make_plan(1, [[("alone", 4)]], [job.training.microbatches])
        cluster.assign(plan)
        cluster.wait_finished(plan)
        cluster.stop()
        return cluster


def test_dropout_is_the_same_on_any_plan(warm: WarmWorkers, tmp_path: Path) -> None:
    job = make_job(
        foreign.spec("gpt2", sequence_length=16, dropout=0.1, **BYTES), tmp_path / "disturbed"
    )
    disturbed = train(warm, job).losses()
    alone = train_alone(warm, job).losses()
    assert list(disturbed.values()) == pytest.approx(list(alone.values()), rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("gpt2", {"n_embd": 32}),
        ("llama", {"hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2}),
        ("bert", {"hidden_size": 32, "vocab_size": 257, "mask_token_id": 256}),
    ],
)
def test_fp8_agrees_in_the_loss_with_the_formula(
    warm: WarmWorkers, tmp_path: Path, kind: str, config: dict[str, object]
) -> None:
    """Weights are large enough at first for float8 to matter. The second step would be another one
    as soon as a gradient is summed in another order. Some processors sum products of bfloat16 in
    another order where there are more rows: single numbers are rounded otherwise."""
    large = {**BYTES, **config, "initializer_range": 0.3, "tie_word_embeddings": False}
    model = foreign.spec(kind, sequence_length=16, **large)
    job, wide = (make_job(model, tmp_path, each, 2, steps=1) for each in ("fp8", "bf16"))
    (record,) = train_alone(warm, job).records[1]
    (formula,), (wider,) = (train_reference(one).steps for one in (job, wide))
    assert record.loss == pytest.approx(formula.loss, rel=1e-4)
    assert record.grad_norm == pytest.approx(formula.grad_norm, rel=1e-2)
    assert record.loss != pytest.approx(wider.loss, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "schedule", "config"),
    [("gpt2", "zb-h1", {}), ("bert", "1f1b", {"vocab_size": 257, "mask_token_id": 256})],
)
def test_stages_of_two_workers_train_as_the_whole_model_does(
    warm: WarmWorkers,
    tmp_path: Path,
    kind: str,
    schedule: Schedule,
    config: dict[str, object],
) -> None:
    """Each computes half of the rows and keeps half of the state, of norms and biases too."""
    model = foreign.spec(kind, sequence_length=16, **{**BYTES, **config})
    job = make_job(model, tmp_path / "out", microbatch=2)
    plan = make_plan(1, [[("a", 2, 2), ("a", 2, 1)], [("b", 4, 2)]], [2, 1], schedule=schedule)
    with Director(warm, job) as cluster:
        cluster.start(*(f"{worker.node}/{worker.slot}" for worker in plan.workers))
        cluster.assign(plan)
        cluster.wait_finished(plan)
        cluster.stop()
    check(cluster, job, train_reference(job), within=1e-12)
