"""Stages that several workers of a node share train like one process, also while workers are lost.

Real processes and plans cut as each test says; every loss is compared in float64 with that of one
process without any of this, where anything but the order of sums would show.
"""

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from oobleck.core.ids import Generation
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.spec import CheckpointSpec, DataSpec, EvaluationSpec, JobSpec, TrainingSpec
from oobleck.core.messages import CheckpointSaved, FaultRule, PhaseReached
from oobleck.core.plan import Plan
from support.director import Cut, Director, Transport, WarmWorkers, make_plan, worker_named
from support.folders import TEXT
from support.outputs import read_output
from support.reference import ReferenceRun, assert_same_weights, train_reference

STEPS = 5
LAYERS = 5


@functools.cache
def text() -> str:
    return TEXT


def job(output: Path | None = None, *, tied: bool = True, **training: object) -> JobSpec:
    values: dict[str, object] = {
        "steps": STEPS,
        "global_batch": 12,
        "microbatch": 2,
        "precision": "fp64",
        "optimizer": OptimizerSpec(lr=1e-2),
    }
    return JobSpec(
        name="shared",
        model=ModelSpec(layers=3, hidden=24, heads=2, sequence_length=16, dropout=0.1, tied=tied),
        data=DataSpec(text=(text(),)),
        training=TrainingSpec(**{**values, **training}),  # type: ignore[arg-type]
        evaluation=EvaluationSpec(every=2, fraction=0.02),
        output=str(output) if output else None,
    )


def workers_of(plan: Plan) -> list[str]:
    return [f"{worker.node}/{worker.slot}" for worker in plan.workers]


@functools.cache
def alone(tied: bool = True, microbatch: int = 2) -> ReferenceRun:
    return train_reference(job(tied=tied, microbatch=microbatch))


def check(cluster: Director, output: Path, expected: ReferenceRun) -> None:
    found = cluster.losses()
    assert list(found) == [step.step for step in expected.steps]
    assert list(found.values()) == pytest.approx([s.loss for s in expected.steps], rel=1e-12)
    digests = {step: records[0].samples_digest for step, records in cluster.records.items()}
    assert digests == {step.step: step.samples_digest for step in expected.steps}
    assert list(cluster.evaluations) == list(expected.evaluations)
    for step, records in cluster.evaluations.items():
        assert records[0].loss == pytest.approx(expected.evaluations[step], rel=1e-12)
    assert_same_weights(read_output(output), expected.weights, rtol=1e-9)


#: Two nodes of two workers: a pipeline of one stage on each; and one pipeline of two stages.
SIDE_BY_SIDE = make_plan(1, [[("a", 5, 2)], [("b", 5, 2)]], [3, 3])
IN_A_ROW = make_plan(1, [[("a", 2, 2), ("b", 3, 2)]], [6])
#: The same layers on 2 workers, on 1 and on 3, and stages of 2 and 1 workers side by side.
UNEVEN = make_plan(
    1, [[("a", 2, 2), ("a", 3, 1)], [("b", 4, 1), ("b", 1, 2)], [("c", 5, 3)]], [2, 3, 1]
)
#: Of three and four workers, of which some have no row of a micro-batch.
FOUR = make_plan(1, [[("a", 5, 4)], [("b", 2, 3), ("c", 3, 4)]], [3, 3])
FOUR_RESIDENT = make_plan(1, [[("a", 5, 4)], [("b", 2, 3), ("c", 3, 4)]], [3, 3], resident=True)
SPLIT = make_plan(
    1, [[("a", 2, 2), ("b", 3, 3)], [("c", 3, 1), ("c", 2, 2)]], [4, 2], schedule="zb-h1"
)


