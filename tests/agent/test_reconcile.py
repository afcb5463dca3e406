"""The agent's decisions, without a process or a clock: events in, actions out."""

import dataclasses

import pytest
from msgspec.structs import replace

from oobleck.agent.events import (
    Action,
    Assigned,
    ChannelClosed,
    CodeFetched,
    End,
    ForkRequested,
    ForkWorker,
    KillWarm,
    KillWorker,
    Leave,
    RecordsStored,
    Send,
    SessionBegan,
    SessionOver,
    ShutDown,
    StartWarm,
    WarmExited,
    WarmReady,
    WorkerExited,
    WorkerForked,
    WorkerMessage,
)
from oobleck.agent.reconcile import (
    CLOSED_GRACE_S,
    COMPILED_TIMEOUT_S,
    FORK_TIMEOUT_S,
    READY_TIMEOUT_S,
    STOP_GRACE_S,
    WARM_TIMEOUT_S,
    decide,
)
from oobleck.agent.worker import KEPT_EVALUATIONS
from oobleck.core.ids import Generation, JobId, NodeName, WorkerId
from oobleck.core.job.model import OwnModelSpec
from oobleck.core.messages import (
    Acknowledged,
    Assign,
    CheckpointSaved,
    Committed,
    Evaluated,
    Failed,
    FaultRule,
    Measure,
    Measured,
    PhaseReached,
    Ready,
    Save,
    SaveFailed,
    Stop,
)
from oobleck.proto.types import Assignment
from support.agent_core import A, B, Node, desired, sent
from support.jobs import evaluation, record
from support.scripted_master import plan

G1 = Generation(1)


def kinds(actions: tuple[Action, ...]) -> list[type]:
    """Return the actions' types; of a message to a worker, the message's."""
    return [type(one.message if isinstance(one, Send) else one) for one in actions]


def test_warm_process_starts_before_any_job_and_workers_wait_for_it() -> None:
    node = Node(slots=2)
    assert node.after() == (StartWarm(),)
    assert node.after(StartWarm(), Assigned(desired=desired())) == ()
    forks = node.after(WarmReady())
    assert [fork.slot for fork in forks if isinstance(fork, ForkWorker)] == [0, 1]
    assert (
        node.after(ForkRequested(slot=0, incarnation=A), ForkRequested(slot=1, incarnation=B)) == ()
    )


def test_a_plan_goes_to_exactly_the_process_that_it_counts_on() -> None:
    node = Node().with_worker()
    (send,) = node.after(Assigned(desired=desired(generation=1)))
    assert isinstance(send, Send)
    assert send.incarnation == A
    assert node.after(sent(1)) == ()
    assert node.after(Assigned(desired=desired(generation=1))) == (), "a repeat changes nothing"
    assert node.after(Assigned(desired=desired(generation=2, incarnations="bbbb"))) == ()
    assert kinds(node.after(Assigned(desired=desired(generation=2)))) == [Assign]


def test_a_plan_waits_for_the_process_that_it_counts_on_to_be_up_and_to_read_the_same() -> None:
    node = Node()
    node.after(StartWarm(), WarmReady(), Assigned(desired=desired()))
    node.after(ForkRequested(slot=0, incarnation=A), WorkerForked(incarnation=A, pid=100))
    wish = desired(generation=1)
    assert wish.assign is not None
    other = replace(wish, assign=replace(wish.assign, data="old"))
    assert node.after(Assigned(desired=other)) == ()
    up = WorkerMessage(incarnation=A, message=Ready(pid=100, card="127.0.0.1:1", data="changed"))
    assert node.after(up) == (), "it reads other data than the plan's other workers"
    same = replace(wish, assign=replace(wish.assign, data="changed"))
    assert kinds(node.after(Assigned(desired=same))) == [Assign]


def test_an_agent_that_is_told_to_end_goes_on_until_it_is_drained_or_out_of_time() -> None:
    node = Node().with_worker()
    node.after(
        Assigned(desired=desired(generation=1)),
        sent(1),
    )
    assert node.after(Leave(grace_s=60.0), at=10.0) == ()
    assert node.after(at=15.0) == ()
    # The plan without it comes to its worker too, which hands over what it alone holds.
    assign = desired(generation=2).assign
    assert assign is not None
    without = replace(assign, plan=plan(2, "n2"), leaving=(WorkerId(NodeName("n1"), 0),))
    wish = replace(desired(), assign=without)
    assert kinds(node.after(Assigned(desired=wish), at=20.0)) == [Assign]
    node.after(sent(2, boundary=True))
    assert node.after(at=69.0) == ()
    assert kinds(node.after(at=70.0)) == [End]
    assert End in kinds(node.after(Assigned(desired=Assignment(version=2, drained=True)), at=30.0))


