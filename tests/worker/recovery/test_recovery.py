"""Losses, joins and replacements on real worker processes: the training stays the same.

Each case trains the same job as an undisturbed single worker does and compares every loss in
float64, where anything but the order of sums would show.
"""

import functools
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.support.preloaded import Preloaded
from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.spec import CheckpointSpec, DataSpec, JobSpec, TrainingSpec
from oobleck.core.messages import FaultRule, Finished, PeerLost, PhaseReached
from oobleck.core.plan import Plan
from support.devices import Transport
from support.director import Director, WarmWorkers, make_plan, worker_named
from support.folders import TEXT

STEPS = 6


@functools.cache
def text() -> str:
    return TEXT


def job(**training: object) -> JobSpec:
    values: dict[str, object] = {
        "steps": STEPS,
        "global_batch": 8,
        "microbatch": 1,
        "precision": "fp64",
        "optimizer": OptimizerSpec(lr=1e-2),
    }
    return JobSpec(
        name="recovery",
        model=ModelSpec(layers=3, hidden=32, heads=2, sequence_length=16, dropout=0.1),
        data=DataSpec(text=(text(),)),
        training=TrainingSpec(**{**values, **training}),  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def hasty(forking: Preloaded | None) -> Iterator[WarmWorkers]:
    """Its workers give up sooner one that does not answer."""
    with WarmWorkers(preloaded=forking, answer_limit_s=10.0) as warm:
        yield warm


@pytest.fixture(scope="module")
def undisturbed(warm: WarmWorkers) -> dict[int, float | None]:
    with Director(warm, job()) as cluster:
        cluster.start("alone")
        plan = make_plan(1, [[("alone", 5)]], [8])
        cluster.assign(plan)
        cluster.wait_finished(plan)
        cluster.stop()
        return cluster.losses()


def fault(
    node: str,
    point: str,
    *,
    step: int | None = 3,
    generation: int | None = None,
    action: str = "kill_worker",
) -> FaultRule:
    return FaultRule(
        worker=WorkerId(NodeName(node), 0),
        point=point,
        generation=None if generation is None else Generation(generation),
        step=step,
        action=action,  # type: ignore[arg-type]
    )


FIVE = make_plan(1, [[("a", 2), ("b", 3)], [("c", 1), ("d", 2), ("e", 2)]], [4, 4])
#: FIVE after e is gone: the second pipeline on two nodes, cut differently.
WITHOUT_E = make_plan(2, [[("a", 2), ("b", 3)], [("c", 3), ("d", 2)]], [5, 3])
#: FIVE after b is gone as well as e, and after d is.
A_C_D = make_plan(3, [[("a", 1), ("c", 2), ("d", 2)]], [8])
A_B_C = make_plan(3, [[("a", 1), ("b", 3), ("c", 1)]], [8])


def is_gone(cluster: Director, node: str) -> bool:
    return cluster.workers[WorkerId(NodeName(node), 0)].gone


def survivors_interrupted(cluster: Director, plan: Plan, lost: Sequence[str]) -> bool:
    return all(
        cluster.said(worker, PeerLost, plan.generation)
        for worker in plan.workers
        if worker.node not in lost
    )


def check(cluster: Director, undisturbed: dict[int, float | None]) -> None:
    losses = cluster.losses()
    assert list(losses) == list(range(1, STEPS + 1))
    assert list(losses.values()) == pytest.approx(list(undisturbed.values()), rel=1e-12)


POINTS = (
    "before:LoadTokens",
    "after:Forward",
    "before:Backward",
    "before:SyncGradient",
    "after:SyncGradient",
    "reduced",
)


@pytest.mark.parametrize(
    ("victim", "point", "transport"),
    [
        *(("e", point, "links") for point in POINTS),
        *(pytest.param("c", point, "links", marks=pytest.mark.soak) for point in POINTS),
        *(("c", point, "nccl") for point in ("after:Forward", "before:SyncGradient", "reduced")),
    ],
)
def test_killed_within_a_step_rolls_back_and_redoes_it(
    warm: WarmWorkers,
    undisturbed: dict[int, float | None],
    victim: str,
    point: str,
    transport: Transport,
) -> None:
    after = (
        WITHOUT_E
        if victim == "e"
        else make_plan(2, [[("a", 2), ("b", 3)], [("d", 3), ("e", 2)]], [5, 3])
    )
    with Director(warm, job(), [fault(victim, point)], transport=transport) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        before = {worker: live.pid for worker, live in cluster.workers.items()}
        cluster.assign(FIVE)
        cluster.wait(lambda: is_gone(cluster, victim), "the scripted kill")
        cluster.assign(after)
        cluster.wait_finished(after)
        joined = [
            message
            for worker in after.workers
            for message in cluster.said(worker, PhaseReached, after.generation)
            if isinstance(message, PhaseReached) and message.phase == "joined"
        ]
        assert {message.committed_step for message in joined} == {2}
        # Where the victim was ahead, the others still were in the vote before.
        assert any(message.redo or message.rolled_forward for message in joined)
        assert all(cluster.workers[w].pid == before[w] for w in after.workers)
        cluster.stop()
        check(cluster, undisturbed)


@pytest.mark.parametrize(
    "point",
    [
        "before:agree",
        "after:transfer",
        pytest.param("after:Forward", marks=pytest.mark.soak),
        pytest.param("before:Backward", marks=pytest.mark.soak),
        "reduced",
    ],
)
def test_killed_before_any_step_is_committed(
    warm: WarmWorkers, undisturbed: dict[int, float | None], point: str
) -> None:
    with Director(warm, job(), [fault("e", point, step=None)]) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(FIVE)
        cluster.wait(lambda: is_gone(cluster, "e"), "the scripted kill")
        cluster.assign(WITHOUT_E)
        cluster.wait_finished(WITHOUT_E)
        cluster.stop()
        assert {r.generation for records in cluster.records.values() for r in records} == {2}
        check(cluster, undisturbed)


@pytest.mark.parametrize("step", [1, 3])
def test_survivor_without_the_vote_rolls_forward(
    warm: WarmWorkers, undisturbed: dict[int, float | None], step: int
) -> None:
    # a has put its share into the vote but never reads the result; the others commit the step with
    # it, and e dies after that. a holds the step's reduced gradients and must apply them.
    with Director(warm, job(), [fault("a", "voting", step=step, action="hold")]) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(FIVE)
        cluster.wait(lambda: len(cluster.records.get(step, ())) == 4, "the step of all but a")
        cluster.kill("e")
        cluster.assign(WITHOUT_E)
        cluster.wait_finished(WITHOUT_E)
        joined = {
            str(worker): message
            for worker in WITHOUT_E.workers
            for message in cluster.said(worker, PhaseReached, WITHOUT_E.generation)
            if isinstance(message, PhaseReached) and message.phase == "joined"
        }
        assert {message.committed_step for message in joined.values()} == {step}
        assert {name for name, m in joined.items() if m.rolled_forward} == {"a/0"}
        cluster.stop()
        check(cluster, undisturbed)


def test_two_losses_one_after_the_other(
    warm: WarmWorkers, undisturbed: dict[int, float | None]
) -> None:
    faults = [fault("e", "after:Forward", step=2), fault("b", "before:Backward", step=4)]
    with Director(warm, job(), faults) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(FIVE)
        cluster.wait(lambda: is_gone(cluster, "e"), "the first kill")
        cluster.assign(WITHOUT_E)
        cluster.wait(lambda: is_gone(cluster, "b"), "the second kill")
        cluster.assign(A_C_D)
        cluster.wait_finished(A_C_D)
        cluster.stop()
        check(cluster, undisturbed)


#: By the phase of a recovery the point in it.
PHASES = {
    "on its way to the meeting": "before:rendezvous",
    "building of groups": "before:connect",
    "agree": "before:agree",
    "before the copy of state": "before:transfer",
    "as the source, in mid-copy": "sending",
    "after the copy of state": "after:transfer",
    "first step": "before:Backward",
    "first vote, not given": "reduced",
    "first vote, given": "voting",
}


@pytest.mark.parametrize(
    ("phase", "transport"),
    [
        *((phase, "links") for phase in PHASES),
        ("building of groups", "nccl"),
        ("as the source, in mid-copy", "nccl"),
        ("first vote, given", "nccl"),
    ],
)
def test_loss_during_the_recovery_from_another(
    warm: WarmWorkers, undisturbed: dict[int, float | None], phase: str, transport: Transport
) -> None:
    second = fault("d", PHASES[phase], step=None, generation=2)
    faults = [fault("e", "after:Forward"), second]
    with Director(warm, job(), faults, transport=transport) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(FIVE)
        cluster.wait(lambda: is_gone(cluster, "e"), "the first kill")
        cluster.assign(WITHOUT_E)
        cluster.wait(lambda: is_gone(cluster, "d"), "the second kill")
        cluster.assign(A_B_C)
        cluster.wait_finished(A_B_C)
        cluster.stop()
        check(cluster, undisturbed)


@pytest.mark.parametrize("moment", ["before the push", "after the push"])
def test_second_loss_while_the_first_one_is_left(
    warm: WarmWorkers, undisturbed: dict[int, float | None], moment: str
) -> None:
    with Director(warm, job(), [fault("e", "after:Forward")]) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(FIVE)
        cluster.wait(lambda: is_gone(cluster, "e"), "the first kill")
        if moment == "after the push":
            cluster.assign(WITHOUT_E)
        cluster.kill("d")
        if moment == "before the push":
            cluster.assign(WITHOUT_E)
        cluster.wait(lambda: is_gone(cluster, "d"), "the second kill")
        cluster.assign(A_B_C)
        cluster.wait_finished(A_B_C)
        cluster.stop()
        check(cluster, undisturbed)


def test_three_losses_each_in_the_recovery_from_the_one_before(
    warm: WarmWorkers, undisturbed: dict[int, float | None]
) -> None:
    faults = [
        fault("e", "after:Forward"),
        fault("d", "sending", step=None, generation=2),
        fault("c", "before:connect", step=None, generation=3),
    ]
    plans = [FIVE, WITHOUT_E, A_B_C, make_plan(4, [[("a", 2), ("b", 3)]], [8])]
    with Director(warm, job(), faults) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        for plan, victim in zip(plans, ("e", "d", "c"), strict=False):
            cluster.assign(plan)
            cluster.wait(lambda victim=victim: is_gone(cluster, victim), f"{victim} is killed")  # type: ignore[misc]
        cluster.assign(plans[-1])
        cluster.wait_finished(plans[-1])
        cluster.stop()
        check(cluster, undisturbed)


def test_two_losses_at_once(warm: WarmWorkers, undisturbed: dict[int, float | None]) -> None:
    held = {"d": "before:ReceiveActivation", "e": "before:LoadTokens"}
    faults = [fault(node, point, action="hold") for node, point in held.items()]
    with Director(warm, job(), faults) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(FIVE)
        for node in ("d", "e"):
            cluster.wait(lambda node=node: cluster.has_faulted(f"{node}/0"), f"{node} waits")  # type: ignore[misc]
        for node in ("d", "e"):
            cluster.kill(node)
        only = make_plan(2, [[("a", 1), ("b", 3), ("c", 1)]], [8])
        cluster.assign(only)
        cluster.wait_finished(only)
        cluster.stop()
        check(cluster, undisturbed)


@pytest.mark.parametrize("phase", ["agree", "before the copy of state", "first step"])
def test_join_during_the_recovery_from_a_loss(
    warm: WarmWorkers, undisturbed: dict[int, float | None], phase: str
) -> None:
    # d waits at that point of the recovery until a plan comes in which f has taken e's place.
    held = fault("d", PHASES[phase], step=None, generation=2, action="hold")
    with_f = make_plan(3, [[("a", 2), ("b", 3)], [("c", 1), ("d", 2), ("f", 2)]], [4, 4])
    with Director(warm, job(), [fault("e", "after:Forward"), held]) as cluster:
        cluster.start("a", "b", "c", "d", "e", "f")
        cluster.assign(FIVE)
        cluster.wait(lambda: is_gone(cluster, "e"), "the loss")
        cluster.assign(WITHOUT_E)
        cluster.wait(lambda: cluster.has_faulted("d/0"), "the recovery came to the point")
        cluster.assign(with_f)
        cluster.wait_finished(with_f)
        cluster.stop()
        check(cluster, undisturbed)


def test_frozen_peer_is_left_by_the_push_of_a_generation(
    warm: WarmWorkers, undisturbed: dict[int, float | None]
) -> None:
    # Nothing tells the others that e hangs: only the new generation releases them.
    with Director(warm, job(), [fault("e", "after:Forward", action="stop")]) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(FIVE)
        cluster.wait(lambda: 2 in cluster.records, "two steps")
        cluster.assign(WITHOUT_E)
        cluster.wait_finished(WITHOUT_E)
        cluster.kill("e", signal.SIGKILL)
        cluster.stop()
        check(cluster, undisturbed)


@pytest.mark.parametrize(
    ("frozen", "pushed"),
    [
        ("before it comes", "at once"),
        ("before it comes", "once the others know"),
        # That others do not come tells nobody anything.
        ("while all wait for e", "at once"),
    ],
)
def test_frozen_host_of_the_meeting_holds_up_no_other(
    hasty: WarmWorkers, undisturbed: dict[int, float | None], frozen: str, pushed: str
) -> None:
    # a hosts the meeting. Until e comes, nobody goes on; and the kernel goes on taking connections
    # for a stopped process, so that nothing but time tells the others.
    held = ["e"] if frozen == "while all wait for e" else ["a", "e"]
    faults = [fault(node, "before:rendezvous", step=None, action="stop") for node in held]
    without = make_plan(2, [[("b", 2), ("c", 2), ("d", 1)]], [8])
    with Director(hasty, job(), faults) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(FIVE)
        cluster.wait(
            lambda: all(cluster.said(worker, PhaseReached) for worker in FIVE.workers),
            "all on their way to the meeting",
        )
        time.sleep(0.3)  # for most of them to be there; where each is caught is all the same
        cluster.kill("a", signal.SIGSTOP)
        time.sleep(0.1)
        if pushed == "once the others know":
            cluster.wait(
                lambda: all(cluster.said(worker, PeerLost) for worker in without.workers),
                "the host is given up",
            )
        cluster.assign(without)
        cluster.wait_finished(without)
        for node in ("a", "e"):
            cluster.kill(node)
        cluster.stop()
        check(cluster, undisturbed)


def test_replaced_worker_fetches_its_layers_with_moments(
    warm: WarmWorkers, undisturbed: dict[int, float | None]
) -> None:
    again = make_plan(2, [[("a", 2), ("b", 3)], [("c", 1), ("d", 2), ("e", 2)]], [4, 4])
    with Director(warm, job(), [fault("d", "after:Backward")]) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(FIVE)
        cluster.wait(lambda: is_gone(cluster, "d"), "the scripted kill")
        cluster.faults = ()
        cluster.start("d")
        cluster.assign(again)
        cluster.wait_finished(again)
        cluster.stop()
        check(cluster, undisturbed)


def test_a_step_that_fails_for_want_of_memory_is_tried_once_more(
    warm: WarmWorkers, undisturbed: dict[int, float | None]
) -> None:
    faults = [
        fault("c", "after:Backward", action="no_memory"),
        fault("e", "before:connect", step=None, generation=2, action="no_memory"),
        fault("d", "before:SyncGradient", step=4, action="no_memory"),
        # What it has committed cannot be done again.
        fault("d", "after:OptimizerStep", step=5, action="no_memory"),
    ]
    second, third, fourth = (replace(FIVE, generation=Generation(number)) for number in (2, 3, 4))
    with Director(warm, job(), faults, transport="nccl") as cluster:
        cluster.start("a", "b", "c", "d", "e")
        for plan in (FIVE, second, third):
            cluster.assign(plan)
            cluster.wait(lambda plan=plan: survivors_interrupted(cluster, plan, []), "all left it")  # type: ignore[misc]
        left = cluster.said(worker_named("c"), PeerLost)[0]
        assert isinstance(left, PeerLost)
        assert left.left
        assert "c/0 was out of memory (scripted: out of memory); the step is" in left.detail
        # Of the first time that each has joined after that: others of the second generation may be
        # in it before they hear of e.
        joined: dict[str, bool] = {}
        for worker in FIVE.workers:
            for message in cluster.said(worker, PhaseReached):
                assert isinstance(message, PhaseReached)
                if message.generation > 1 and message.phase == "joined":
                    joined.setdefault(str(worker), message.redo)
        # A layer of c's may have a part of a micro-batch's gradient; what d and e have counts.
        assert [joined[name] for name in ("c/0", "d/0", "e/0")] == [False, True, True]
        cluster.assign(fourth)
        with pytest.raises(AssertionError, match=r"d/0 failed: d/0: out of memory .* lower train"):
            cluster.wait(lambda: False, "the job's failure")
        losses = list(cluster.losses().values())[:4]
        assert losses == pytest.approx(list(undisturbed.values())[:4], rel=1e-12)


@pytest.mark.parametrize("loss", ["seen", "only by the master", "none"])
def test_a_device_that_fails_at_the_loss_of_a_neighbour_is_not_its_nodes_fault(
    warm: WarmWorkers, loss: str
) -> None:
    before = make_plan(1, [[("a", 2), ("a", 3)], [("b", 5)]], [4, 4])
    without = make_plan(2, [[("a", 5)], [("b", 5)]], [4, 4])
    point, generation = ("before:Backward", 1) if loss == "none" else ("before:rendezvous", 2)
    faults = [fault("a", point, step=None, generation=generation, action="device_fails")]
    told = (
        "the GPU has failed: " if loss == "none" else "the GPU has failed at the loss of a worker"
    )
    with Director(warm, job(steps=100_000), faults) as cluster:
        cluster.start("a", "a/1", "b")
        cluster.assign(before)
        if loss != "none":
            cluster.wait(lambda: 2 in cluster.records, "two steps")
            if loss == "seen":
                cluster.kill("a/1")
                cluster.wait(lambda: cluster.workers[worker_named("a/1")].gone, "the loss")
            cluster.assign(without)
        with pytest.raises(AssertionError, match=rf"a/0 failed: a/0: {told}"):
            cluster.wait(lambda: False, "the device's failure")


def test_layers_that_nobody_has_any_more_are_told_of_and_come_back_with_who_has_them(
    warm: WarmWorkers, undisturbed: dict[int, float | None], tmp_path: Path
) -> None:
    """A plan may be made before its maker knows that a step was committed; so it may where the job
    takes checkpoints, and has taken none yet."""
    saved = CheckpointSpec(path=str(tmp_path), at_end=False)
    alone = make_plan(1, [[("a", 2), ("b", 3)]], [8])
    without = make_plan(2, [[("a", 2), ("d", 3)]], [8])
    again = make_plan(3, [[("a", 2), ("b", 3)]], [8])
    held = fault("b", "before:Forward", generation=1, action="hold")
    with Director(warm, replace(job(), checkpoint=saved, fault_tolerance=0), [held]) as cluster:
        cluster.start("a", "b", "d")
        cluster.assign(alone)
        cluster.wait(lambda: len(cluster.records.get(2, ())) == 2, "step 2 of both")
        cluster.assign(without)
        cluster.wait(
            lambda: survivors_interrupted(cluster, without, lost=[]), "both to say what is missing"
        )
        told = [message for worker in without.workers for message in cluster.workers[worker].said]
        missing = "at step 2 no live worker holds the state of layer 2-4"
        assert any(isinstance(m, PeerLost) and missing in m.detail for m in told)
        cluster.assign(again)
        cluster.wait_finished(again)
        cluster.stop()
    check(cluster, undisturbed)


def test_join_at_a_step_boundary_redoes_nothing(
    warm: WarmWorkers, undisturbed: dict[int, float | None]
) -> None:
    four = make_plan(1, [[("a", 2), ("b", 3)], [("c", 3), ("d", 2)]], [4, 4])
    five = make_plan(2, [[("a", 2), ("b", 3)], [("c", 1), ("d", 2), ("e", 2)]], [4, 4])
    with Director(warm, job(steps=100_000)) as cluster:
        cluster.start("a", "b", "c", "d")
        cluster.assign(four)
        cluster.wait(lambda: 2 in cluster.records, "two steps")
        cluster.start("e")
        cluster.assign(five, boundary=True)
        cluster.wait(
            lambda: any(r[0].generation == 2 for r in cluster.records.values()), "the new plan"
        )
        joined = [
            message
            for worker in five.workers
            for message in cluster.said(worker, PhaseReached, five.generation)
            if isinstance(message, PhaseReached) and message.phase == "joined"
        ]
        assert len({message.committed_step for message in joined}) == 1
        assert not any(message.redo or message.rolled_forward for message in joined)
        assert not any(cluster.said(worker, PeerLost) for worker in four.workers)
        cluster.stop()
        steps = list(cluster.losses())
        assert steps == list(range(1, steps[-1] + 1))


def test_loss_after_the_last_step_still_finishes(
    warm: WarmWorkers, undisturbed: dict[int, float | None]
) -> None:
    with Director(warm, job(), [fault("e", "after:OptimizerStep", step=STEPS)]) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(FIVE)
        cluster.wait(lambda: is_gone(cluster, "e"), "the scripted kill")
        cluster.wait(
            lambda: all(
                cluster.said(worker, Finished) or cluster.said(worker, PeerLost)
                for worker in FIVE.workers
                if worker.node != "e"
            ),
            "the others through",
        )
        cluster.assign(WITHOUT_E)
        cluster.wait_finished(WITHOUT_E)
        cluster.stop()
        check(cluster, undisturbed)


def test_node_that_joins_after_the_last_step_keeps_nobody_from_finishing(
    warm: WarmWorkers, undisturbed: dict[int, float | None]
) -> None:
    # The plan comes to one worker before the last vote could tell of it, or to all after it.
    four = make_plan(1, [[("a", 2), ("b", 3)], [("c", 3), ("d", 2)]], [4, 4])
    five = make_plan(2, [[("a", 2), ("b", 3)], [("c", 1), ("d", 2), ("e", 2)]], [4, 4])
    with Director(warm, job()) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(four)
        cluster.wait_finished(four)
        cluster.assign(five, boundary=True)
        cluster.wait_finished(five)
        assert not any(cluster.said(worker, PeerLost) for worker in five.workers)
        cluster.stop()
        check(cluster, undisturbed)


def test_newcomer_whose_first_generation_never_met_comes_to_the_next_boundary(
    warm: WarmWorkers,
) -> None:
    # e waits for the others of generation 2, which a loss has overtaken, in a plan without it.
    four = make_plan(1, [[("a", 2), ("b", 3)], [("c", 3), ("d", 2)]], [4, 4])
    lost_d = make_plan(3, [[("a", 2), ("b", 3)], [("c", 5)]], [4, 4])
    cuts: list[list[tuple[str, int]]] = [[("a", 2), ("b", 3)], [("c", 3), ("e", 2)]]
    with Director(warm, job(steps=100_000)) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(four)
        cluster.wait(lambda: 2 in cluster.records, "two steps")
        cluster.kill("d")
        cluster.assign(make_plan(2, cuts, [4, 4]), boundary=True)
        cluster.wait(
            lambda: bool(cluster.said(WorkerId(NodeName("e"), 0), PhaseReached, Generation(2))),
            "the newcomer at the meeting",
        )
        for plan, boundary in ((lost_d, False), (make_plan(4, cuts, [4, 4]), True)):
            cluster.assign(plan, boundary=boundary)
            cluster.wait(
                lambda plan=plan: any(  # type: ignore[misc]
                    r[0].generation == plan.generation for r in cluster.records.values()
                ),
                f"a step of generation {plan.generation}",
            )
        cluster.stop()
        cluster.losses()