@pytest.mark.parametrize(
    ("plan", "tied", "training", "transport"),
    [
        (SIDE_BY_SIDE, True, {}, "nccl"),
        (
            make_plan(1, [[("a", 5, 2)], [("b", 5, 2)]], [3, 3], resident=True),
            False,
            {},
            "links",
        ),
        # What frees and refills weights goes with recomputation, and through pinned buffers.
        (IN_A_ROW, False, {"recompute": "layer"}, "links"),
        (UNEVEN, True, {}, "links"),
        (SPLIT, True, {}, "staged"),
        (
            make_plan(1, [[("a", 2, 2), ("b", 3, 3)]], [4], resident=True),
            True,
            {"microbatch": 3},
            "nccl",
        ),
        (
            make_plan(1, [[("a", 2, 2), ("b", 3, 3)], [("c", 5)]], [6, 6]),
            False,
            {"microbatch": 1},
            "links",
        ),
        pytest.param(FOUR, True, {}, "nccl", marks=pytest.mark.soak),  # 11 workers
        pytest.param(FOUR, True, {}, "staged", marks=pytest.mark.soak),
        pytest.param(FOUR_RESIDENT, True, {}, "nccl", marks=pytest.mark.soak),
        pytest.param(SPLIT, True, {}, "nccl", marks=pytest.mark.soak),
    ],
    ids=[
        "2+2",
        "2+2 resident",
        "2 > 2 again",
        "uneven",
        "split",
        "2 > 3 of 3 rows",
        "of one row",
        "4+3 > 4",
        "4+3 > 4 staged",
        "4+3 > 4 resident",
        "split over NCCL",
    ],
)
def test_equals_one_process(
    warm: WarmWorkers,
    tmp_path: Path,
    plan: Plan,
    tied: bool,
    training: dict[str, object],
    transport: Transport,
) -> None:
    with Director(warm, job(tmp_path, tied=tied, **training), transport=transport) as cluster:
        cluster.start(*workers_of(plan))
        cluster.assign(plan)
        cluster.wait_finished(plan)
        cluster.stop()
        check(cluster, tmp_path, alone(tied, training.get("microbatch", 2)))


def fault(worker: str, point: str, *, step: int = 3, action: str = "kill_worker") -> FaultRule:
    return FaultRule(worker=worker_named(worker), point=point, step=step, action=action)  # type: ignore[arg-type]


def is_gone(cluster: Director, worker: str) -> bool:
    return cluster.workers[worker_named(worker)].gone


TWO_AND_TWO = make_plan(1, [[("a", 5, 2)], [("b", 5, 2)]], [3, 3])
RESIDENT = make_plan(1, [[("a", 5, 2)], [("b", 5, 2)]], [3, 3], resident=True)
MIXED = make_plan(1, [[("a", 2, 1), ("b", 3, 2)], [("c", 5, 1)]], [3, 3])


