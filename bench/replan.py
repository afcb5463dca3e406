"""How long the master takes to plan anew, with templates at hand.

    python -m bench.replan [--nodes 30 256 1024] [--losses 7] [--workers 1] [--microbatches 16]
        [--policy templates]

Builds the state of a master with a trained job on so many nodes and calls `planning.next_plan`, as
the master does: for the loss of one node, of two at once (f = 2), and for a node that joins. Each
figure is the median over several nodes, none asked about before. The job is a GPT of 98 layers
(96 blocks) whose memory asks for about three nodes per pipeline. `compile` is what a worker of the
new plan needs for its own program after one loss: the longest of a few.
"""

import argparse
import random
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import get_args

from bench.support.trained import planned_job, ready_node
from oobleck.core.ids import Generation, JobId
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, RecoveryPolicy, TrainingSpec
from oobleck.core.plan import Plan
from oobleck.host.detection import Detection
from oobleck.master.planning.solve import AtOnce
from oobleck.master.rules.decision import Context
from oobleck.master.rules.next_plan import next_plan
from oobleck.master.state.node import Node
from oobleck.planner.profile.estimate import estimate_profile
from oobleck.planner.programs.compiler.own import compile_own
from oobleck.planner.programs.listing.schedule import forget as forget_schedules

JOB = JobId("replan-1")
FAULT_TOLERANCE = 2
NODES_PER_PIPELINE = 3


def job_spec(microbatches: int) -> JobSpec:
    return JobSpec(
        name="replan",
        model=ModelSpec(layers=96, hidden=4096, heads=32, sequence_length=2048, vocabulary=50304),
        data=DataSpec(text=("/nowhere",)),
        training=TrainingSpec(steps=1000, global_batch=microbatches),
        fault_tolerance=FAULT_TOLERANCE,
    )


def memory_per_worker(spec: JobSpec, workers: int) -> int:
    """Return the memory with which slightly less than three nodes hold the model."""
    profile = estimate_profile(spec, gpus_per_node=workers, memory_per_worker_bytes=1 << 40)
    states = sum(layer.state_bytes for layer in profile.layers)
    in_flight = sum(layer.activation_bytes for layer in profile.layers) * NODES_PER_PIPELINE
    return round((states + in_flight * workers) / (NODES_PER_PIPELINE - 0.6) / workers)


class Cluster:
    """State of a master with nodes that are all ready, and a job that has committed a step."""

    def __init__(self, count: int, workers: int, microbatches: int = 16) -> None:
        self.spec = job_spec(microbatches=microbatches * count)
        self._workers = workers
        self._memory = memory_per_worker(self.spec, workers)
        self.nodes = [self._ready(number) for number in range(count)]
        self.state, self.job = planned_job(JOB, self.spec, self.nodes)
        self.job.seen.steps.committed_step = 5
        self.job.current.trained = self.job.current.made
        self.context = Context(
            state=self.state, now=0.0, timing=Detection(), nonce="", planner=AtOnce()
        )

    def _ready(self, number: int) -> Node:
        return ready_node(f"n{number:04}", JOB, memory=self._memory, slots=self._workers)

    def add(self, number: int) -> Node:
        node = self._ready(number)
        self.state.nodes[node.facts.node] = node
        return node

    def without(self, lost: int, times: int) -> Iterator[list[Node]]:
        rng = random.Random(lost)
        for _ in range(times):
            gone = set(rng.sample(range(len(self.nodes)), lost))
            yield [node for number, node in enumerate(self.nodes) if number not in gone]

    def joined(self, times: int) -> Iterator[list[Node]]:
        for number in range(times):
            yield [*self.nodes, self.add(len(self.nodes) + number)]


def compile_ms(plan: Plan, spec: JobSpec) -> float:
    """Return the processor time of the slowest of a few workers, including the busiest."""
    passed = Counter(w for route in plan.routes for hop in route.hops for w in hop.workers)
    taken = []
    for worker in dict.fromkeys([*(w for w, _ in passed.most_common(2)), *plan.workers[:2]]):
        forget_schedules()
        begun = time.process_time()
        compile_own(plan, worker, tied=spec.model.ties)
        taken.append((time.process_time() - begun) * 1e3)
    return max(taken)


def replan_ms(
    cluster: Cluster,
    changes: Iterator[list[Node]],
    wanted: RecoveryPolicy,
    show: Callable[[str], None],
) -> tuple[float, float, float, Plan]:
    """Return the first time, the median, the median of processor times, and the last plan."""
    wall, processor, plans = [], [], list[Plan]()
    for live in changes:
        begun = time.perf_counter(), time.process_time()
        found = next_plan(cluster.context, cluster.job, live, Generation(2), wanted).found
        wall.append((time.perf_counter() - begun[0]) * 1e3)
        processor.append((time.process_time() - begun[1]) * 1e3)
        plans.append(found.plan)
        show(f"    {wall[-1]:8.1f} ms  {found.rule}: {found.reason[:100]}")
    return wall[0], statistics.median(wall), statistics.median(processor), plans[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[30, 256, 1024])
    parser.add_argument("--losses", type=int, default=7)
    parser.add_argument("--workers", type=int, default=1, help="workers per node")
    parser.add_argument("--microbatches", type=int, default=16, help="micro-batches per node")
    parser.add_argument("--policy", choices=get_args(RecoveryPolicy), default="templates")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    show: Callable[[str], None] = print if arguments.verbose else lambda line: None
    print("milliseconds: the first such change, then the median of all (of processor time)")
    print(
        "nodes  pipelines  first plan s  lose one             lose two             join"
        "                 compile  peak MiB"
    )
    for count in arguments.nodes:
        begun = time.perf_counter()
        cluster = Cluster(count, arguments.workers, arguments.microbatches)
        first_s = time.perf_counter() - begun
        assert cluster.job.current.made is not None
        pipelines = len(cluster.job.current.made.plan.pipelines)
        figures = [
            replan_ms(cluster, cluster.without(1, arguments.losses), arguments.policy, show),
            replan_ms(
                cluster, cluster.without(FAULT_TOLERANCE, arguments.losses), arguments.policy, show
            ),
            replan_ms(cluster, cluster.joined(arguments.losses), arguments.policy, show),
        ]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        times = "  ".join(
            f"{first:5.0f} {wall:5.1f} ({cpu:5.1f})" for first, wall, cpu, _ in figures
        )
        compiled = compile_ms(figures[0][3], cluster.spec)
        print(
            f"{count:5}  {pipelines:9}  {first_s:12.2f}  {times}  {compiled:7.1f}  {peak:8.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
