"""What a worker process must be able to take again and again: changes of plan, and odd steps."""

from functools import partial
from pathlib import Path

import pytest

from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.core.messages import FaultRule, PeerLost
from oobleck.core.plan import Plan
from oobleck.planner.programs.communicators import Communicator, communicators
from support.director import Director, WarmWorkers, make_plan
from support.fake_nccl import CUDA_FAILED, nccl_error
from support.folders import TEXT

CUTS = (
    ([[("a", 2), ("b", 3)], [("c", 5)]], [2, 2]),
    ([[("a", 4), ("b", 1)], [("c", 5)]], [3, 1]),
    ([[("c", 1), ("a", 2), ("b", 2)]], [4]),
)


def job(**fields: object) -> JobSpec:
    values: dict[str, object] = {"steps": 100_000, "global_batch": 4, **fields}
    return JobSpec(
        name="again",
        model=ModelSpec(layers=3, hidden=16, heads=2, sequence_length=8),
        data=DataSpec(text=(TEXT,)),
        training=TrainingSpec(**values),  # type: ignore[arg-type]
    )


def footprint(pid: int) -> tuple[int, int, int]:
    """Open descriptors, threads, and resident KiB of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return descriptors, int(values["Threads"]), int(values["VmRSS"].split()[0])


def enter(
    cluster: Director, generation: int, *, boundary: bool = False, plan: Plan | None = None
) -> None:
    plan = plan or make_plan(generation, *CUTS[generation % len(CUTS)])
    cluster.assign(plan, boundary=boundary)
    cluster.wait(
        lambda: any(r[0].generation == generation for r in cluster.records.values()),
        f"a step of generation {generation}",
    )


def footprints(cluster: Director) -> list[tuple[int, int, int]]:
    return [footprint(live.pid) for live in cluster.workers.values()]


def as_large(before: list[tuple[int, int, int]], after: list[tuple[int, int, int]]) -> bool:
    # A leak would be that of thirty generations.
    return all(
        fds_after < fds + 8 and threads_after < threads + 4 and kib_after <= kib + 12 * 1024
        for (fds, threads, kib), (fds_after, threads_after, kib_after) in zip(
            before, after, strict=True
        )
    )


def test_a_change_at_a_boundary_connects_only_what_is_new(warm: WarmWorkers) -> None:
    """Over the fake of NCCL, whose switch counts the members of all groups that were made."""
    with Director(warm, job(), transport="nccl") as cluster:
        switch = cluster.switch
        assert switch is not None
        cluster.start("a", "b", "c")
        had: set[Communicator] = set()
        made = 0
        for generation in range(1, 8):
            plan = make_plan(generation, *CUTS[generation * generation % len(CUTS)])
            wanted = set(communicators(plan, tied=cluster.job.model.ties))
            made += sum(len(new.members) for new in wanted - had)
            had = wanted
            enter(cluster, generation, boundary=generation > 1, plan=plan)
            cluster.wait(lambda made=made: switch.made >= made, "all groups")  # type: ignore[misc]
            cluster.wait(switch.all_are_used, "their use")
            assert switch.made == made, f"of generation {generation}"
        cluster.stop()
        cluster.losses()


@pytest.mark.parametrize("boundary", [True, False])
def test_a_change_trains_on_while_nothing_can_connect(warm: WarmWorkers, boundary: bool) -> None:
    with Director(warm, job(), transport="nccl") as cluster:
        switch = cluster.switch
        assert switch is not None
        cluster.start("a", "b", "c")
        enter(cluster, 1)
        cluster.wait(switch.all_are_used, "the first generation's groups")
        switch.connects.clear()
        enter(cluster, 2, boundary=boundary)
        cluster.wait(lambda: not switch.all_are_used(), "groups that wait to be connected")
        newest = max(cluster.records)
        cluster.wait(lambda: newest + 2 in cluster.records, "more steps")
        switch.connects.set()
        cluster.wait(switch.all_are_used, "the second one's")
        switch.connects.clear()
        # Some are new and cannot connect, and are given up.
        enter(cluster, 3, boundary=boundary)
        enter(cluster, 4, boundary=boundary)
        switch.connects.set()
        cluster.wait(switch.all_are_used, "the last one's")
        cluster.stop()
        cluster.losses()


def test_what_fails_while_groups_connect_is_not_taken_for_a_lost_peer(warm: WarmWorkers) -> None:
    """Amid training, where others' operations are what ends by it. Once the peer may have ended
    whose memory cannot be mapped; among the same processes again it is the host."""
    with Director(warm, job(), transport="nccl") as cluster:
        assert cluster.switch is not None
        cluster.start("a", "b", "c")
        enter(cluster, 1)
        cluster.switch.fails = str(nccl_error(*CUDA_FAILED, "peer access is not supported"))
        with pytest.raises(AssertionError, match=r"failed: .* does not let its processes map"):
            meet_again_and_again(cluster)


def meet_again_and_again(cluster: Director) -> None:
    """In each generation one of three sees what fails, or more."""
    for generation in range(2, 6):
        plan = make_plan(generation, *CUTS[generation % len(CUTS)])
        cluster.assign(plan)
        cluster.wait(partial(all_left, cluster, plan), "the end of the generation")


def all_left(cluster: Director, plan: Plan) -> bool:
    return all(cluster.said(worker, PeerLost, plan.generation) for worker in plan.workers)


def test_thirty_generations_leave_nothing_behind(warm: WarmWorkers) -> None:
    with Director(warm, job()) as cluster:
        cluster.start("a", "b", "c")
        for generation in range(1, 8):
            enter(cluster, generation, boundary=generation % 2 == 0)
        before = footprints(cluster)
        for generation in range(8, 38):
            enter(cluster, generation, boundary=generation % 2 == 0)
        try:
            cluster.wait(lambda: as_large(before, footprints(cluster)), "what is left is freed")
        except AssertionError as error:
            error.add_note(f"descriptors, threads and KiB: {before}, then {footprints(cluster)}")
            raise
        cluster.stop()
        cluster.losses()


def test_a_step_that_is_not_finite_is_skipped_by_all(warm: WarmWorkers) -> None:
    # The first update throws every weight so far off that no later loss is a number.
    steps = 4
    wild = job(steps=steps, optimizer=OptimizerSpec(lr=1e38), clip=None)
    plan = make_plan(1, *CUTS[0])
    with Director(warm, wild) as cluster:
        cluster.start("a", "b", "c")
        cluster.assign(plan)
        cluster.wait_finished(plan)
        cluster.stop()
        losses = cluster.losses()
        assert losses[1] is not None
        for step in range(2, steps + 1):
            records = cluster.records[step]
            assert len(records) == len(plan.workers)
            assert {(r.loss, r.skipped) for r in records} == {(None, True)}
        assert not any(record.skipped for record in cluster.records[1])


def test_too_many_skipped_steps_in_a_row_fail_the_job_whoever_is_left(
    warm: WarmWorkers,
) -> None:
    first, second = WorkerId(NodeName("a"), 0), WorkerId(NodeName("n"), 0)
    limit = 6  # of steps 2 to 7
    holds = [
        FaultRule(
            worker=worker,
            point="before:Forward",
            generation=Generation(generation),
            step=step,
            action="hold",
        )
        for generation, (worker, step) in enumerate([(first, 4), (second, 6)], 1)
    ]
    wild = job(optimizer=OptimizerSpec(lr=1e38), clip=None, max_skipped_steps=limit)
    with Director(warm, wild, holds) as cluster:
        cluster.start("a", "n")
        cluster.assign(make_plan(1, [[("a", 5)]], [4]))
        cluster.wait(lambda: cluster.has_faulted("a/0"), "a is held")
        cluster.assign(make_plan(2, [[("a", 5)], [("n", 5)]], [2, 2]))
        cluster.wait(lambda: cluster.has_faulted("n/0"), "n is held")
        cluster.kill("a")
        cluster.assign(make_plan(3, [[("n", 5)]], [4]))
        with pytest.raises(AssertionError, match=r"n/0 failed: .* 6 consecutive steps \(2 to 7\)"):
            cluster.wait(lambda: cluster.workers[second].gone, "n ends")
        skipped = {step for step, records in cluster.records.items() if records[0].skipped}
        assert skipped == set(range(2, 2 + limit))
