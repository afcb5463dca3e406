"""A loss that gives sums and weights: the mean over the whole batch on any plan, whatever fails.

Compared with torch's own weighted mean over all tags of a batch. In one step no sample has a tag.
"""

import functools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs

from oobleck.core.job.code import Json
from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.spec import DataSpec, EvaluationSpec, JobSpec, TrainingSpec
from oobleck.core.messages import Committed, FaultRule, PhaseReached
from oobleck.core.plan import Plan
from oobleck.worker.models.checks.describe import describe
from oobleck.worker.runtime import code
from oobleck.worker.state.describe_optimizer import describe as describe_optimizer
from support.director import Director, WarmWorkers, make_plan, worker_named
from support.folders import ROOT
from support.outputs import read_output
from support.reference import assert_same_weights
from support.rerouted import rerouted, wait_lost
from support.weighted_loop import RATE, MakeOptimizer, Trained, adamw, train
from support.weighted_models import BATCH, EMPTY_STEP, SEED, Tagged

SUPPORT = str(ROOT / "tests" / "support")
STEPS, EVERY = 5, 2
DUE = (2, 4, 5)
#: Of samples that are evaluated: no number of a micro-batch divides it.
HELD_OUT = 11


@pytest.fixture(autouse=True)
def own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, SUPPORT])
    code.allow((code.ANY,))


def make_job(output: Path, **training: object) -> JobSpec:
    spec = OwnModelSpec(python="weighted_models:tagger", path=SUPPORT)
    held_out = Json(f'{{"size": {HELD_OUT}, "seed": 4, "empty_step": 0}}')
    values: dict[str, object] = {
        "steps": STEPS,
        "global_batch": BATCH,
        "microbatch": 2,
        "seed": SEED,
        "precision": "fp64",
        "optimizer": OptimizerSpec(lr=RATE),
    }
    job = JobSpec(
        name="weighted",
        model=spec,
        data=DataSpec(python="weighted_models:Tagged", path=SUPPORT),
        training=TrainingSpec(**{**values, **training}),  # type: ignore[arg-type]
        evaluation=EvaluationSpec(
            every=EVERY,
            data=DataSpec(python="weighted_models:Tagged", path=SUPPORT, arguments=held_out),
        ),
        output=str(output),
    )
    return replace(job, model=replace(spec, described=describe(job, Tagged()[0])))


@functools.cache
def expected(clip: float = 1.0, optimizer: MakeOptimizer = adamw) -> Trained:
    held_out = Tagged(HELD_OUT, seed=4, empty_step=0)
    return train(Tagged(), STEPS, clip=clip, optimizer=optimizer, held_out=held_out, due=DUE)


def check(cluster: Director, job: JobSpec, wanted: Trained, *, within: float = 1e-12) -> None:
    losses = cluster.losses()
    assert list(losses) == list(range(1, len(losses) + 1))
    assert losses[EMPTY_STEP] == 0.0, "nothing was to be learned"
    assert list(losses.values()) == pytest.approx(wanted.losses, rel=within, abs=0)
    for step, norm in enumerate(wanted.norms, 1):
        for record in cluster.records[step]:
            assert record.grad_norm == pytest.approx(norm, rel=10 * within)
            assert not record.skipped
            assert record.tokens == BATCH, "samples are no rows of tokens"
    for step, records in cluster.evaluations.items():
        assert {record.samples for record in records} == {HELD_OUT}
        for record in records:
            assert record.loss == pytest.approx(wanted.evaluations[step], rel=within, abs=0)
    assert list(cluster.evaluations) == list(wanted.evaluations)
    weights = {name: value.detach().numpy() for name, value in wanted.net.named_parameters()}
    assert_same_weights(read_output(str(job.output)), weights, rtol=100 * within)


def finish(cluster: Director, plan: Plan) -> None:
    cluster.assign(plan)
    cluster.wait_finished(plan)
    cluster.stop()


#: Pipelines of unequal shares, cut differently.
UNEVEN = make_plan(1, [[("a", 2), ("b", 2)], [("c", 4)]], [4, 2])
#: Of two and three workers, of which some have no row of a micro-batch.
SHARED = make_plan(1, [[("a", 2, 2), ("b", 2, 3)]], [6])
SPLIT = make_plan(1, [[("a", 1), ("b", 3)], [("c", 2), ("d", 2)]], [2, 4], schedule="zb-h1")


