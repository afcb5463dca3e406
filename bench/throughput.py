"""How fast the engine trains while nothing fails, beside what torch itself offers.

    python -m bench.throughput [--sizes small,medium] [--shapes 2x2,4x1,1x4,shared,2+3]
                               [--precision fp32|bf16|fp64] [--json FILE]
    python -m bench.throughput --planes    # what it costs to seal the links between workers
    python -m bench.throughput --own       # what it costs that a model is the user's
    python -m bench.throughput --sums      # what it costs to sum gradients in full

Everybody trains the same model on the same global batch in the same micro-batches, with one
thread per process and the same optimizer, in turns: a few steps each, round after round. In bf16
torch runs the layers under autocast. Speeds are ratios of one round's times, and of them the median
(with the range) over the rounds. The engine does more than the others in a step: it reads its
samples from files, hashes them, takes the gradient's norm and ends every step with a vote. Threads,
open files and own memory are those of the process of a contender that has most of them.

With --planes the engine is compared with itself, likewise in turns: each of its plans over links
that are sealed, and in the clear. With --own likewise: the built-in model, and the same layers as a
user brings them. With --sums: gradients are sent as they are, or rounded to bf16.

The shape `shared` is one stage that two workers share, with half of the rows of every micro-batch
each: weights are gathered and gradients summed for each micro-batch, or once a step. Torch has no
pipelines of unequal length. The shape 2+3 is held against what torch can do with as
many processes or one less.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

import torch

from bench.support.baselines import Baseline, TorchContender
from bench.support.engine import ENDLESS, ROOT, EngineContender, engine, plan_of
from bench.support.turns import Contender, Turn, saving, speed, take_turns
from oobleck.cli.jobs.own_code import with_description
from oobleck.core.job.code import Json
from oobleck.core.job.model import ModelSpec, OwnModelSpec
from oobleck.core.job.spec import DataPlane, DataSpec, JobSpec, Precision, TrainingSpec
from oobleck.core.plan import Plan

BLOCKS = 8
LAYERS = BLOCKS + 2
TEXT = str(Path(__file__).resolve().parents[1] / "LICENSE")


@dataclass(frozen=True, kw_only=True)
class Size:
    job: JobSpec
    rounds: int
    steps: int


def job(hidden: int, sequence_length: int, global_batch: int) -> JobSpec:
    return JobSpec(
        name="throughput",
        model=ModelSpec(
            layers=BLOCKS, hidden=hidden, heads=4, sequence_length=sequence_length, tied=False
        ),
        data=DataSpec(text=(TEXT,)),
        training=TrainingSpec(steps=ENDLESS, global_batch=global_batch, microbatch=2, clip=None),
    )


def in_precision(size: Size, precision: Precision) -> Size:
    training = replace(size.job.training, precision=precision)
    return replace(size, job=replace(size.job, training=training))


SIZES = {
    "small": Size(job=job(128, 128, global_batch=32), rounds=5, steps=4),
    "medium": Size(job=job(256, 256, global_batch=16), rounds=4, steps=2),
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Way to put the model on workers: our plans, and the baselines to compare them with."""

    ours: Mapping[str, Plan]
    theirs: Mapping[str, Baseline]