@pytest.mark.parametrize(
    ("before", "victim", "point", "cuts", "transport"),
    [
        # Half of a's state is lost: from the other pipeline.
        (TWO_AND_TWO, "a/1", "after:Backward", [[("a", 5, 1)], [("b", 5, 2)]], "links"),
        (RESIDENT, "a/1", "after:Forward", [[("a", 5, 1)], [("b", 5, 2)]], "links"),
        pytest.param(
            *(TWO_AND_TWO, "b/0", "reduced", [[("a", 5, 2)], [("b", 2, 1), ("b", 3, 2)]], "links"),
            marks=pytest.mark.soak,
        ),
        # A whole layer becomes halves, and halves become thirds.
        (MIXED, "c/0", "before:Backward", [[("a", 2, 2), ("b", 3, 3)]], "links"),
        (MIXED, "b/1", "before:SyncGradient", [[("a", 4, 3), ("a", 1, 1)], [("c", 5, 1)]], "links"),
        # The others of a have asked for the exchange of a layer, in which it never takes part.
        pytest.param(
            *(FOUR, "a/2", "before:Forward", [[("a", 5, 3)], [("b", 2, 3), ("c", 3, 4)]], "nccl"),
            marks=pytest.mark.soak,
        ),
        pytest.param(
            *(FOUR, "a/2", "before:Backward", [[("a", 5, 3)], [("b", 2, 3), ("c", 3, 4)]], "nccl"),
            marks=pytest.mark.soak,
        ),
        pytest.param(
            *(FOUR_RESIDENT, "c/0", "before:Backward", [[("a", 5, 4)], [("b", 5, 3)]], "nccl"),
            marks=pytest.mark.soak,
        ),
        (FOUR, "c/3", "before:Backward", [[("a", 5, 4)], [("b", 5, 3)]], "staged"),
    ],
    ids=[
        "2 to 1",
        "2 to 1 resident",
        "2 to 1 and 2",
        "1 to 2, 2 to 3",
        "1 to 3",
        "4 to 3 before a forward",
        "4 to 3 before a backward",
        "3 > 4 to 3",
        "3 > 4 to 3 staged",
    ],
)
def test_losses_regroup_shares(
    warm: WarmWorkers,
    tmp_path: Path,
    before: Plan,
    victim: str,
    point: str,
    cuts: list[list[Cut]],
    transport: Transport,
) -> None:
    after = make_plan(2, cuts, [3, 3] if len(cuts) == 2 else [6])
    with Director(warm, job(tmp_path), [fault(victim, point)], transport=transport) as cluster:
        cluster.start(*workers_of(before))
        cluster.assign(before)
        cluster.wait(lambda: is_gone(cluster, victim), "the scripted kill")
        cluster.faults = ()
        cluster.start(*(w for w in workers_of(after) if w not in workers_of(before) or w == victim))
        cluster.assign(after)
        cluster.wait_finished(after)
        joined = [
            message
            for worker in after.workers
            for message in cluster.said(worker, PhaseReached, after.generation)
            if isinstance(message, PhaseReached) and message.phase == "joined"
        ]
        assert {message.committed_step for message in joined} == {2}
        cluster.stop()
        check(cluster, tmp_path, alone())


def test_a_checkpoint_of_shares_goes_on_in_other_shares(warm: WarmWorkers, tmp_path: Path) -> None:
    spec = job(tmp_path / "weights")
    spec = replace(spec, checkpoint=CheckpointSpec(path=str(tmp_path / "saved"), every=2))
    held = fault("a/1", "before:LoadTokens", step=4, action="hold")
    with Director(warm, spec, [held]) as cluster:
        cluster.start(*workers_of(TWO_AND_TWO))
        cluster.assign(TWO_AND_TWO)
        cluster.wait(lambda: cluster.has_faulted("a/1"), "step 4")
        cluster.wait(
            lambda: any(cluster.said(w, CheckpointSaved) for w in TWO_AND_TWO.workers), "step 2's"
        )
        first = dict(cluster.records)
    after = make_plan(1, [[("a", 5, 3)], [("b", 2, 1), ("b", 3, 2)]], [3, 3])
    with Director(warm, spec) as cluster:
        cluster.start(*workers_of(after))
        cluster.assign(after)
        cluster.wait_finished(after)
        cluster.stop()
        assert min(cluster.records) == 3
        cluster.records = {**first, **cluster.records}
        check(cluster, tmp_path / "weights", alone())


@pytest.mark.parametrize("point", ["before:transfer", "after:transfer"])
def test_shares_of_before_are_sources_until_the_next_commit(
    warm: WarmWorkers, tmp_path: Path, point: str
) -> None:
    """b goes from halves to thirds, loses the newest worker on the way, and goes back."""
    thirds = make_plan(2, [[("a", 2, 1), ("b", 3, 3)]], [6])
    halves = make_plan(3, [[("a", 2, 1), ("b", 3, 2)]], [6])
    with Director(warm, job(tmp_path), [fault("c", "after:Forward")]) as cluster:
        cluster.start(*workers_of(MIXED))
        cluster.assign(MIXED)
        cluster.wait(lambda: is_gone(cluster, "c"), "the first kill")
        cluster.faults = (fault("b/2", point, step=2),)
        cluster.start("b/2")
        cluster.assign(thirds)
        cluster.wait(lambda: is_gone(cluster, "b/2"), "the second kill")
        cluster.assign(halves)
        cluster.wait_finished(halves)
        cluster.stop()
        check(cluster, tmp_path, alone())


