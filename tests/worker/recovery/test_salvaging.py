"""A loss in mid-step on real worker processes: what the others have computed is not done again.

Workers are held at exact points before one of them is killed, so that it is known who has which
micro-batch. The step that is done again in part must come out as it does undisturbed, in float64.
"""

import dataclasses
from collections.abc import Sequence

import pytest

from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, OptimizerSpec, TrainingSpec
from oobleck.core.messages import FaultRule, PhaseReached
from oobleck.core.plan import Plan
from oobleck.core.schedules import Schedule
from support.director import Director, WarmWorkers, make_plan
from support.folders import TEXT
from support.reference import ReferenceRun, train_reference

STEPS = 4
#: The step that is cut off.
HIT = 3


def make_job(*, tied: bool = True) -> JobSpec:
    return JobSpec(
        name="salvage",
        model=ModelSpec(layers=3, hidden=32, heads=2, sequence_length=16, dropout=0.1, tied=tied),
        data=DataSpec(text=(TEXT,)),
        training=TrainingSpec(
            steps=STEPS,
            global_batch=8,
            microbatch=1,
            precision="fp64",
            optimizer=OptimizerSpec(lr=1e-2),
        ),
    )


@pytest.fixture(scope="module")
def references() -> dict[bool, ReferenceRun]:
    return {tied: train_reference(make_job(tied=tied)) for tied in (True, False)}


#: Micro-batches 0 to 3 and 4 to 7.
CUTS = [[("a", 2), ("b", 3)], [("c", 1), ("d", 2), ("e", 2)]]
FIVE = make_plan(1, CUTS, [4, 4])
SAME = make_plan(2, CUTS, [4, 4])
WITHOUT_E = make_plan(2, [[("a", 2), ("b", 3)], [("c", 3), ("d", 2)]], [5, 3])
A_B_C = make_plan(3, [[("a", 1), ("b", 3), ("c", 1)]], [8])
A_C_D = make_plan(3, [[("a", 1), ("c", 2), ("d", 2)]], [8])


def rule(
    node: str, point: str, microbatch: int | None = None, action: str = "hold", step: int = HIT
) -> FaultRule:
    return FaultRule(
        worker=WorkerId(NodeName(node), 0),
        point=point,
        step=step,
        microbatch=microbatch,
        action=action,  # type: ignore[arg-type]
    )


def salvaged(cluster: Director, plan: Plan) -> int:
    """What all workers of `plan` say was not done again."""
    joined = [
        message
        for worker in plan.workers
        for message in cluster.said(worker, PhaseReached, plan.generation)
        if isinstance(message, PhaseReached) and message.phase == "joined"
    ]
    assert len(joined) == len(plan.workers)
    assert {message.committed_step for message in joined} == {HIT - 1}
    (count,) = {message.salvaged_microbatches for message in joined}
    return count


def lose(cluster: Director, victim: str, held: Sequence[str]) -> None:
    """Kill `victim` once all of `held` are where they are to be held, until the next plan."""
    cluster.wait(lambda: all(map(cluster.has_faulted, held)), "all where they are held")
    cluster.kill(victim)
    worker = WorkerId(NodeName(victim), 0)
    cluster.wait(lambda: cluster.workers[worker].gone, "the kill")


def has_layers(cluster: Director, node: str, plan: Plan) -> bool:
    """Return whether the node's worker has all layers that the plan gives it."""
    reached = cluster.said(WorkerId(NodeName(node), 0), PhaseReached, plan.generation)
    return any(one.phase == "transferred" for one in reached if isinstance(one, PhaseReached))


def check(cluster: Director, reference: ReferenceRun) -> None:
    losses = cluster.losses()
    assert list(losses) == [step.step for step in reference.steps]
    assert list(losses.values()) == pytest.approx(
        [step.loss for step in reference.steps], rel=1e-12
    )
    for expected in reference.steps:
        record = cluster.records[expected.step][0]
        assert record.samples_digest == expected.samples_digest
        assert record.grad_norm == pytest.approx(expected.grad_norm, rel=1e-11)


