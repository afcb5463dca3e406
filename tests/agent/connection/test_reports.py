"""What the master is told of a worker's word, and what is kept from it."""

import pytest

from oobleck.agent.connection.reports import standing_reports, status_of
from oobleck.agent.events import (
    Assigned,
    ForkRequested,
    StartWarm,
    WarmReady,
    WorkerForked,
    WorkerMessage,
)
from oobleck.core.ids import Generation
from oobleck.core.messages import Committed, ComputeTime, PhaseReached, Ready
from oobleck.proto.status import read_status, status_message
from support.agent_core import A, Node, desired
from support.jobs import record


def told(*computed: ComputeTime) -> tuple[int, float]:
    """What the status says after the worker has said so, as the master reads it."""
    node = Node().with_worker()
    for step, compute in enumerate(computed, 1):
        said = Committed(record=record(step), compute=compute)
        node.state.apply(WorkerMessage(incarnation=A, message=said), node.now)
    (worker,) = read_status(status_message(status_of(node.state))).workers
    return worker.compute_steps, worker.compute_s


def test_how_long_a_worker_computes_is_in_the_status() -> None:
    assert told() == (0, 0.0)
    first = ComputeTime(steps=1, seconds=0.5)
    assert told(first, first.plus(0.25)) == (2, 0.75)
    assert told(ComputeTime(steps=0, seconds=0.0), first) == (1, 0.5), "the first was done in part"


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_time_that_makes_no_sense_is_none(seconds: float) -> None:
    good = ComputeTime(steps=1, seconds=0.5)
    assert told(good, ComputeTime(steps=2, seconds=seconds)) == (0, 0.0)
    assert told(ComputeTime(steps=1, seconds=seconds), good) == (1, 0.5)


def test_a_new_session_hears_which_layers_were_received_until_the_plan_is_entered() -> None:
    node = Node().with_worker()
    received = PhaseReached(generation=Generation(2), phase="received", layers=(0, 1))
    entered = PhaseReached(generation=Generation(2), phase="transferred")
    node.state.apply(WorkerMessage(incarnation=A, message=received), node.now)
    assert [report.what for report in standing_reports(node.state)] == [received]
    node.state.apply(WorkerMessage(incarnation=A, message=entered), node.now)
    assert standing_reports(node.state) == []


def test_how_long_a_worker_took_to_be_ready_is_in_the_status() -> None:
    node = Node()
    node.after(StartWarm(), WarmReady(), Assigned(desired=desired()))
    node.after(ForkRequested(slot=0, incarnation=A), WorkerForked(incarnation=A, pid=100))
    (worker,) = status_of(node.state).workers
    assert worker.up_s == 0.0, "it is not ready"
    forked = node.now
    node.after(at=forked + 7.0)
    node.after(WorkerMessage(incarnation=A, message=Ready(pid=100, card="n1:1")))
    node.after(at=forked + 30.0)
    (worker,) = read_status(status_message(status_of(node.state))).workers
    assert worker.up_s == 7.0