def test_a_share_rolls_forward(warm: WarmWorkers, tmp_path: Path) -> None:
    """b/1 never reads the vote of step 3, which the others commit before a is lost."""
    after = make_plan(2, [[("b", 5, 2)]], [6])
    with Director(warm, job(tmp_path), [fault("b/1", "voting", action="hold")]) as cluster:
        cluster.start(*workers_of(TWO_AND_TWO))
        cluster.assign(TWO_AND_TWO)
        cluster.wait(lambda: len(cluster.records.get(3, ())) == 3, "step 3 of all but b/1")
        cluster.kill("a/0")
        cluster.assign(after)
        cluster.wait_finished(after)
        joined = {
            str(worker): message
            for worker in after.workers
            for message in cluster.said(worker, PhaseReached, after.generation)
            if isinstance(message, PhaseReached) and message.phase == "joined"
        }
        assert {message.committed_step for message in joined.values()} == {3}
        assert {name for name, m in joined.items() if m.rolled_forward} == {"b/1"}
        cluster.stop()
        check(cluster, tmp_path, alone())


def test_sums_of_a_resident_stage_are_known_to_have_the_whole_step(
    warm: WarmWorkers, tmp_path: Path
) -> None:
    """b keeps a part of a step over a loss, adds the rest of it as a resident stage, and loses
    its peers again before the vote."""
    first = [fault(f"b/{slot}", "after:Backward", action="hold") for slot in (0, 1)]
    again = make_plan(2, [[("a", 5, 2)], [("b", 5, 2)]], [3, 3], resident=True)
    last = make_plan(3, [[("b", 5, 2)]], [6])
    held = ("a/0", "b/0", "b/1")
    faults = [*first, fault("a/0", "before:Vote", action="hold")]
    with Director(warm, job(tmp_path), faults) as cluster:
        cluster.start(*workers_of(SIDE_BY_SIDE))
        cluster.assign(SIDE_BY_SIDE)
        cluster.wait(lambda: all(map(cluster.has_faulted, held)), "a/0 and b held")
        cluster.kill("a/0")
        cluster.wait(lambda: is_gone(cluster, "a/0"), "the first kill")
        # In the step that is done again, all of b's sums are complete when a/0 dies once more.
        cluster.faults = (fault("a/0", "reduced"),)
        cluster.start("a/0")
        cluster.assign(again)
        cluster.wait(lambda: is_gone(cluster, "a/0"), "the second kill")
        cluster.assign(last)
        cluster.wait_finished(last)
        joined = {
            message.salvaged_microbatches
            for worker in last.workers
            for message in cluster.said(worker, PhaseReached, last.generation)
            if isinstance(message, PhaseReached) and message.phase == "joined"
        }
        assert joined == {0}, "rows' losses are known in part, so all are computed again"
        cluster.stop()
        check(cluster, tmp_path, alone())


def test_a_sum_with_a_part_of_a_micro_batch_does_not_count(
    warm: WarmWorkers, tmp_path: Path
) -> None:
    """b has summed its first micro-batch into the shares, and with it what of the second one's
    gradients is not left for later, when its peer is lost."""
    plan = make_plan(1, [[("a", 2), ("b", 3, 2)], [("c", 5)]], [4, 2], schedule="zb-h1")
    held = [fault(f"b/{slot}", "after:BackwardWeight", action="hold") for slot in (0, 1)]
    with Director(warm, job(tmp_path), held) as cluster:
        cluster.start(*workers_of(plan))
        cluster.assign(plan)
        cluster.wait(lambda: all(map(cluster.has_faulted, ("b/0", "b/1"))), "b held")
        cluster.kill("a/0")
        cluster.wait(lambda: is_gone(cluster, "a/0"), "the kill")
        cluster.start("a/0")
        after = replace(plan, generation=Generation(2))
        cluster.assign(after)
        cluster.wait_finished(after)
        cluster.stop()
        check(cluster, tmp_path, alone())
