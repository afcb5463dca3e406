"""What a worker process must be able to take again and again: changes of plan, and odd steps."""

import time
from pathlib import Path

from oobleck.planner.job import DataSpec, JobSpec, ModelSpec, TrainingSpec
from oobleck.planner.optimization import OptimizerSpec
from support.director import Director, WarmWorkers, make_plan

TEXT = str(Path(__file__).parents[2] / "LICENSE")
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


def enter(cluster: Director, generation: int, *, boundary: bool = False) -> None:
    cuts, shares = CUTS[generation % len(CUTS)]
    plan = make_plan(generation, cuts, shares)
    cluster.assign(plan, boundary=boundary)
    cluster.wait(
        lambda: any(r[0].generation == generation for r in cluster.records.values()),
        f"a step of generation {generation}",
    )


def settled_footprints(cluster: Director) -> list[tuple[int, int, int]]:
    time.sleep(1.5)  # what a generation leaves is freed a second after it
    return [footprint(live.pid) for live in cluster.workers.values()]


def test_thirty_generations_leave_nothing_behind(warm: WarmWorkers) -> None:
    with Director(warm, job()) as cluster:
        cluster.start("a", "b", "c")
        for generation in range(1, 8):
            enter(cluster, generation, boundary=generation % 2 == 0)
        before = settled_footprints(cluster)
        for generation in range(8, 38):
            enter(cluster, generation, boundary=generation % 2 == 0)
        after = settled_footprints(cluster)
        cluster.stop()
        cluster.losses()
    for (fds, threads, kib), (fds_after, threads_after, kib_after) in zip(
        before, after, strict=True
    ):
        # A group or two may be on their way out, or given up with an operation of theirs: a leak
        # would be at least one for each of the thirty.
        assert fds_after < fds + 30
        assert threads_after < threads + 10
        assert kib_after <= kib + 8 * 1024


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