def test_an_idle_agent_that_is_told_to_end_waits_only_for_an_answer() -> None:
    node = Node()
    node.after(StartWarm(), WarmReady(), Leave(grace_s=60.0), at=1.0)
    assert node.wake_at() == 3.0
    assert kinds(node.after(Assigned(desired=Assignment(version=2, drained=True)))) == [End]


def test_an_agent_without_a_master_ends_once_nobody_can_have_its_work_moved() -> None:
    node = Node().with_worker()
    node.after(
        Assigned(desired=desired(generation=1, others=1)),
        sent(1),
    )
    node.after(SessionOver(), at=5.0)
    assert node.after(at=9.0) == (), "nobody has told it to end"
    assert node.after(Leave(grace_s=60.0), at=10.0) == ()
    assert node.after(at=14.0) == ()
    assert End in kinds(node.after(at=15.0)), "the master has had an answer's time to come back"


def test_a_master_that_comes_back_in_time_has_the_work_moved() -> None:
    node = Node().with_worker()
    node.after(
        Assigned(desired=desired(generation=1, others=1)),
        sent(1),
    )
    node.after(SessionOver(), Leave(grace_s=60.0), at=10.0)
    node.after(SessionBegan(), at=14.0)
    assert node.after(at=60.0) == ()
    node.after(SessionOver(), at=62.0)
    assert node.after(at=66.0) == ()
    assert End in kinds(node.after(at=67.0))


def test_an_agent_that_has_nothing_to_hand_over_does_not_wait_for_a_master() -> None:
    alone = Node().with_worker()
    alone.after(
        Assigned(desired=desired(generation=1)),
        sent(1),
        SessionOver(),
    )
    assert End in kinds(alone.after(Leave(grace_s=60.0), at=10.0)), "no other node trains"
    unplanned = Node().with_worker()
    unplanned.after(Assigned(desired=desired()), SessionOver())
    assert End in kinds(unplanned.after(Leave(grace_s=60.0), at=10.0)), "no worker trains"


def measuring(attempt: int) -> Assignment:
    return replace(desired(), measure=Measure(attempt=attempt))


def test_a_wish_for_a_checkpoint_goes_once_to_a_worker_that_has_a_plan() -> None:
    node = Node()
    wish = replace(desired(), save=1)
    node.after(StartWarm(), WarmReady(), Assigned(desired=wish))
    node.after(ForkRequested(slot=0, incarnation=A), WorkerForked(incarnation=A, pid=100))
    ready = WorkerMessage(incarnation=A, message=Ready(pid=100, card="127.0.0.1:1"))
    assert node.after(ready) == (), "it does not train"
    both = replace(desired(generation=1), save=1)
    assert kinds(node.after(Assigned(desired=both))) == [Assign]
    after = node.after(sent(1))
    assert after == (Send(incarnation=A, message=Save(number=1)),)
    assert node.after(Send(incarnation=A, message=Save(number=1)), Assigned(desired=both)) == ()
    newer = replace(both, save=2)
    assert node.after(Assigned(desired=newer)) == (Send(incarnation=A, message=Save(number=2)),)


def test_the_last_words_on_checkpoints_are_kept() -> None:
    node = Node()
    node.after(StartWarm(), WarmReady(), Assigned(desired=desired(generation=1)))
    node.after(ForkRequested(slot=0, incarnation=A), WorkerForked(incarnation=A, pid=100))
    failed = SaveFailed(what="checkpoint", step=10, reason="no space")
    saved = [CheckpointSaved(step=s, path=f"/c/{s}", bytes=1, seconds=0.1) for s in (10, 20)]
    for message in (saved[0], failed, saved[1]):
        node.after(WorkerMessage(incarnation=A, message=message))
    assert node.state.workers[A].checkpoints == (failed, saved[1])


def test_the_last_evaluations_are_kept_for_sessions_to_come() -> None:
    node = Node().with_worker()
    steps = range(1, KEPT_EVALUATIONS + 3)
    told = [Evaluated(record=evaluation(step)) for step in steps]
    for message in told:
        assert node.after(WorkerMessage(incarnation=A, message=message)) == ()
    assert list(node.state.workers[A].evaluated) == told[2:]


