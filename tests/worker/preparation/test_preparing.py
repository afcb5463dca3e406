"""Plans for a step boundary on real workers: prepared while training goes on, and overtaken."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pytest

from oobleck.core.ids import Generation, WorkerId
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.core.messages import FaultRule, PeerLost, PhaseReached
from oobleck.core.plan import Plan
from support.director import Director, WarmWorkers, make_plan, worker_named
from support.folders import TEXT

STEPS = 24


@functools.cache
def job(precision: str = "fp64", dropout: float = 0.1) -> JobSpec:
    return JobSpec(
        name="preparing",
        model=ModelSpec(layers=3, hidden=32, heads=2, sequence_length=16, dropout=dropout),
        data=DataSpec(text=(TEXT,)),
        training=TrainingSpec(
            steps=STEPS,
            global_batch=8,
            microbatch=2,
            precision=precision,  # type: ignore[arg-type]
            optimizer=OptimizerSpec(lr=1e-2),
        ),
    )


@pytest.fixture(scope="module")
def undisturbed(warm: WarmWorkers) -> dict[int, float | None]:
    with Director(warm, job()) as cluster:
        cluster.start("alone")
        plan = make_plan(1, [[("alone", 5)]], [4])
        cluster.assign(plan)
        cluster.wait_finished(plan)
        cluster.stop()
        return cluster.losses()


def stop(node: str, step: int, point: str = "before:LoadTokens") -> FaultRule:
    """Hold all up until they are let go on."""
    return FaultRule(worker=worker_named(node), point=point, step=step, action="stop")


def transferred(cluster: Director, plan: Plan) -> list[PhaseReached]:
    return [
        word
        for worker in plan.workers
        for word in cluster.said(worker, PhaseReached, plan.generation)
        if isinstance(word, PhaseReached) and word.phase == "transferred"
    ]


def check_fed(cluster: Director, plan: Plan) -> None:
    """Something was, and nothing was left to the switch."""
    words = transferred(cluster, plan)
    assert sum(word.fed_bytes for word in words) > 0
    assert all(word.received_bytes == word.fed_bytes for word in words)


def check_votes(cluster: Director, plan: Plan) -> None:
    """Whoever has come to hold layers of a step knows the vote that made it."""
    first = min(s for s, rs in cluster.records.items() if rs[0].generation == plan.generation)
    written = "".join(cluster.workers[worker].written() for worker in plan.workers)
    taken = [line for line in written.splitlines() if "took over" in line]
    assert taken
    assert all(f"voted={first - 1}" in line for line in taken)


FOUR = make_plan(1, [[("a", 2), ("b", 3)], [("c", 3), ("d", 2)]], [2, 2])
SHARED = make_plan(1, [[("a", 2, 2), ("b", 3)], [("c", 5)]], [2, 2])
ONE = make_plan(1, [[("a", 1), ("b", 2), ("c", 2)]], [4])
CHANGES = [
    pytest.param(
        FOUR,
        make_plan(2, [[("a", 2), ("b", 3)], [("c", 1), ("d", 2), ("e", 2)]], [2, 2]),
        (),
        id="join",
    ),
    pytest.param(
        FOUR,
        make_plan(2, [[("a", 2), ("b", 3)], [("c", 3), ("d", 2)], [("e", 5)]], [2, 1, 1]),
        (),
        id="one more pipeline",
    ),
    pytest.param(
        FOUR, make_plan(2, [[("a", 5)], [("c", 3), ("d", 2)]], [2, 2]), ("b",), id="drain"
    ),
    pytest.param(
        FOUR,
        make_plan(2, [[("a", 4), ("b", 1)], [("c", 1), ("d", 4)]], [2, 2]),
        (),
        id="another cut",
    ),
    pytest.param(
        SHARED,
        make_plan(2, [[("a", 3, 2), ("b", 2)], [("c", 3), ("e", 2)]], [2, 2]),
        (),
        id="shared stage",
    ),
    pytest.param(
        SHARED, make_plan(2, [[("a", 5)], [("c", 2), ("e", 3, 2)]], [2, 2]), ("a/1", "b"), id="cuts"
    ),
]


def names(*plans: Plan) -> Sequence[str]:
    return sorted({str(worker) for plan in plans for worker in plan.workers})


@pytest.mark.parametrize(("before", "after", "leaving"), CHANGES)
def test_a_change_is_fed_and_trains_the_same(
    warm: WarmWorkers,
    undisturbed: dict[int, float | None],
    before: Plan,
    after: Plan,
    leaving: tuple[str, ...],
) -> None:
    with Director(warm, job(), [stop("a", 3)]) as cluster:
        cluster.start(*names(before, after))
        cluster.assign(before)
        cluster.wait(lambda: cluster.has_faulted("a/0"), "step 3")
        cluster.assign(after, boundary=True, leaving=leaving)
        cluster.let_go("a")
        cluster.wait_finished(after)
        cluster.stop()
        check_fed(cluster, after)
        check_votes(cluster, after)
        assert cluster.losses() == pytest.approx(undisturbed, rel=1e-12)
        assert not any(cluster.said(worker, PeerLost) for worker in cluster.workers)


def test_what_the_leaving_alone_hold_is_fed(
    warm: WarmWorkers, undisturbed: dict[int, float | None]
) -> None:
    without = make_plan(2, [[("a", 3), ("b", 2)]], [4])
    with Director(warm, job(), [stop("a", 3)]) as cluster:
        cluster.start("a", "b", "c")
        cluster.assign(ONE)
        cluster.wait(lambda: cluster.has_faulted("a/0"), "step 3")
        cluster.assign(without, boundary=True, leaving=["c"], handover=True)
        cluster.let_go("a")
        cluster.wait_finished(without)
        cluster.stop()
        check_fed(cluster, without)
        assert cluster.losses() == pytest.approx(undisturbed, rel=1e-12)


JOIN = make_plan(2, [[("a", 2), ("b", 3)], [("c", 1), ("d", 2), ("e", 2)]], [2, 2])


@dataclass(frozen=True, kw_only=True)
class Change:
    """A plan for a step boundary, and the plans that follow where a worker is lost meanwhile."""

    before: Plan
    after: Plan
    #: By who is lost: the plan without it; None: the one that is prepared needs it for nothing.
    rest: Mapping[str, Plan | None]
    leaving: tuple[str, ...] = ()
    handover: bool = False


TWO_HALVES = [("a", 2), ("b", 3)]
CHANGED = {
    # c gives, d gives and takes, e is new, and a has no part in what moves.
    "join": Change(
        before=FOUR,
        after=JOIN,
        rest={
            "a": make_plan(3, [[("b", 3), ("e", 2)], [("c", 3), ("d", 2)]], [2, 2]),
            "c": make_plan(3, [TWO_HALVES, [("d", 3), ("e", 2)]], [2, 2]),
            "d": make_plan(3, [TWO_HALVES, [("c", 3), ("e", 2)]], [2, 2]),
            "e": make_plan(3, [TWO_HALVES, [("c", 3), ("d", 2)]], [2, 2]),
            "a d": make_plan(3, [[("c", 3), ("b", 1), ("e", 1)]], [4]),
        },
    ),
    # a takes what c and d give, and b leaves.
    "drain": Change(
        before=FOUR,
        after=make_plan(2, [[("a", 5)], [("c", 3), ("d", 2)]], [2, 2]),
        leaving=("b",),
        rest={
            "a": make_plan(3, [[("c", 3), ("d", 2)]], [4]),
            "b": None,
            "d": make_plan(3, [[("a", 2), ("c", 3)]], [4]),
        },
    ),
    # b and d alone hold the upper layers.
    "handover": Change(
        before=make_plan(1, [TWO_HALVES, [("c", 2), ("d", 3)]], [2, 2]),
        after=make_plan(2, [[("a", 5)], [("c", 5)]], [2, 2]),
        leaving=("b", "d"),
        handover=True,
        rest={
            "c": make_plan(3, [[("a", 5)]], [4]),
            "d": make_plan(3, [[("a", 5)], [("c", 5)]], [2, 2]),
        },
    ),
    "shared stage": Change(
        before=SHARED,
        after=make_plan(2, [[("a", 3, 2), ("b", 2)], [("c", 3), ("e", 2)]], [2, 2]),
        rest={"a/1": make_plan(3, [TWO_HALVES, [("c", 3), ("e", 2)]], [2, 2])},
    ),
}
#: Of two victims the first comes to the point, and the other dies as soon as it is gone.
#: Each moment of a change once; the other workers' are soaks.
LOSSES = [
    ("join", "d", "prepared"),
    *[("join", "e", p) for p in ("preparing", "before:connect", "after:transfer")],
    *[("join", "c", p) for p in ("before:transfer", "reduced")],
    ("join", "a", "voting"),
    ("join", "a d", "before:agree"),
    ("drain", "b", "prepared"),
    ("drain", "d", "feeding"),
    ("handover", "d", "before:take over"),
    ("shared stage", "a/1", "before:agree"),
    *[
        pytest.param("join", victims, p, marks=pytest.mark.soak)
        for victims, points in {
            "a": ("prepared",),
            "a d": ("prepared",),
            "c": ("preparing", "feeding", "prepared", "before:take over", "before:agree"),
            "d": ("preparing", "feeding", "before:take over"),
            "e": (
                "before:rendezvous",
                "before:take over",
                "before:agree",
                "before:Backward",
                "voting",
            ),
        }.items()
        for p in points
    ],
    *[
        pytest.param(*loss, marks=pytest.mark.soak)
        for loss in [
            ("drain", "a", "before:agree"),
            ("drain", "d", "before:take over"),
            ("handover", "c", "before:rendezvous"),
            ("handover", "d", "feeding"),
        ]
    ],
]


@pytest.mark.parametrize(("title", "victims", "point"), LOSSES)
def test_a_loss_while_a_plan_is_prepared(
    warm: WarmWorkers,
    undisturbed: dict[int, float | None],
    title: str,
    victims: str,
    point: str,
) -> None:
    """Or while it is entered, until its first step is committed."""
    change = CHANGED[title]
    first, *others = victims.split()
    rule = FaultRule(
        worker=worker_named(first), point=point, generation=Generation(2), action="kill_worker"
    )
    with Director(warm, job(), [stop("a", 3), rule]) as cluster:
        cluster.start(*names(change.before, change.after))
        cluster.assign(change.before)
        cluster.wait(lambda: cluster.has_faulted("a/0"), "step 3")
        leaving, handover = change.leaving, change.handover
        cluster.assign(change.after, boundary=True, leaving=leaving, handover=handover)
        cluster.let_go("a")
        cluster.wait(lambda: cluster.workers[worker_named(first)].gone, "the loss")
        for other in others:
            cluster.kill(other)
        last = change.rest[victims]
        if last is not None:
            still = [node for node in leaving if node not in (first, *others)]
            cluster.assign(last, leaving=still, handover=bool(still))
        cluster.wait_finished(last or change.after)
        cluster.stop()
        assert cluster.losses() == pytest.approx(undisturbed, rel=1e-12)


def test_a_plan_that_is_overtaken_is_dropped(
    warm: WarmWorkers, undisturbed: dict[int, float | None]
) -> None:
    other = make_plan(3, [[("a", 1), ("b", 2), ("e", 2)], [("c", 3), ("d", 2)]], [2, 2])
    with Director(warm, job(), [stop("a", 3), stop("b", 5)]) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(FOUR)
        cluster.wait(lambda: cluster.has_faulted("a/0"), "step 3")
        cluster.assign(JOIN, boundary=True)
        cluster.let_go("a")
        cluster.wait(lambda: cluster.has_faulted("b/0"), "step 5")
        cluster.assign(other, boundary=True)
        cluster.let_go("b")
        cluster.wait_finished(other)
        cluster.stop()
        assert cluster.losses() == pytest.approx(undisturbed, rel=1e-12)


def test_a_copy_counts_for_nobody_before_the_switch(warm: WarmWorkers) -> None:
    """The one that leaves alone holds two layers, and ends when all of them have been fed."""
    ends = FaultRule(
        worker=worker_named("c"), point="prepared", generation=Generation(2), action="kill_worker"
    )
    without = make_plan(2, [[("a", 3), ("b", 2)]], [4])
    with Director(warm, job(), [stop("a", 3), ends]) as cluster:
        cluster.start("a", "b", "c")
        cluster.assign(ONE)
        cluster.wait(lambda: cluster.has_faulted("a/0"), "step 3")
        cluster.assign(without, boundary=True, leaving=["c"], handover=True)
        cluster.let_go("a")
        cluster.wait(lambda: cluster.workers[worker_named("c")].gone, "the end of c")
        last = make_plan(3, [[("a", 3), ("b", 2)]], [4])
        cluster.assign(last)
        lost = "no live worker holds the state of layer 3-4"
        # Whoever finds it first leaves, and the other one may hear of that before it finds it too.
        cluster.wait(
            lambda: any(has_said(cluster, worker, lost) for worker in last.workers),
            "a meeting without layers",
        )
        for worker in last.workers:
            cluster.wait(partial(has_said, cluster, worker, ""), f"{worker} out of the meeting")


def has_said(cluster: Director, worker: WorkerId, detail: str) -> bool:
    said = cluster.said(worker, PeerLost, Generation(3))
    return any(isinstance(word, PeerLost) and detail in word.detail for word in said)


def test_who_enters_a_plan_that_it_has_not_prepared_keeps_what_it_holds(
    warm: WarmWorkers, undisturbed: dict[int, float | None]
) -> None:
    """b hears of the plan in the middle of a step, in which the node that is to leave dies: so b
    alone holds its layers, and enters the plan without having been at a step boundary."""
    before = make_plan(1, [[("a", 2), ("b", 3)], [("x", 5)]], [2, 2])
    after = make_plan(2, [[("a", 1), ("b", 4)]], [4])
    b = worker_named("b")
    points = {"a": "before:Forward", "b": "before:ReceiveActivation"}
    faults = [stop("a", 3), *(stop(node, 5, point) for node, point in points.items())]
    with Director(warm, job(), faults) as cluster:
        cluster.start("a", "b", "x")
        cluster.assign(before)
        cluster.wait(lambda: cluster.has_faulted("a/0"), "step 3")
        cluster.assign(after, boundary=True, leaving=["x"], late=["b"])
        cluster.let_go("a")
        for node, point in points.items():
            cluster.wait(partial(cluster.has_stopped_at, node, point), "step 5")
        cluster.push_late()
        cluster.kill("x")
        cluster.let_go("b")
        cluster.wait(lambda: bool(cluster.said(b, PhaseReached, Generation(2))), "b has come")
        cluster.let_go("a")
        cluster.wait_finished(after)
        cluster.stop()
        assert cluster.losses() == pytest.approx(undisturbed, rel=1e-12)
