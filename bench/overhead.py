"""What it costs, while nothing fails, that failures are survived: parts of a step, and daemons.

    python -m bench.overhead [--nodes 4] [--steps 40]

A local cluster trains the jobs of `bench.throughput` on two pipelines. A timeline of some steps
tells what each part takes of a worker's step:

checks     between instructions: whether a newer plan is wanted, and whether a drill strikes here
ballot     the worker's share of the vote, with the gradient's norm, which clipping needs anyway
vote       the all-reduce of the vote, on the worker that comes to it last: the others wait for it
count      reading the result: whether every sample was used exactly once, and the step's digest
report     between two steps: the step's record, to the agent
digests    SHA-256 of the rows that a pipeline trains on, of which each worker has its part
daemons    processor time of the master, the agents and the warm processes (records, heartbeats),
           as a share of the workers'

Each is the median over the steps, and over the workers but for the vote.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.support.cluster import LocalCluster
from bench.throughput import SIZES, TEXT
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.worker.data.dataset import row_digest

Event = Mapping[str, Any]
WARM_UP_STEPS = 5


def job_file(spec: JobSpec) -> dict[str, object]:
    model, training = spec.model, spec.training
    assert isinstance(model, ModelSpec)
    return {
        "name": "overhead",
        "model": {
            "layers": model.layers,
            "hidden": model.hidden,
            "heads": model.heads,
            "sequence_length": model.sequence_length,
            "tied": model.tied,
        },
        "data": {"text": [TEXT]},
        "training": {
            "steps": training.steps,
            "global_batch": training.global_batch,
            "microbatch": training.microbatch,
            "pipeline_schedule": "1f1b",
        },
        "fault_tolerance": 1,
        "resources": {"min_nodes_per_pipeline": 2},
        "profile": "estimate",
    }


@dataclass(frozen=True, kw_only=True)
class WorkerStep:
    """Step of one worker; times in microseconds."""

    step: Event
    #: Spans directly inside the step, in order.
    instructions: Sequence[Event]
    #: Durations of the parts of the vote, by name.
    vote: Mapping[str, float]
    #: Time from the end of the step to the begin of the next one; None: not recorded.
    to_next: float | None

    @property
    def checks(self) -> float:
        return sum(end_to_begin(one, other) for one, other in pairwise(self.instructions))


def end_to_begin(one: Event, other: Event) -> float:
    return float(other["ts"] - one["ts"] - one["dur"])


def worker_steps(events: Iterable[Event]) -> dict[str, list[WorkerStep]]:
    """Return the steps of all workers, by step."""
    tracks: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        if event.get("cat") == "step":
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    found: dict[str, list[WorkerStep]] = {}
    for track in tracks.values():
        steps = sorted((e for e in track if e["name"].startswith("step ")), key=lambda e: e["ts"])
        for number, step in enumerate(steps):
            within = sorted(
                (e for e in track if step["ts"] <= e["ts"] < step["ts"] + step["dur"]),
                key=lambda e: (e["ts"], -e["dur"]),
            )[1:]
            instructions: list[Event] = []
            for event in within:
                if not instructions or end_to_begin(instructions[-1], event) >= 0:
                    instructions.append(event)
            following = steps[number + 1] if number + 1 < len(steps) else None
            found.setdefault(step["name"], []).append(
                WorkerStep(
                    step=step,
                    instructions=instructions,
                    vote={e["name"]: float(e["dur"]) for e in within},
                    to_next=None if following is None else end_to_begin(step, following),
                )
            )
    return found


def parts_ms(events: Iterable[Event]) -> tuple[float, dict[str, float]]:
    """Return the milliseconds of a step, and of its parts."""
    steps = list(worker_steps(events).values())

    def median(of: Callable[[list[WorkerStep]], float]) -> float:
        return statistics.median(of(workers) for workers in steps) / 1e3

    between = [w.to_next for workers in steps for w in workers if w.to_next is not None]
    return median(lambda workers: max(w.step["dur"] for w in workers)), {
        "checks": median(lambda workers: statistics.median(w.checks for w in workers)),
        "ballot": median(lambda workers: statistics.median(w.vote["ballot"] for w in workers)),
        "vote": median(lambda workers: min(w.vote["wait for votes"] for w in workers)),
        "count": median(lambda workers: statistics.median(w.vote["count"] for w in workers)),
        "report": statistics.median(between) / 1e3,
    }


def digests_ms(spec: JobSpec, workers: int) -> float:
    rows = spec.training.global_batch
    row = np.zeros(spec.model.row_tokens + 1, dtype=np.int64)
    begun = time.perf_counter()
    for _ in range(100 * rows):
        row_digest(row)
    return (time.perf_counter() - begun) / 100 / workers * 1e3


def processor_s(processes: Iterable[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (p.cpu_times() for p in processes))


def daemons_share(cluster: LocalCluster, job_id: str, steps: int) -> float:
    """Return the processor time of all but the workers, as a share of theirs, over `steps`
    steps."""
    pids = set(cluster.worker_pids().values())
    workers = [psutil.Process(pid) for pid in pids]
    daemons = [p for p in cluster.processes() if p.pid not in pids]
    before = processor_s(workers), processor_s(daemons)
    cluster.wait_step(job_id, int(cluster.metrics(job_id)[-1]["step"]) + steps, timeout_s=600)
    after = processor_s(workers), processor_s(daemons)
    return (after[1] - before[1]) / (after[0] - before[0])


def measure(size: str, nodes: int, steps: int) -> None:
    spec = SIZES[size].job
    with LocalCluster(nodes) as cluster, tempfile.TemporaryDirectory() as folder:
        job_id = cluster.submit(job_file(spec))
        cluster.wait_step(job_id, WARM_UP_STEPS)
        share = daemons_share(cluster, job_id, steps)
        output = Path(folder, "timeline.json")
        events = cluster.timeline(job_id, output, steps)
        cluster.oobleck("cancel", job_id)
    step_ms, parts = parts_ms(events)
    parts["digests"] = digests_ms(spec, nodes)
    print(f"{size}: step {step_ms:.0f} ms on {nodes} nodes")
    for name, part_ms in parts.items():
        print(f"  {name:<10}{part_ms:>8.2f} ms{part_ms / step_ms:>8.2%}")
    total = sum(parts.values()) / step_ms
    print(f"  {'together':<10}{'':>11}{total:>8.2%}")
    print(f"  {'daemons':<10}{'':>11}{share:>8.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    for size in arguments.sizes.split(","):
        measure(size, arguments.nodes, arguments.steps)


if __name__ == "__main__":
    main()