def test_each_attempt_at_measuring_goes_to_a_ready_worker_once() -> None:
    node = Node()
    node.after(StartWarm(), WarmReady(), Assigned(desired=measuring(1)))
    node.after(ForkRequested(slot=0, incarnation=A))
    assert node.after(WorkerForked(incarnation=A, pid=100)) == (), "it is not ready"
    ready = WorkerMessage(incarnation=A, message=Ready(pid=100, card="127.0.0.1:1"))
    assert node.after(ready) == (Send(incarnation=A, message=Measure(attempt=1)),)
    assert node.after(Send(incarnation=A, message=Measure(attempt=1))) == ()
    answer = Measured(attempt=1, measurement=None, problem="none")
    assert node.after(WorkerMessage(incarnation=A, message=answer)) == ()
    assert node.state.workers[A].measured == (answer,)
    assert kinds(node.after(Assigned(desired=measuring(2)))) == [Measure]
    assert (
        node.after(Send(incarnation=A, message=Measure(attempt=2)), Assigned(desired=desired()))
        == ()
    )
    assert node.state.workers[A].measured == (), "of an older attempt"


def test_a_worker_that_stands_by_measures_now_and_then() -> None:
    node = Node().with_worker()
    node.after(Assigned(desired=desired(generation=1)), sent(1))
    alone = replace(desired(), measure=Measure(attempt=1, alone=True))
    first = Send(incarnation=A, message=Measure(attempt=1, alone=True))
    second = Send(incarnation=A, message=Measure(attempt=2, alone=True))
    assert node.after(Assigned(desired=alone), at=100.0) == (), "it was measured until now"
    assert first not in node.after(at=159.9)
    assert first in node.after(at=160.0)
    node.after(first, at=160.0)
    assert second not in node.after(at=225.0), "it is still at it"
    answer = Measured(attempt=1, measurement=None, alone_s=(0.1, 0.2, 0.1))
    node.after(WorkerMessage(incarnation=A, message=answer), at=225.0)
    # A new session is told of the last one, whatever the master says meanwhile.
    node.after(Assigned(desired=alone), at=226.0)
    assert node.state.workers[A].measured == (answer,)
    assert second in node.after(at=226.0)
    node.after(second, WorkerMessage(incarnation=A, message=answer), at=227.0)
    assert Measure not in kinds(node.after(at=286.9))
    assert Measure in kinds(node.after(at=287.0))
    node.after(Assigned(desired=desired(generation=2)), at=287.0)
    assert kinds(node.after(at=300.0)) == [Assign], "it is taken back"


def test_a_worker_with_a_plan_measures_nothing_and_its_answers_are_forgotten() -> None:
    node = Node().with_worker()
    node.after(Assigned(desired=measuring(1)))
    answer = Measured(attempt=1, measurement=None)
    node.after(
        Send(incarnation=A, message=Measure(attempt=1)),
        WorkerMessage(incarnation=A, message=answer),
    )
    node.after(Assigned(desired=desired(generation=1)))
    node.after(sent(1))
    assert node.state.workers[A].measured == ()
    assert node.after(Assigned(desired=measuring(2))) == ()


def test_a_worker_is_told_which_records_the_master_has() -> None:
    def stored(step: int, job: str = "demo-1") -> RecordsStored:
        told = Acknowledged(step=step, evaluation=step - 1)
        return RecordsStored(job_id=JobId(job), acknowledged=told)

    def telling(step: int) -> Send:
        return Send(incarnation=A, message=stored(step).acknowledged)

    node = Node().with_worker()
    node.after(Assigned(desired=desired(generation=1)))
    assert node.after(sent(1), stored(9, "other-1")) == ()
    assert node.after(stored(7)) == (telling(7),)
    assert node.after(telling(7)) == ()
    assert node.after(stored(8), stored(9)) == (telling(9),), "the newest word alone"
    node.after(Assigned(desired=replace(desired(), job_id=JobId("other-2"))))
    assert node.state.acknowledged is None


def test_a_plan_is_not_sent_before_the_worker_is_ready() -> None:
    node = Node()
    node.after(StartWarm(), WarmReady(), Assigned(desired=desired(generation=1)))
    node.after(ForkRequested(slot=0, incarnation=A))
    assert node.after(WorkerForked(incarnation=A, pid=100)) == ()
    ready = WorkerMessage(incarnation=A, message=Ready(pid=100, card="127.0.0.1:1"))
    assert kinds(node.after(ready)) == [Assign]


def test_a_dead_worker_is_replaced_at_once() -> None:
    node = Node().with_worker()
    assert kinds(node.after(WorkerExited(incarnation=A))) == [ForkWorker]


