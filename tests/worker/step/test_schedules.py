"""Every schedule trains as the unsplit reference does, on real worker processes, and recovers."""

import dataclasses
from pathlib import Path

import pytest

from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.instructions import BackwardInput, BackwardWeight
from oobleck.core.messages import FaultRule
from oobleck.core.plan import Plan
from oobleck.core.schedules import Schedule
from oobleck.planner.programs.compiler.compile import compile_programs
from support.director import Director, WarmWorkers, make_plan
from support.unsplit import check, make_job


def scheduled(plan: Plan, schedule: Schedule) -> Plan:
    return dataclasses.replace(plan, schedule=schedule)


#: Three stages and two, so that layers are cut differently and shares differ.
FIVE = make_plan(1, [[("a", 2), ("b", 2), ("c", 2)], [("d", 3), ("e", 3)]], [6, 4])
WITHOUT_C = make_plan(2, [[("a", 2), ("b", 4)], [("d", 3), ("e", 3)]], [5, 5])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_trains_as_the_reference_does(
    warm: WarmWorkers, tmp_path: Path, schedule: Schedule, tied: bool
) -> None:
    job = make_job(tmp_path / "out", tied=tied)
    with Director(warm, job) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        plan = scheduled(FIVE, schedule)
        cluster.assign(plan)
        cluster.wait_finished(plan)
        cluster.stop()
        check(cluster, job)


@pytest.mark.parametrize("point", ["after:BackwardInput", "before:BackwardWeight"])
def test_killed_between_the_parts_of_a_backward(
    warm: WarmWorkers, tmp_path: Path, point: str
) -> None:
    """The redone step begins anew: what others had left for later is neither lost nor added."""
    job = make_job(tmp_path / "out")
    victim = WorkerId(NodeName("c"), 0)
    fault = FaultRule(worker=victim, point=point, step=2, action="kill_worker")
    with Director(warm, job, [fault]) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(scheduled(FIVE, "zb-h1"))
        cluster.wait(lambda: cluster.workers[victim].gone, "the scripted kill")
        after = scheduled(WITHOUT_C, "zb-h1")
        cluster.assign(after)
        cluster.wait_finished(after)
        cluster.stop()
        check(cluster, job)


def test_the_plans_above_split_backwards() -> None:
    programs = compile_programs(scheduled(FIVE, "zb-h1"), tied=True)
    split = [
        worker.node
        for worker, program in programs.items()
        if {BackwardInput, BackwardWeight} <= {type(step) for step in program}
    ]
    assert split == ["b", "c", "e"]
