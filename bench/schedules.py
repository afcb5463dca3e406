"""The three schedules: simulated bubble, step and memory, and simulated against measured steps.

    python -m bench.schedules [--rounds 8] [--steps 4] [--simulate-only] 2>/dev/null

The first table is a simulation of equal stages over fast links, where forward, input gradient and
weight gradient take 1, 1.13 and 0.87. The second trains for real: two workers, one stage each, that
go from one schedule to the next every few steps, so that a change of the machine's load hits all
alike. `fastest` is the least step of each; `to 1f1b` the median over rounds of the ratio of medians
within a round. The profile for the simulation is measured by two processes at the same time, the
least of all rounds.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from msgspec import structs

from bench.support.engine import engine
from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.core.plan import Pipeline, Plan
from oobleck.core.profile import LayerProfile, Links, Profile
from oobleck.core.routes import Hold
from oobleck.core.schedules import SCHEDULES, Schedule
from oobleck.core.units import format_bytes
from oobleck.planner.cost.estimate import estimate_step
from oobleck.planner.profile.estimate import estimate_profile
from oobleck.planner.profile.measurement import assemble_profile
from oobleck.planner.programs.compiler.compile import compile_programs
from oobleck.planner.programs.compiler.proof import dry_run
from oobleck.planner.search.choose import choose_schedule

ROOT = Path(__file__).resolve().parents[1]
TEXT = str(ROOT / "LICENSE")
PROFILES = 4
MICROBATCHES = (2, 4, 8)
BLOCKS = 8


# ---- simulated


def equal_stages(stages: int) -> Profile:
    layers = tuple(
        LayerProfile(
            name=f"layer{number}",
            forward_s={1: 1.0},
            backward_s={1: 2.0},
            parameter_bytes=1 << 20,
            state_bytes=4 << 20,
            activation_bytes=1 << 20,
            output_bytes=1 << 10,
        )
        for number in range(stages)
    )
    links = Links(intra_node_bytes_per_s=1e12, inter_node_bytes_per_s=1e12, latency_s=0.0)
    return Profile(
        microbatch=1, gpus_per_node=1, gpu_memory_bytes=1 << 40, layers=layers, links=links
    )


def one_pipeline(stages: int, microbatches: int) -> Plan:
    nodes = tuple(NodeName(f"n{number}") for number in range(stages))
    places = tuple(
        Hold(first_layer=number, last_layer=number, workers=(WorkerId(node, 0),))
        for number, node in enumerate(nodes)
    )
    pipeline = Pipeline(nodes=nodes, stages=places, microbatches=microbatches)
    return Plan.of_pipelines([pipeline], generation=Generation(1))


def simulated() -> None:
    print(f"{'stages':>6} {'micro-batches':>13}  " + "".join(f"{s:^32}" for s in SCHEDULES))
    print(" " * 22 + f"{'step':>10} {'bubble':>8} {'peak':>11}  " * len(SCHEDULES))
    for stages in (2, 4, 8, 16):
        for microbatches in (stages // 2, stages, 2 * stages, 4 * stages, 8 * stages):
            choice = choose_schedule(one_pipeline(stages, microbatches), equal_stages(stages))
            cells = [
                f"{e.step_s:>10.1f} {e.bubble:>8.1%} {format_bytes(e.peak_bytes):>11}  "
                for e in choice.estimates.values()
            ]
            print(f"{stages:>6} {microbatches:>13}  {''.join(cells)}")


def simulator_speed() -> None:
    stages, microbatches = 8, 32
    profile = equal_stages(stages)
    for count in (8, 64):
        pipelines = []
        for number in range(count):
            one = one_pipeline(stages, microbatches).pipelines[0]
            names = {node: NodeName(f"p{number}{node}") for node in one.nodes}
            pipelines.append(
                Pipeline(
                    nodes=tuple(names.values()),
                    stages=tuple(
                        structs.replace(s, workers=(WorkerId(names[s.workers[0].node], 0),))
                        for s in one.stages
                    ),
                    microbatches=microbatches,
                )
            )
        plan = Plan.of_pipelines(pipelines, generation=Generation(1))
        programs = compile_programs(plan, tied=True)
        taken: dict[str, list[float]] = defaultdict(list)
        for _ in range(5):
            started = time.perf_counter()
            compile_programs(plan, tied=True)
            compiled = time.perf_counter()
            dry_run(programs, plan)
            dry_run_at = time.perf_counter()
            choose_schedule(plan, profile, tied=True)
            taken["compile"].append(compiled - started)
            taken["dry run"].append(dry_run_at - compiled)
            taken["choice of the schedule"].append(time.perf_counter() - dry_run_at)
        figures = ", ".join(f"{k} {statistics.median(v) * 1e3:.0f} ms" for k, v in taken.items())
        print(f"{count} pipelines x {stages} stages x {microbatches} micro-batches: {figures}")


# ---- measured


def job(microbatches: int, steps: int) -> JobSpec:
    return JobSpec(
        name="schedules",
        model=ModelSpec(layers=BLOCKS, hidden=192, heads=4, sequence_length=128),
        data=DataSpec(text=(TEXT,)),
        training=TrainingSpec(steps=steps, global_batch=2 * microbatches, microbatch=2),
    )


def measured_layers(spec: JobSpec) -> tuple[LayerProfile, ...]:
    """Measure the layers. Runs in a process of its own."""
    import torch

    from oobleck.worker.profiling.measure_layers import measure_layers

    torch.set_num_threads(1)
    found = measure_layers(spec, torch.device("cpu"), "cpu", lambda: None)
    profile, _ = assemble_profile(spec, [found], [], gpus_per_node=1, memory_bytes=1 << 40)
    return profile.layers


def measured_profile(spec: JobSpec) -> Profile:
    """Return a profile of the least times, over several processes that measure two at a time."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(measured_layers, [spec] * PROFILES))
    guess = estimate_profile(spec, gpus_per_node=1, memory_per_worker_bytes=1 << 40)
    return replace(guess, layers=tuple(least(same) for same in zip(*found, strict=True)))