def test_the_fourth_start_of_a_worker_that_keeps_ending_waits_and_the_wait_doubles() -> None:
    node = Node().with_worker()
    waits: list[float] = []
    for _ in range(9):
        node.after(WorkerExited(incarnation=A))
        at = node.wake_at()
        waits.append(0.0 if at is None else at - node.now)
        node.now = at if at is not None else node.now
        assert kinds(node.after()) == [ForkWorker]
        node.after(ForkRequested(slot=0, incarnation=A), WorkerForked(incarnation=A, pid=100))
    assert waits == [0, 0, 1, 2, 4, 8, 16, 30, 30]
    assert kinds(node.after(WorkerExited(incarnation=A), at=node.now + 11)) == [ForkWorker], (
        "one that lived for long is replaced at once again"
    )


def test_a_worker_that_says_it_failed_is_not_replaced_until_the_job_changes() -> None:
    node = Node().with_worker()
    failed = WorkerMessage(incarnation=A, message=Failed(kind="user", message="no data"))
    assert node.after(failed, WorkerExited(incarnation=A)) == ()
    assert node.after(Assigned(desired=desired(generation=2))) == ()
    assert kinds(node.after(Assigned(desired=desired("demo-2")))) == [ForkWorker]


def test_a_worker_that_met_a_fault_of_ours_is_replaced() -> None:
    node = Node().with_worker()
    failed = WorkerMessage(incarnation=A, message=Failed(kind="internal", message="an invariant"))
    assert kinds(node.after(failed, WorkerExited(incarnation=A))) == [ForkWorker]


def test_another_job_stops_the_worker_first_and_forks_when_it_is_gone() -> None:
    node = Node().with_worker()
    (stop,) = node.after(Assigned(desired=desired("demo-2")))
    assert stop == Send(incarnation=A, message=Stop(reason="another job begins"))
    assert node.after(Send(incarnation=A, message=Stop(reason=""))) == ()
    assert node.state.serving() == []
    assert kinds(node.after(WorkerExited(incarnation=A))) == [ForkWorker]


def test_stop_is_followed_by_kill_after_its_grace() -> None:
    node = Node().with_worker()
    assert kinds(node.after(Assigned(desired=Assignment(version=2)), at=5.0)) == [Stop]
    assert node.after(Send(incarnation=A, message=Stop(reason=""))) == ()
    assert node.wake_at() == 5.0 + STOP_GRACE_S
    assert kinds(node.after(at=5.0 + STOP_GRACE_S)) == [KillWorker]
    assert node.after(KillWorker(incarnation=A, reason="")) == ()
    assert node.after(WorkerExited(incarnation=A)) == ()


def test_a_worker_that_closes_its_channel_but_lives_is_killed() -> None:
    node = Node().with_worker()
    assert node.after(ChannelClosed(incarnation=A)) == ()
    assert kinds(node.after(at=CLOSED_GRACE_S)) == [KillWorker]


def test_a_worker_that_is_never_ready_is_killed() -> None:
    node = Node()
    node.after(StartWarm(), WarmReady(), Assigned(desired=desired()))
    node.after(ForkRequested(slot=0, incarnation=A), WorkerForked(incarnation=A, pid=100))
    assert node.after(at=READY_TIMEOUT_S - 1) == ()
    assert kinds(node.after(at=READY_TIMEOUT_S)) == [KillWorker]


def test_a_worker_has_as_long_however_slowly_the_jobs_code_comes() -> None:
    node = Node()
    node.after(StartWarm(), WarmReady(), Assigned(desired=desired()))
    node.after(
        ForkRequested(slot=0, incarnation=A, fetches=True), WorkerForked(incarnation=A, pid=100)
    )
    assert node.after(at=10 * READY_TIMEOUT_S) == ()
    assert node.after(CodeFetched(incarnation=A), at=2000.0) == ()
    assert node.wake_at() == 2000.0 + READY_TIMEOUT_S
    assert kinds(node.after(at=2000.0 + READY_TIMEOUT_S)) == [KillWorker]