@pytest.mark.parametrize(
    ("victim", "after", "holds", "kept", "schedule", "tied"),
    [
        pytest.param(
            "e",
            WITHOUT_E,
            [rule("a", "before:Vote"), rule("b", "before:Vote"), rule("e", "before:Backward", 5)],
            4,
            "1f1b",
            True,
            id="the other pipeline is done",
        ),
        pytest.param(
            "e",
            WITHOUT_E,
            [
                rule("a", "after:Backward", 1),
                rule("b", "before:Backward", 2),
                rule("e", "before:LoadTokens", 4),
            ],
            2,
            "1f1b",
            False,
            id="the other pipeline is in the middle",
        ),
        pytest.param(
            "e",
            WITHOUT_E,
            [rule(node, "reduced") for node in "abcde"],
            4,
            "gpipe",
            True,
            id="all sums are done, and no vote",
        ),
        pytest.param(
            "a",
            SAME,
            [rule("b", "before:Vote"), *(rule(node, "before:Vote") for node in "acde")],
            4,
            "1f1b",
            True,
            id="the replaced first stage lacks what the last one has",
        ),
        pytest.param(
            "b",
            SAME,
            [rule("a", "after:Backward", 3), *(rule(node, "before:Vote") for node in "bcde")],
            4,
            "gpipe",
            False,
            id="the replaced last stage lacks what the first one has",
        ),
        pytest.param(
            "a",
            SAME,
            [
                rule("a", "after:Backward", 1),
                rule("c", "after:Backward", 6),
                rule("d", "after:SendGradient", 6),
                rule("e", "before:BackwardWeight", 6),
            ],
            3,
            "zb-h1",
            True,
            id="weight gradients were left for later",
        ),
    ],
)
def test_what_survives_is_not_done_again(
    warm: WarmWorkers,
    references: dict[bool, ReferenceRun],
    victim: str,
    after: Plan,
    holds: Sequence[FaultRule],
    kept: int,
    schedule: Schedule,
    tied: bool,
) -> None:
    with Director(warm, make_job(tied=tied), holds) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(dataclasses.replace(FIVE, schedule=schedule))
        lose(cluster, victim, [hold.worker.node for hold in holds])
        if WorkerId(NodeName(victim), 0) in after.workers:
            cluster.faults = ()
            cluster.start(victim)
        after = dataclasses.replace(after, schedule=schedule)
        cluster.assign(after)
        cluster.wait_finished(after)
        assert salvaged(cluster, after) == kept
        cluster.stop()
        check(cluster, references[tied])


@pytest.mark.parametrize(
    ("victim", "point", "microbatch", "step", "after"),
    [
        ("d", "before:transfer", None, HIT - 1, A_B_C),
        ("b", "after:Backward", 4, HIT, A_C_D),
        ("b", "reduced", None, HIT, A_C_D),
    ],
    ids=["before the layers have moved", "between backwards", "before the vote"],
)
def test_sums_go_on_growing_over_a_second_loss(
    warm: WarmWorkers,
    references: dict[bool, ReferenceRun],
    victim: str,
    point: str,
    microbatch: int | None,
    step: int,
    after: Plan,
) -> None:
    """One dies on the way to the step that is done again, or in it; then layers are cut anew."""
    holds = [rule("a", "before:Vote"), rule("b", "before:Vote"), rule("e", "before:Vote")]
    second = rule(victim, point, microbatch, step=step)
    # Over NCCL, who gives its layers may go on and die before the other has all of them.
    with Director(warm, make_job(), [*holds, second], transport="links") as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(FIVE)
        lose(cluster, "e", ["a", "b", "e"])
        cluster.assign(WITHOUT_E)
        cluster.wait(lambda: cluster.has_stopped_at(victim, point), "the second loss")
        if victim == "b":
            # It computes its own micro-batches while its layers are still on their way.
            cluster.wait(lambda: has_layers(cluster, "d", WITHOUT_E), "its layers to arrive")
        cluster.kill(victim)
        worker = WorkerId(NodeName(victim), 0)
        cluster.wait(lambda: cluster.workers[worker].gone, "the second kill")
        cluster.assign(after)
        cluster.wait_finished(after)
        cluster.stop()
        check(cluster, references[True])
