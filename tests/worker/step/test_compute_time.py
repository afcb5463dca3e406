"""What workers tell of how long they compute: whole steps, without what they wait for."""

import time

from oobleck.core.ids import WorkerId
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.core.messages import Committed, ComputeTime, FaultRule, StepRecord
from support.director import Director, WarmWorkers, make_plan, worker_named
from support.folders import TEXT
from support.waiting import is_stopped

STEPS = 4
STOPPED_S = 0.5
#: A stage on two workers, and one behind it.
PLAN = make_plan(1, [[("a", 2, 2), ("b", 3)]], [4])
JOB = JobSpec(
    name="timed",
    model=ModelSpec(layers=3, hidden=24, heads=2, sequence_length=16),
    data=DataSpec(text=(TEXT,)),
    training=TrainingSpec(steps=STEPS, global_batch=8, microbatch=2),
)


def committed(cluster: Director, worker: WorkerId) -> list[tuple[StepRecord, ComputeTime]]:
    told = [m for m in cluster.said(worker, Committed) if isinstance(m, Committed)]
    return [(m.record, m.compute) for m in told if m.compute is not None]


def test_what_others_are_waited_for_does_not_count(warm: WarmWorkers) -> None:
    """A worker stops itself before it computes: those that share its stage wait within a forward,
    for its weights, and those of the next stage for its activations."""
    stops = FaultRule(worker=worker_named("a"), point="before:Forward", step=3, action="stop")
    with Director(warm, JOB, [stops]) as cluster:
        cluster.start("a", "a/1", "b")
        cluster.assign(PLAN)
        cluster.wait(lambda: is_stopped(cluster.workers[worker_named("a")].pid), "a stop")
        began = time.monotonic()
        time.sleep(STOPPED_S)
        stopped_s = time.monotonic() - began
        cluster.let_go("a")
        cluster.wait_finished(PLAN)
        for worker in PLAN.workers:
            told = committed(cluster, worker)
            assert [compute.steps for _, compute in told] == [1, 2, 3, 4]
            seconds = [0.0, *(compute.seconds for _, compute in told)]
            assert seconds == sorted(seconds)
            assert seconds[1] > 0
            whole_s = sum(record.step_seconds for record, _ in told)
            assert seconds[-1] + stopped_s < whole_s, f"{worker} has counted what it waited for"


def test_a_step_that_is_done_again_in_part_does_not_count(warm: WarmWorkers) -> None:
    two = make_plan(1, [[("a", 5)], [("b", 5)]], [2, 2])
    alone = make_plan(2, [[("a", 5)]], [4])
    dies = FaultRule(worker=worker_named("b"), point="reduced", step=2, action="kill_worker")
    with Director(warm, JOB, [dies]) as cluster:
        cluster.start("a", "b")
        cluster.assign(two)
        cluster.wait(lambda: cluster.workers[worker_named("b")].gone, "the scripted kill")
        cluster.assign(alone)
        cluster.wait_finished(alone)
        told = committed(cluster, worker_named("a"))
        assert [(record.step, compute.steps) for record, compute in told] == [
            (1, 1),
            (2, 0),
            (3, 1),
            (4, 2),
        ]