@pytest.mark.parametrize(
    ("plan", "training"),
    [
        pytest.param(make_plan(1, [[("a", 4)]], [12]), {"microbatch": 1}, id="row by row"),
        pytest.param(make_plan(1, [[("a", 4)]], [3]), {"microbatch": 4}, id="micro-batches of 4"),
        pytest.param(UNEVEN, {}, id="pipelines of unequal shares"),
        pytest.param(SHARED, {}, id="shared stages"),
        pytest.param(SPLIT, {"microbatch": 1}, id="backward in two parts"),
        pytest.param(UNEVEN, {"recompute": "layer"}, id="recomputation"),
        pytest.param(UNEVEN, {"clip": 0.05}, id="clipping in each step"),
    ],
)
def test_undisturbed_it_is_the_mean_over_the_whole_batch(
    warm: WarmWorkers, tmp_path: Path, plan: Plan, training: dict[str, object]
) -> None:
    count = BATCH // int(training.get("microbatch", 2))  # type: ignore[call-overload]
    shares = [route.microbatches * count // plan.microbatches for route in plan.routes]
    routes = (structs.replace(r, microbatches=s) for r, s in zip(plan.routes, shares, strict=True))
    plan = replace(plan, routes=tuple(routes))
    job = make_job(tmp_path / "out", **training)
    with Director(warm, job) as cluster:
        cluster.start(*map(str, plan.workers))
        finish(cluster, plan)
        check(cluster, job, expected(float(training.get("clip", 1.0))))  # type: ignore[arg-type]


def rule(node: str, point: str, *, step: int, action: str = "kill_worker") -> FaultRule:
    return FaultRule(worker=worker_named(node), point=point, step=step, action=action)  # type: ignore[arg-type]


FOUR = make_plan(1, [[("a", 2), ("b", 2)], [("c", 1), ("d", 3)]], [3, 3])
WITHOUT_D = make_plan(2, [[("a", 2), ("b", 2)], [("c", 4)]], [2, 4])


@pytest.mark.parametrize(
    ("point", "step"),
    [
        ("after:Backward", 2),
        ("reduced", 2),
        ("voting", EMPTY_STEP),
        ("before:OptimizerStep", 2),
        ("evaluating", 2),
    ],
)
def test_a_loss_changes_nothing(warm: WarmWorkers, tmp_path: Path, point: str, step: int) -> None:
    job = make_job(tmp_path / "out")
    with Director(warm, job, [rule("d", point, step=step)]) as cluster:
        cluster.start("a", "b", "c", "d")
        cluster.assign(FOUR)
        wait_lost(cluster, FOUR, "d")
        finish(cluster, WITHOUT_D)
        check(cluster, job, expected())


def test_micro_batches_that_are_not_done_again_keep_their_weights(
    warm: WarmWorkers, tmp_path: Path
) -> None:
    job = make_job(tmp_path / "out")
    holds = [rule(node, "reduced", step=2, action="hold") for node in "abcd"]
    with Director(warm, job, holds) as cluster:
        cluster.start("a", "b", "c", "d")
        cluster.assign(FOUR)
        cluster.wait(lambda: all(map(cluster.has_faulted, "abcd")), "all before the vote")
        cluster.kill("d")
        wait_lost(cluster, FOUR, "d")
        finish(cluster, WITHOUT_D)
        assert salvaged(cluster, WITHOUT_D) == {3}
        check(cluster, job, expected())


def salvaged(cluster: Director, plan: Plan) -> set[int]:
    return {said.salvaged_microbatches for said in joined(cluster, plan)}


def joined(cluster: Director, plan: Plan) -> Sequence[PhaseReached]:
    told = (cluster.said(worker, PhaseReached, plan.generation) for worker in plan.workers)
    return [m for each in told for m in each if isinstance(m, PhaseReached) and m.phase == "joined"]


def test_who_has_not_seen_the_vote_applies_what_it_said(warm: WarmWorkers, tmp_path: Path) -> None:
    job = make_job(tmp_path / "out", clip=0.05)
    behind = rule("c", "voting", step=2, action="hold")
    with Director(warm, job, [behind]) as cluster:
        cluster.start("a", "b", "c", "d")
        cluster.assign(FOUR)
        cluster.wait(lambda: len(cluster.records.get(2, ())) == 3, "the step of all but c")
        cluster.kill("d")
        wait_lost(cluster, FOUR, "d")
        cluster.assign(WITHOUT_D)
        cluster.wait_finished(WITHOUT_D)
        (told,) = cluster.said(worker_named("c"), Committed)[1:2]
        assert isinstance(told, Committed)
        assert told.record.loss == pytest.approx(expected(0.05).losses[1], rel=1e-12)
        assert sum(said.rolled_forward for said in joined(cluster, WITHOUT_D)) == 1
        cluster.stop()
        check(cluster, job, expected(0.05))


def test_micro_batches_that_go_to_other_pipelines(warm: WarmWorkers, tmp_path: Path) -> None:
    job = make_job(tmp_path / "out", microbatch=1)
    whole = make_plan(1, [[("a", 2), ("b", 2)], [("c", 1), ("d", 3)]], [7, 5])
    around = rerouted(whole, job, "b")
    with Director(warm, job, [rule("b", "before:Backward", step=2)]) as cluster:
        cluster.start("a", "b", "c", "d")
        cluster.assign(whole)
        wait_lost(cluster, whole, "b")
        finish(cluster, around)
        check(cluster, job, expected())


def test_sums_of_gradients_in_bf16(warm: WarmWorkers, tmp_path: Path) -> None:
    job = make_job(tmp_path / "out", precision="fp32", gradient_sums="bf16")
    with Director(warm, job) as cluster:
        cluster.start("a", "b", "c", "d")
        finish(cluster, FOUR)
        losses = list(cluster.losses().values())
    assert losses[0] == pytest.approx(expected().losses[0], rel=1e-6)
    assert losses == pytest.approx(expected().losses, rel=5e-3)


def test_an_optimizer_of_the_users(warm: WarmWorkers, tmp_path: Path) -> None:
    own = OptimizerSpec(python="torch.optim:NAdam", lr=RATE, weight_decay=0.0)
    spec = TrainingSpec(steps=STEPS, global_batch=BATCH, optimizer=own)
    job = make_job(tmp_path / "out", optimizer=replace(own, described=describe_optimizer(spec)))
    wanted = expected(optimizer=lambda parameters: torch.optim.NAdam(parameters, lr=RATE))
    with Director(warm, job) as cluster:
        cluster.start("a", "b", "c")
        finish(cluster, UNEVEN)
        check(cluster, job, wanted)
