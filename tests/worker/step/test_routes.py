"""Workers hold more than they compute, in pieces, and train as the unsplit reference does."""

import dataclasses
from pathlib import Path

import pytest

from oobleck.host.ipc.messages import FaultRule, PhaseReached
from oobleck.planner.programs.plan import Hold, Plan, Route
from support.director import Director, WarmWorkers, make_plan, worker_named
from support.unsplit import check, make_job

#: Layers 0 to 2 and 3 to 5, twice.
FOUR = make_plan(1, [[("a", 3), ("b", 3)], [("c", 3), ("d", 3)]], [6, 4])


def held(first: int, last: int, *names: str) -> Hold:
    workers = tuple(map(worker_named, names))
    return Hold(first_layer=first, last_layer=last, workers=workers)


def with_holds(plan: Plan, *more: Hold) -> Plan:
    return dataclasses.replace(plan, holds=(*plan.holds, *more))


#: `e` computes nothing, and has a copy of what `d` holds; `a` has one of the last layer.
SHADOWED = with_holds(FOUR, held(3, 5, "e"), held(5, 5, "a"))


def without(plan: Plan, name: str, instead: str) -> Plan:
    """`instead` computes what the worker of `name` did, in the next generation."""
    lost, found = (worker_named(name),), (worker_named(instead),)
    return Plan(
        generation=plan.generation + 1,
        holds=tuple(hold for hold in plan.holds if hold.workers != lost),
        routes=tuple(
            Route(
                hops=tuple(
                    dataclasses.replace(hop, workers=found) if hop.workers == lost else hop
                    for hop in route.hops
                ),
                microbatches=route.microbatches,
            )
            for route in plan.routes
        ),
        schedule=plan.schedule,
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_copies_that_nobody_computes_with_are_kept_the_same(
    warm: WarmWorkers, tmp_path: Path, schedule: str
) -> None:
    job = make_job(tmp_path / "out")
    plan = dataclasses.replace(SHADOWED, schedule=schedule)
    with Director(warm, job) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(plan)
        cluster.wait_finished(plan)
        cluster.stop()
        check(cluster, job)


@pytest.mark.parametrize("point", ["before:Backward", "voting", "before:OptimizerStep"])
def test_a_copy_takes_over_at_once_and_nothing_moves(
    warm: WarmWorkers, tmp_path: Path, point: str
) -> None:
    job = make_job(tmp_path / "out")
    lost = worker_named("d")
    fault = FaultRule(worker=lost, point=point, step=2, action="kill_worker")
    after = without(SHADOWED, "d", "e")
    with Director(warm, job, [fault]) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(SHADOWED)
        cluster.wait(lambda: cluster.workers[lost].gone, "the scripted kill")
        cluster.assign(after)
        cluster.wait_finished(after)
        for worker in after.workers:
            transferred = [
                said
                for said in cluster.said(worker, PhaseReached, after.generation)
                if said.phase == "transferred"
            ]
            assert [said.received_bytes for said in transferred] == [0]
        cluster.stop()
        check(cluster, job)