@pytest.mark.parametrize(
    ("compiles", "most_s"), [(False, READY_TIMEOUT_S), (True, COMPILED_TIMEOUT_S)]
)
def test_a_worker_is_told_by_when_it_is_to_be_ready(compiles: bool, most_s: float) -> None:
    """So that it says before what its user's code is at, however long the fork has taken."""
    node = Node()
    node.after(StartWarm(), WarmReady())
    wish = desired()
    assert wish.job is not None
    training = dataclasses.replace(wish.job.training, compile=compiles)
    model = OwnModelSpec(python="mine:model", sequence_length=8)
    job = dataclasses.replace(wish.job, training=training, model=model)
    (fork,) = node.after(Assigned(desired=replace(wish, job=job)), at=50.0)
    assert isinstance(fork, ForkWorker)
    assert fork.ready_by == 50.0 + most_s
    node.after(ForkRequested(slot=0, incarnation=A), at=50.0)
    node.after(WorkerForked(incarnation=A, pid=100), at=100.0)
    assert node.after(at=fork.ready_by - 1) == ()
    assert kinds(node.after(at=fork.ready_by)) == [KillWorker]


def test_a_warm_process_that_hangs_is_killed_once_and_started_again() -> None:
    node = Node()
    node.after(StartWarm())
    assert kinds(node.after(at=WARM_TIMEOUT_S)) == [KillWarm]
    assert node.after(KillWarm(reason="")) == ()
    assert node.after(WarmExited()) == (StartWarm(),)


def test_a_fork_without_an_answer_means_a_hanging_warm_process() -> None:
    node = Node()
    node.after(StartWarm(), WarmReady(), Assigned(desired=desired()))
    node.after(ForkRequested(slot=0, incarnation=A))
    assert kinds(node.after(at=FORK_TIMEOUT_S)) == [KillWarm]


def test_shutdown_ends_workers_then_the_warm_process_then_the_agent() -> None:
    node = Node().with_worker()
    assert kinds(node.after(ShutDown())) == [Stop]
    node.after(Send(incarnation=A, message=Stop(reason="")))
    assert kinds(node.after(WorkerExited(incarnation=A))) == [KillWarm]
    node.after(KillWarm(reason=""))
    assert not decide(node.state, 0.0).done
    assert node.after(WarmExited()) == ()
    assert decide(node.state, 0.0).done


def test_code_that_a_slot_was_ready_for_is_not_tried_again_in_the_same_job() -> None:
    def passed(node: Node) -> list[bool]:
        return [fork.passed for fork in node.decide() if isinstance(fork, ForkWorker)]

    node = Node()
    node.after(StartWarm(), WarmReady(), Assigned(desired=desired()))
    assert passed(node) == [False]
    node.after(ForkRequested(slot=0, incarnation=A), WorkerExited(incarnation=A))
    assert passed(node) == [False], "it was never ready"
    node.with_worker()
    node.after(WorkerExited(incarnation=A))
    assert passed(node) == [True]
    node.after(Assigned(desired=desired("demo-2")))
    assert passed(node) == [False]


def test_a_process_is_told_that_one_of_its_slot_was_replaced_in_this_job() -> None:
    node = Node().with_worker()
    said = Failed(kind="internal", message="the worker's process is replaced")
    node.after(WorkerMessage(incarnation=A, message=said), WorkerExited(incarnation=A))
    (fork,) = (each for each in node.decide() if isinstance(each, ForkWorker))
    assert (fork.replaced, fork.slot) == (True, 0)
    node.after(Assigned(desired=desired("demo-2")))
    assert [each.replaced for each in node.decide() if isinstance(each, ForkWorker)] == [False]


def test_a_replacement_does_not_get_the_fault_that_ended_its_predecessor() -> None:
    mine = WorkerId(NodeName("n1"), 0)
    other = WorkerId(NodeName("n2"), 0)
    rule = FaultRule(worker=mine, point="before:Vote", step=4)
    node = Node(faults=(rule, FaultRule(worker=other, point="before:Vote")))
    assert node.state.faults_for(0) == (rule,)
    node.with_worker()
    joined = PhaseReached(generation=Generation(1), phase="joined", committed_step=3)
    node.after(WorkerMessage(incarnation=A, message=joined), WorkerExited(incarnation=A))
    assert node.state.faults_for(0) == ()


def test_a_worker_is_told_to_hold_all_plans_that_it_entered_since_its_last_step() -> None:
    node = Node()
    node.with_worker()

    def say(message: PhaseReached | Committed) -> tuple[Generation, ...]:
        node.state.apply(WorkerMessage(incarnation=A, message=message), node.now)
        return node.state.workers[A].also_entered

    def enter(generation: int) -> tuple[Generation, ...]:
        return say(PhaseReached(generation=Generation(generation), phase="transferred"))

    assert [enter(1), enter(2), enter(2), enter(3)] == [(), (1,), (1,), (1, 2)]
    assert say(Committed(record=record(5, generation=2))) == (2,)
    assert say(Committed(record=record(6, generation=3))) == ()