def shapes(job: JobSpec) -> dict[str, Shape]:
    count = job.training.microbatches
    halves = [(5, 5)] * 2
    quarters = (3, 2, 2, 3)
    eighths = (2, 1, 1, 1, 1, 1, 1, 2)

    def theirs(kind: str, cut: tuple[int, ...], replicas: int, sum_by: str = "ddp") -> Baseline:
        return Baseline(kind=kind, job=job, cut=cut, replicas=replicas, sum_by=sum_by)  # type: ignore[arg-type]

    one = theirs("one process", (LAYERS,), 1)
    pairs = theirs("1f1b", (5, 5), 2)
    pairs_summed = theirs("1f1b", (5, 5), 2, "all-reduce")
    pairs_zero = theirs("interleaved zero-bubble", quarters, 2, "all-reduce")
    return {
        "2x2": Shape(
            ours={
                "ours 1f1b": plan_of(halves, [count // 2] * 2),
                "ours zb-h1": plan_of(halves, [count // 2] * 2, "zb-h1"),
            },
            theirs={
                "one process": one,
                "torch 1f1b, ddp": pairs,
                "torch 1f1b, all-reduce": pairs_summed,
                "torch zero-bubble": pairs_zero,
            },
        ),
        "4x1": Shape(
            ours={
                "ours 1f1b": plan_of([quarters], [count]),
                "ours zb-h1": plan_of([quarters], [count], "zb-h1"),
            },
            theirs={
                "one process": one,
                "torch 1f1b": theirs("1f1b", quarters, 1),
                "torch zero-bubble": theirs("interleaved zero-bubble", eighths, 1),
            },
        ),
        "1x4": Shape(
            ours={"ours": plan_of([(LAYERS,)] * 4, [count // 4] * 4)},
            theirs={"one process": one, "torch ddp": theirs("data parallel", (LAYERS,), 4)},
        ),
        "shared": Shape(
            ours={
                "ours": plan_of([[(LAYERS, 2)]], [count]),
                "ours, once a step": plan_of([[(LAYERS, 2)]], [count], resident=True),
            },
            theirs={
                "one process": one,
                "torch fsdp": theirs("fully sharded", (LAYERS,), 2),
                "torch fsdp, once a step": theirs("fully sharded, once a step", (LAYERS,), 2),
            },
        ),
        "2+3": Shape(
            ours={"ours 1f1b": plan_of([(5, 5), (4, 3, 3)], uneven(count))},
            theirs={"one process": one, "torch 1f1b 2x2, ddp": pairs},
        ),
    }


def uneven(count: int) -> list[int]:
    """Return the micro-batches of a pipeline of two workers and of one of three."""
    short = round(count * 2 / 5)
    return [short, count - short]


@contextlib.contextmanager
def contenders(shape: Shape, job: JobSpec) -> Iterator[dict[str, Contender]]:
    with contextlib.ExitStack() as stack:
        warm = stack.enter_context(engine().WarmWorkers())
        entered: dict[str, Contender] = {
            name: stack.enter_context(EngineContender(warm, job, plan))
            for name, plan in shape.ours.items()
        }
        for name, baseline in shape.theirs.items():
            entered[name] = stack.enter_context(TorchContender(baseline))
        yield entered


def planes(job: JobSpec) -> dict[str, JobSpec]:
    """Return the job with sealed links, and with open ones."""
    names: tuple[DataPlane, DataPlane] = ("sealed", "clear")
    return {name: replace(job, data_plane=name) for name in names}


def owners(job: JobSpec) -> dict[str, JobSpec]:
    """Return the job with the model as a user brings it, and with the built-in one."""
    model = job.model
    assert isinstance(model, ModelSpec)
    own = OwnModelSpec(
        python="bench.support.own_gpt:gpt",
        path=str(ROOT),
        arguments=Json(
            json.dumps(
                {
                    "layers": model.layers,
                    "hidden": model.hidden,
                    "heads": model.heads,
                    "sequence_length": model.sequence_length,
                }
            )
        ),
        sequence_length=model.sequence_length,
    )
    return {"own": with_description(replace(job, model=own)), "built-in": job}


def sums(job: JobSpec) -> dict[str, JobSpec]:
    """Return the job with gradients sent in full, and rounded to half of the bytes."""
    rounded = replace(job.training, gradient_sums="bf16")
    return {"full": job, "bf16": replace(job, training=rounded)}


@contextlib.contextmanager
def pairs(shape: Shape, jobs: Mapping[str, JobSpec]) -> Iterator[dict[str, Contender]]:
    """Yield each of our plans twice, with one job and with the other."""
    with contextlib.ExitStack() as stack:
        warm = stack.enter_context(engine().WarmWorkers())
        yield {
            f"{name}, {kind}": stack.enter_context(EngineContender(warm, job, plan))
            for name, plan in shape.ours.items()
            for kind, job in jobs.items()
        }


# ---- the report


def report_pairs(
    shape: Shape, kinds: Sequence[str], turns: Mapping[str, list[Turn]]
) -> list[dict[str, object]]:
    """Print the cost of the first kind beside the second for each plan; return the rows as data."""
    rows: list[dict[str, object]] = []
    for name in shape.ours:
        first, second = (turns[f"{name}, {kind}"] for kind in kinds)
        longer, processor = speed(second, first), saving(second, first)
        steps_ms = [
            statistics.median(turn.step_s for turn in each) * 1e3 for each in (first, second)
        ]
        print(
            f"  {name:<24}{steps_ms[0]:>7.1f} ms {kinds[0]}{steps_ms[1]:>8.1f} ms {kinds[1]}"
            f"{longer.median:>9.3f}x ({longer.low:.3f}-{longer.high:.3f}; {processor:.3f})",
            flush=True,
        )
        rows.append(
            {
                "contender": name,
                kinds[0]: [asdict(turn) for turn in first],
                kinds[1]: [asdict(turn) for turn in second],
                "longer": {**asdict(longer), "by_processor_time": processor},
            }
        )
    return rows


def report(shape: Shape, turns: Mapping[str, list[Turn]]) -> list[dict[str, object]]:
    """Print the table of one shape; return its rows as data."""
    rows: list[dict[str, object]] = []
    reference = turns["one process"]
    print(
        f"  {'':<24}{'step':>10}{'processor':>11}{'threads':>9}{'files':>7}{'memory':>9}"
        f"{'to 1 process':>14}" + "".join(f"{name + ' is':>26}" for name in shape.ours)
    )
    for name, mine in turns.items():
        step_s = statistics.median(turn.step_s for turn in mine)
        processor_s = statistics.median(turn.processor_s for turn in mine)
        has = mine[-1].footprint
        line = f"  {name:<24}{step_s * 1e3:>7.0f} ms{processor_s * 1e3:>8.0f} ms"
        line += f"{has.threads:>9}{has.files:>7}{has.own_bytes / 1e6:>6.0f} MB"
        line += f"{speed(mine, reference).median:>13.2f}x"
        row: dict[str, object] = {
            "contender": name,
            "step_s": step_s,
            "processor_s": processor_s,
            "rounds": [asdict(turn) for turn in mine],
        }
        for ours in shape.ours:
            if name not in shape.ours:
                found, processor = speed(turns[ours], mine), saving(turns[ours], mine)
                line += f"{found.median:>7.2f}x ({found.low:.2f}-{found.high:.2f}; {processor:.2f})"
                row[f"speed of {ours}"] = {**asdict(found), "by_processor_time": processor}
        print(line, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--shapes", default="2x2,4x1,1x4,shared,2+3")
    parser.add_argument("--precision", choices=get_args(Precision), default="fp32")
    parser.add_argument("--planes", action="store_true", help="sealed links against open ones")
    parser.add_argument("--own", action="store_true", help="a user's model against the built-in")
    parser.add_argument("--sums", action="store_true", help="gradients in full against bf16")
    parser.add_argument("--rounds", type=int, help="instead of what each size has")
    parser.add_argument("--steps", type=int, help="of a turn, instead of what each size has")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    results = []
    for size_name in arguments.sizes.split(","):
        size = in_precision(SIZES[size_name], arguments.precision)
        model, training = size.job.model, size.job.training
        assert isinstance(model, ModelSpec)
        print(
            f"{size_name}: hidden {model.hidden}, {model.layers} blocks, sequences of "
            f"{model.sequence_length}, global batch {training.global_batch} in micro-batches of "
            f"{training.microbatch}, {training.precision}"
        )
        for shape_name in arguments.shapes.split(","):
            shape = shapes(size.job)[shape_name]
            jobs = planes(size.job) if arguments.planes else {}
            jobs = owners(size.job) if arguments.own else jobs
            jobs = sums(size.job) if arguments.sums else jobs
            with pairs(shape, jobs) if jobs else contenders(shape, size.job) as entered:
                turns = take_turns(
                    entered,
                    rounds=arguments.rounds or size.rounds,
                    steps=arguments.steps or size.steps,
                )
            print(f" {shape_name}")
            rows = report_pairs(shape, list(jobs), turns) if jobs else report(shape, turns)
            results.append({"size": size_name, "shape": shape_name, "contenders": rows})
    if arguments.planes or arguments.own or arguments.sums:
        print("x (range; by processor time): how many times as long the first takes")
    else:
        print(
            "x (range; by processor time): how many times as fast as the line's, median over rounds"
        )
    if arguments.json:
        machine = {"cores": os.cpu_count(), "torch": torch.__version__, "python": sys.version}
        arguments.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
