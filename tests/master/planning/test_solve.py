"""Errors of ours: a plan whose programs wait for ever, which nobody is told of, and crashes of the
planner. What nobody is forced to do is left, and plain templates answer a loss."""

import logging
from collections.abc import Iterator
from typing import NoReturn

import msgspec
import pytest

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation
from oobleck.core.schedules import Schedule
from oobleck.master.planning import client, solve, worker
from oobleck.master.planning.requests import (
    Machines,
    NextPlanReply,
    NextPlanRequest,
    PlanningFailed,
    PlanReply,
    PlanRequest,
)
from oobleck.planner.programs.compiler import compile as compiler
from oobleck.planner.programs.compiler import proof
from oobleck.planner.programs.compiler.schedule import Work, compute_order
from oobleck.planner.recovery import policies, worth
from oobleck.planner.recovery.outlook import Outlook
from support.scenario import Player
from support.trained import node, trained_job


class InOneProcess(solve.AtOnce):
    """Replies as the planning process does."""

    def reply(self, request: PlanRequest) -> PlanReply:
        return worker.reply(request)


def last_stage_goes_backwards(schedule: Schedule, **places: int) -> Iterator[Work]:
    """It takes the newest micro-batch first, which the stage before sends last."""
    newest = places["microbatches"] - 1
    for kind, microbatch in compute_order(schedule, **places):
        yield kind, newest - microbatch if places["stage"] else microbatch


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> Iterator[None]:
    solve.forget()
    yield
    solve.forget()


def test_a_plan_that_is_not_proven_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node(number) for number in range(1, 6)]
    _, job = trained_job(nodes, hidden=34)
    planner = InOneProcess()
    assert client.first_plan(planner, job, nodes, Generation(1)).pipelines
    assert client.next_plan(
        planner, job, nodes[1:], Generation(2), "auto", Outlook()
    ).found.plan.pipelines

    solve.forget()
    for module in (compiler, proof):
        monkeypatch.setattr(module, "compute_order", last_stage_goes_backwards)
    waits = r"programs wait for each other: .*p0s1/0 waits at 1-1:RECV_F\d<p0s0/0 for p0s0/0"
    with pytest.raises(RuntimeError, match=waits):
        client.first_plan(planner, job, nodes[1:], Generation(2))
    with pytest.raises(PlanningFailed, match=waits):
        client.next_plan(planner, job, nodes[1:], Generation(2), "auto", Outlook())
    with pytest.raises(PlanInfeasible):  # no error of ours
        client.first_plan(planner, job, nodes[:1], Generation(1))


def test_a_reply_has_each_plan_once() -> None:
    nodes = [node(number) for number in range(1, 6)]
    _, job = trained_job(nodes, hidden=34)
    assert job.current.made is not None
    request = NextPlanRequest(
        spec=job.spec,
        machines=Machines.of(job, nodes),
        plan=job.current.made.plan,
        base=None,
        wanted="auto",
        nodes=tuple(one.facts.node for one in nodes[1:]),
        most_nodes=5,
        generation=Generation(2),
    )
    reply = solve.work_out(request)
    assert isinstance(reply, NextPlanReply)
    read = msgspec.json.decode(encoded := msgspec.json.encode(reply), type=NextPlanReply)
    courses = reply.candidates.courses
    assert any(course.behind is not None for course in courses)
    assert encoded.count(b'"holds"') == len(reply.answers) < len(courses)
    assert read.candidates == reply.candidates


def crashes(*_: object, **__: object) -> NoReturn:
    raise AssertionError("memory stuck")


#: Of three pipelines two lose the same stage.
LOSSES = """\
0.0 register n1 n2 n3 n4 n5 n6
0.0 submit demo f=2 {options}
0.5 ready n1 n2 n3 n4 n5 n6
0.7 enter 1 n1 n2 n3 n4 n5 n6
1.0 steps 1 5 1
2.0 close n2
2.0 close n4
2.01 peer_lost n1/0 1
2.2 enter 2 n1 n3 n5 n6
2.4 steps 6 6 2
"""


@pytest.fixture
def _as_in_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve.AtOnce, "reply", InOneProcess.reply)


@pytest.mark.usefixtures("_as_in_its_own_process")
def test_a_loss_is_answered_by_templates_where_another_policy_crashes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worth, "reroute", crashes)
    told = Player().play(LOSSES.format(options="reroute=1 shadows=0"))
    assert "PlanMade generation 2 at once, merge (node lost)" in told
    assert "reroute failed with AssertionError('memory stuck'); please report it" in told
    (record,) = (one for one in caplog.records if one.levelno == logging.ERROR)
    assert record.wanted == "reroute"
    assert record.exc_text is not None or record.exc_info is not None


@pytest.mark.usefixtures("_as_in_its_own_process")
def test_a_loss_that_nothing_answers_ends_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "reroute", crashes)
    monkeypatch.setattr(worth, "reconfigure", crashes)
    with pytest.raises(RuntimeError, match=r"nothing answers the loss: .*plain failed with Asser"):
        Player().play(LOSSES.format(options="reroute=1 shadows=0"))


@pytest.mark.usefixtures("_as_in_its_own_process")
@pytest.mark.parametrize(
    ("options", "makes"), [("reroute=1 shadows=0", "normalised"), ("templates=1", "shadowed")]
)
def test_a_follow_up_that_crashes_is_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, options: str, makes: str
) -> None:
    monkeypatch.setattr(policies, makes, crashes)
    player = Player()
    told = player.play(LOSSES.format(options=options))
    assert "FollowUpDropped generation 2: an error of Oobleck's own" in told
    monkeypatch.setattr(policies, makes, lambda change: pytest.fail("it is asked for again"))
    player.play("2.5 restart\n2.6 reconnect n1 n3 n5 n6\n3.0 steps 7 7 2\n9.0 look\n")


@pytest.mark.usefixtures("_as_in_its_own_process")
def test_slow_workers_keep_their_part_where_a_plan_for_them_crashes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policies, "around_slow", crashes)
    told = Player().play(
        "0.0 register n1 n2 n3 n4\n0.0 submit demo hidden=1024 steps=1000 f=0\n"
        "0.5 ready n1 n2 n3 n4\n0.7 enter 1 n1 n2 n3 n4\n1.0 steps 1 1 1\n"
        "1.0 compute 6 2 n2/0=20\n7.1 look\n7.2 steps 2 2 1\n"
    )
    assert "RateChanged" in told
    assert told.count("PlanMade") == 1