def least(same: Sequence[LayerProfile]) -> LayerProfile:
    def of(name: str) -> dict[int, float]:
        return {1: min(getattr(layer, name)[1] for layer in same)}

    return replace(
        same[0],
        forward_s=of("forward_s"),
        backward_s=of("backward_s"),
        backward_input_s=of("backward_input_s"),
        update_s=of("update_s"),
    )


def measured(rounds: int, steps: int) -> None:
    print(f"\n{'micro-batches':>13}  {'schedule':<9}{'simulated':>10}{'fastest':>10}{'median':>10}"
          f"{'fastest / simulated':>21}{'to 1f1b':>9}{'simulated':>11}")  # fmt: skip
    director = engine()
    with director.WarmWorkers() as warm:
        for microbatches in MICROBATCHES:
            spec = job(microbatches, 10**6)
            profile = measured_profile(spec)
            found = measured_steps(director, warm, spec, rounds, steps)
            predicted = {
                schedule: step_s(found.plan, schedule, spec, profile) for schedule in SCHEDULES
            }
            for schedule in SCHEDULES:
                least_s = min(min(some) for some in found.seconds[schedule])
                ratio = statistics.median(
                    statistics.median(one) / statistics.median(other)
                    for one, other in zip(
                        found.seconds[schedule], found.seconds["1f1b"], strict=True
                    )
                )
                median_s = statistics.median(s for some in found.seconds[schedule] for s in some)
                print(
                    f"{microbatches:>13}  {schedule:<9}{predicted[schedule] * 1e3:>7.1f} ms"
                    f"{least_s * 1e3:>7.1f} ms{median_s * 1e3:>7.1f} ms"
                    f"{least_s / predicted[schedule]:>21.2f}{ratio:>9.3f}"
                    f"{predicted[schedule] / predicted['1f1b']:>11.3f}",
                    flush=True,
                )


@dataclass(frozen=True, kw_only=True)
class Found:
    plan: Plan
    #: Seconds of steps, by schedule and round.
    seconds: dict[Schedule, list[list[float]]]


def measured_steps(director: Any, warm: Any, spec: JobSpec, rounds: int, steps: int) -> Found:
    cut = [[("a", 1 + BLOCKS // 2), ("b", BLOCKS // 2 + 1)]]
    base: Plan = director.make_plan(1, cut, [spec.training.microbatches])
    seconds: dict[Schedule, list[list[float]]] = defaultdict(list)
    with director.Director(warm, spec) as cluster:
        cluster.start("a", "b")
        for number in range(rounds * len(SCHEDULES)):
            schedule = SCHEDULES[number % len(SCHEDULES)]
            generation = Generation(number + 1)
            plan = replace(base, generation=generation, schedule=schedule)
            cluster.assign(plan, boundary=number > 0)

            def of_this_plan(generation: Generation = generation) -> list[float]:
                # Leave out the first step of a generation, which includes connecting.
                return [
                    max(record.step_seconds for record in records)
                    for _, records in sorted(cluster.records.items())
                    if records[0].generation == generation and len(records) == 2
                ][1:]

            cluster.wait(lambda of=of_this_plan: len(of()) >= steps, f"steps under {schedule}")
            seconds[schedule].append(of_this_plan()[:steps])
        cluster.stop()
    return Found(plan=base, seconds=seconds)


def step_s(plan: Plan, schedule: Schedule, spec: JobSpec, profile: Profile) -> float:
    return estimate_step(plan, profile, tied=spec.model.ties, schedule=schedule).step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--simulate-only", action="store_true")
    arguments = parser.parse_args()
    simulated()
    simulator_speed()
    if not arguments.simulate_only:
        measured(arguments.rounds, arguments.steps)


if __name__ == "__main__":
    main()
