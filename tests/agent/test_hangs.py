"""Which workers an agent takes for hung, and after how long: events in, verdicts out."""

from functools import partial

import pytest

from oobleck.agent.events import (
    Assigned,
    GiveUpWorker,
    HeartbeatRequested,
    Paused,
    RequestHeartbeat,
    WorkerMessage,
    WriteStacks,
)
from oobleck.core.ids import Generation
from oobleck.core.messages import Alive, Committed, PhaseReached
from oobleck.host.detection import Detection
from oobleck.proto.types import Hung
from support.agent_core import A, Node, desired, sent
from support.jobs import record

HANG_S, STORAGE_S = Detection().hang_s, Detection().storage_s


class Trainer(Node):
    """A node whose worker trains, and is asked for signs of life until time `until`."""

    def __init__(
        self,
        *,
        step_seconds: float = 0.1,
        stepped: bool = True,
        planned: bool = True,
        others: int = 1,
    ) -> None:
        super().__init__()
        self.with_worker()
        self.beats = 0
        if not planned:
            return
        self.plan = partial(desired, others=others)
        self.after(Assigned(desired=self.plan(generation=1)))
        self.after(sent(1))
        self.say(PhaseReached(generation=Generation(1), phase="aborted"))
        if stepped:
            self.say(PhaseReached(generation=Generation(1), phase="transferred"))
            for step in (1, 2, 3):
                self.say(Committed(record=record(step, step_seconds=step_seconds)))

    def say(self, message: object) -> None:
        self.state.apply(WorkerMessage(incarnation=A, message=message), self.now)  # type: ignore[arg-type]

    def live(
        self,
        until: float,
        *,
        doing: str = "",
        waiting: bool = False,
        files: bool = False,
        kernel: str = "",
        beat: bool = False,
    ) -> GiveUpWorker | None:
        """Answer what the agent asks with that, or nothing at all; the verdict, if one comes."""
        while True:
            actions = self.decide()
            for action in actions:
                match action:
                    case RequestHeartbeat(look=look):
                        letter = kernel if look else ""
                        self.state.apply(HeartbeatRequested(incarnation=A, kernel=letter), self.now)
                        if doing:
                            self.beats += beat
                            self.say(
                                Alive(beats=self.beats, doing=doing, waiting=waiting, files=files)
                            )
                    case WriteStacks(since=since):
                        self.asked_stacks(since)
                    case GiveUpWorker():
                        return action
                    case _:
                        raise AssertionError(action)
            if not actions:
                wake_at = self.wake_at()
                if wake_at is None or wake_at > until:
                    self.now = until
                    return None
                self.now = wake_at


def test_a_worker_that_gets_on_is_left_alone() -> None:
    node = Trainer()
    assert node.live(1000.0, doing="forward", beat=True) is None
    assert node.stacks == []


def test_a_stopped_process_is_found_out_in_time_and_by_name() -> None:
    node = Trainer()
    node.live(100.0, doing="forward", beat=True)
    verdict = node.live(200.0, kernel="T")
    assert verdict is not None
    assert node.now == pytest.approx(100.0 + HANG_S, abs=1.0)
    assert verdict.reason == "the process does not run: a signal has stopped it, for 8 s"
    assert node.stacks == [verdict.since], "what it was at is written down before"


def test_a_process_without_a_plan_is_watched_too() -> None:
    node = Trainer(planned=False)
    assert node.live(100.0, doing="wait for the plan", waiting=True) is None
    assert node.live(200.0) is not None


def test_a_thread_that_hangs_is_found_out_though_its_process_answers() -> None:
    node = Trainer()
    node.live(100.0, doing="forward", beat=True)
    verdict = node.live(200.0, doing="forward")
    assert verdict is not None
    assert node.now == pytest.approx(100.0 + HANG_S, abs=1.0)
    assert verdict.reason == "its training thread hangs (forward) for 8 s"


def test_who_waits_for_others_is_not_to_blame() -> None:
    node = Trainer()
    assert node.live(10_000.0, doing="wait for votes", waiting=True) is None


def test_who_waits_is_to_blame_once_told_to_leave() -> None:
    node = Trainer()
    node.live(100.0, doing="wait for votes", waiting=True)
    node.state.apply(Assigned(desired=node.plan(generation=2)), node.now)
    node.state.apply(sent(2), node.now)
    verdict = node.live(200.0, doing="wait for votes", waiting=True)
    assert verdict is not None
    assert node.now == pytest.approx(100.0 + HANG_S, abs=0.1)
    assert "did not leave its generation when it was told to (wait for votes)" in verdict.reason


def test_who_has_left_may_wait_for_the_others() -> None:
    node = Trainer()
    node.state.apply(Assigned(desired=node.plan(generation=2)), node.now)
    node.state.apply(sent(2), node.now)
    node.say(PhaseReached(generation=Generation(2), phase="aborted"))
    assert node.live(1000.0, doing="rendezvous", waiting=True) is None


def test_nobody_needs_to_leave_for_a_change_at_a_boundary() -> None:
    node = Trainer()
    node.state.apply(Assigned(desired=node.plan(generation=2)), node.now)
    node.state.apply(sent(2, boundary=True), node.now)
    assert node.live(1000.0, doing="wait for votes", waiting=True) is None


def test_slow_steps_have_four_times_their_longest() -> None:
    node = Trainer(step_seconds=5.0)
    assert node.live(19.0, doing="backward") is None
    assert node.live(100.0, doing="backward") is not None
    assert node.now == pytest.approx(20.0, abs=1.0)


def test_files_may_take_longer() -> None:
    node = Trainer()
    assert node.live(STORAGE_S - 1.0, doing="load", files=True) is None
    assert node.live(1000.0, doing="load", files=True) is not None
    assert node.now == pytest.approx(STORAGE_S, abs=1.0)


def test_a_process_that_the_kernel_keeps_waiting_for_a_disk_has_as_long() -> None:
    node = Trainer()
    assert node.live(STORAGE_S - 1.0, kernel="D") is None
    assert node.live(1000.0, kernel="D") is not None


def test_the_first_step_of_a_process_may_compile() -> None:
    node = Trainer(stepped=False)
    assert node.live(Detection().first_step_s - 1.0, doing="forward") is None
    assert node.live(10_000.0, doing="forward") is not None


def test_what_an_agent_did_not_hear_while_it_was_paused_counts_for_nothing() -> None:
    node = Trainer()
    node.live(100.0, doing="forward", beat=True)
    node.now = 130.0
    node.state.apply(Paused(seconds=29.0), node.now)
    assert node.live(135.0, doing="forward", beat=True) is None


def test_the_only_holder_of_a_layer_has_as_long_as_its_job() -> None:
    node = Trainer(others=0)
    assert node.live(Detection().fruitless_s - 1.0) is None
    assert node.live(10_000.0) is not None


def test_a_worker_that_has_nothing_yet_is_replaced_though_a_layer_is_to_be_with_it_alone() -> None:
    node = Trainer(others=0, stepped=False)
    verdict = node.live(Detection().fruitless_s - 1.0)
    assert verdict is not None


def test_a_verdict_is_carried_out_once() -> None:
    node = Trainer()
    verdict = node.live(100.0)
    assert verdict is not None
    node.state.apply(verdict, node.now)
    assert node.live(1000.0) is None
    assert node.state.workers[A].hung == Hung(reason=verdict.reason, seconds=HANG_S)
