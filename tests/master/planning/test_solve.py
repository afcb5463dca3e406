"""A plan whose programs wait for ever is an error of ours: nobody is told of it."""

from collections.abc import Iterator

import pytest

from oobleck.master.planning import client, solve, worker
from oobleck.master.planning.requests import PlanReply, PlanRequest
from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.ids import Generation
from oobleck.planner.programs import compile as compiler
from oobleck.planner.programs import proof
from oobleck.planner.programs.schedule import Work, compute_order
from oobleck.planner.schedules import Schedule
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
    assert client.next_plan(planner, job, nodes[1:], Generation(2), "auto").found.plan.pipelines

    solve.forget()
    for module in (compiler, proof):
        monkeypatch.setattr(module, "compute_order", last_stage_goes_backwards)
    waits = r"programs wait for each other: .*p0s1/0 waits at 1-1:RECV_F\d<p0s0/0 for p0s0/0"
    with pytest.raises(RuntimeError, match=waits):
        client.first_plan(planner, job, nodes[1:], Generation(2))
    with pytest.raises(RuntimeError, match=waits):
        client.next_plan(planner, job, nodes[1:], Generation(2), "auto")
    with pytest.raises(PlanInfeasible):  # no error of ours
        client.first_plan(planner, job, nodes[:1], Generation(1))
