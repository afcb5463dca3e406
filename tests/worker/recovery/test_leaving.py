"""Workers that leave a plan at a step boundary: what they alone hold is handed over, no step is
done again, and the training is the same."""

from functools import partial

import pytest

from oobleck.core.ids import Generation, WorkerId
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.core.messages import FaultRule, Measure, Measured, PeerLost, PhaseReached
from oobleck.core.plan import Plan
from support.director import Director, WarmWorkers, make_plan, worker_named
from support.folders import TEXT

JOB = JobSpec(
    name="leaving",
    model=ModelSpec(layers=3, hidden=16, heads=2, sequence_length=8),
    data=DataSpec(text=(TEXT,)),
    training=TrainingSpec(steps=40, global_batch=4, precision="fp64"),
)
#: One pipeline: each layer is with one worker alone.
WHOLE = make_plan(1, [[("a", 2), ("b", 1), ("c", 2)]], [4])


@pytest.fixture(scope="module")
def undisturbed(warm: WarmWorkers) -> dict[int, float | None]:
    with Director(warm, JOB) as cluster:
        cluster.start("a", "b", "c")
        cluster.assign(WHOLE)
        cluster.wait_finished(WHOLE)
        cluster.stop()
        return cluster.losses()


def stop(worker: str, step: int) -> FaultRule:
    """Training stands there until the next plan is on its way to all."""
    return FaultRule(worker=worker_named(worker), point="before:Forward", step=step, action="stop")


def entered(cluster: Director, plan: Plan) -> None:
    cluster.wait(
        lambda: any(r[0].generation == plan.generation for r in cluster.records.values()),
        f"a step of generation {plan.generation}",
    )


def said(cluster: Director, plan: Plan, phase: str) -> list[PhaseReached]:
    return [
        word
        for worker in plan.workers
        for word in cluster.said(worker, PhaseReached, plan.generation)
        if isinstance(word, PhaseReached) and word.phase == phase
    ]


def measured(cluster: Director, worker: WorkerId, attempts: int) -> bool:
    found = [word for word in cluster.said(worker, Measured) if isinstance(word, Measured)]
    assert all(word.alone_s and not word.problem for word in found)
    return [word.attempt for word in found] == list(range(1, attempts + 1))


@pytest.mark.parametrize(
    ("boundary", "stopped"),
    [
        pytest.param(True, "", id="at a boundary"),
        pytest.param(False, "", id="at once"),
        pytest.param(True, "c", id="the giver stops for a while"),
        pytest.param(True, "b", id="the taker stops for a while"),
    ],
)
def test_what_only_the_leaving_hold_is_handed_over(
    warm: WarmWorkers, undisturbed: dict[int, float | None], boundary: bool, stopped: str
) -> None:
    without = make_plan(2, [[("a", 3), ("b", 2)]], [4])
    rules = [stop("b", 5)]
    if stopped:  # in the handover, which comes before the new plan's own meeting
        within = FaultRule(
            worker=worker_named(stopped),
            point="before:transfer",
            generation=Generation(2),
            action="stop",
        )
        rules.append(within)
    with Director(warm, JOB, rules) as cluster:
        cluster.start("a", "b", "c")
        cluster.assign(WHOLE)
        cluster.wait(lambda: cluster.has_faulted("b/0"), "step 5")
        cluster.assign(without, boundary=boundary, leaving=["c"], handover=True)
        cluster.let_go("b")
        if stopped:
            cluster.wait(lambda: cluster.has_stopped_at(stopped, "before:transfer"), "the handover")
            cluster.let_go(stopped)
        entered(cluster, without)
        cluster.kill("c")  # as an agent that ends does: nobody may miss it
        cluster.wait_finished(without)
        cluster.stop()
        assert cluster.losses() == pytest.approx(undisturbed, rel=1e-12)
        assert sum(word.received_bytes for word in said(cluster, without, "transferred")) > 0
        told = {word.layers for word in said(cluster, without, "received")}
        assert told >= {(0, 1, 2), (3, 4)}, "the master counts on them from then on"
        if boundary:
            assert not any(word.redo for word in said(cluster, without, "joined"))
        lost = [cluster.said(worker, PeerLost, without.generation) for worker in without.workers]
        assert not any(lost)


def test_who_holds_nothing_alone_just_leaves_and_may_come_back(
    warm: WarmWorkers, undisturbed: dict[int, float | None]
) -> None:
    plan = make_plan(1, [[("a", 3), ("b", 2)], [("c", 5)]], [2, 2])
    without = make_plan(2, [[("a", 3), ("b", 2)]], [4])
    again = make_plan(3, [[("a", 3), ("b", 2)], [("c", 5)]], [2, 2])
    with Director(warm, JOB, [stop("b", 5), stop("a", 10)]) as cluster:
        cluster.start("a", "b", "c")
        cluster.assign(plan)
        cluster.wait(lambda: cluster.has_faulted("b/0"), "step 5")
        cluster.assign(without, boundary=True, leaving=["c"])
        cluster.let_go("b")
        cluster.wait(lambda: cluster.has_faulted("a/0"), "step 10")
        # Who stands by measures as often as it is asked to, and what it has measured is one number.
        left = worker_named("c")
        for attempt in (1, 2):
            cluster.workers[left].channel.send(Measure(attempt=attempt, alone=True))
            told = partial(measured, cluster, left, attempt)
            cluster.wait(told, "what it has measured")
        cluster.assign(again, boundary=True)
        cluster.let_go("a")
        cluster.wait_finished(again)
        cluster.stop()
        assert cluster.losses() == pytest.approx(undisturbed, rel=1e-12)
        assert not any(
            word.redo for made in (without, again) for word in said(cluster, made, "joined")
        )
        assert not cluster.said(worker_named("c"), PeerLost)
