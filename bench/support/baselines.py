"""Training with torch alone, as contenders of `bench.throughput`.

One process, DDP, FSDP and pipelining.

The layers and the optimizer are the engine's own; everything around them (the loss, schedules,
messages, gradient sums, autocast where the job is in bf16) is torch's. Each contender's processes
live for the whole benchmark and sleep in a pipe while others have their turn. Batches are drawn
once and kept in memory, gradients are not clipped and nothing is logged: what a step does is what
it must do.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import (
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from bench.support.turns import Turn, footprint
from oobleck.core.job.spec import JobSpec
from oobleck.worker.models.registry import build_layer, initialise_parameters
from oobleck.worker.runtime.random import RowKeys

Kind = Literal[
    "1f1b",
    "interleaved zero-bubble",
    "zbv zero-bubble",
    "data parallel",
    "fully sharded",
    "fully sharded, once a step",
    "one process",
]
Step = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """One way of torch to train `job`."""

    kind: Kind
    job: JobSpec
    #: Number of layers of each stage; zero-bubble schedules have two stages per process.
    cut: tuple[int, ...]
    replicas: int
    #: How pipelined replicas sum their gradients: DDP around each stage, or one all-reduce of all
    #: gradients of a process after its last backward.
    sum_by: Literal["ddp", "all-reduce"] = "ddp"

    @property
    def per_pipeline(self) -> int:
        """Number of processes of one replica."""
        return len(self.cut) // (2 if "zero-bubble" in self.kind else 1)

    @property
    def processes(self) -> int:
        return self.replicas * self.per_pipeline


class Layers(nn.Module):
    """Some layers in a row, as one module of one argument."""

    def __init__(self, job: JobSpec, numbers: range, *, rows: int | None = None) -> None:
        """`rows`: of a micro-batch, where that is not all of it."""
        super().__init__()
        training = job.training
        self._autocasts = training.precision == "bf16"
        positions = tuple(range(training.microbatch if rows is None else rows))
        self._rows = RowKeys(seed=training.seed, step=1, positions=positions)
        self.layers = nn.ModuleList(build_layer(job.model, number) for number in numbers)
        for layer in self.layers:
            initialise_parameters(layer, job.model, training.seed)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocasts):
            for layer in self.layers:
                x = layer(x, self._rows)
        return x


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return torch's mean cross entropy, in float32 at least."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten())


def optimizer_of(job: JobSpec, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW as the engine uses it; its hyperparameters do not affect the time."""
    groups: list[dict[str, object]] = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=job.training.optimizer.lr, fused=True)


def batch(job: JobSpec, replicas: int, replica: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of one replica, int64 (B / replicas, T)."""
    shape = (job.training.global_batch // replicas, job.model.row_tokens)
    rows = torch.Generator().manual_seed(replica)
    draw = partial(torch.randint, job.model.tokens, shape, generator=rows)
    return draw(), draw()


# ---- steps


def data_parallel_step(plan: Baseline, rank: int) -> Step:
    job = plan.job
    module: nn.Module = Layers(job, range(job.model.layer_count))
    optimizer = optimizer_of(job, list(module.parameters()))
    if plan.replicas > 1:
        module = DistributedDataParallel(module, gradient_as_bucket_view=True)
    rows, targets = batch(job, plan.replicas, rank)
    size = job.training.microbatch
    pieces = list(zip(torch.split(rows, size), torch.split(targets, size), strict=True))

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        for number, (x, y) in enumerate(pieces):
            waits = plan.replicas > 1 and number < len(pieces) - 1
            with module.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
                (loss(module(x), y) / len(pieces)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def sharded_step(plan: Baseline, rank: int) -> Step:
    """Return the step of FSDP: every process has a share of each layer and some rows of each
    micro-batch. `once a step`: layers are gathered, and gradients summed, once per step."""
    job, once = plan.job, plan.kind.endswith("once a step")
    mesh = init_device_mesh("cpu", (plan.replicas,))
    module = Layers(
        job, range(job.model.layer_count), rows=job.training.microbatch // plan.replicas
    )
    for layer in module.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not once)
    fully_shard(module, mesh=mesh, reshard_after_forward=not once)
    assert isinstance(module, FSDPModule)
    optimizer = optimizer_of(job, list(module.parameters()))
    rows, targets = batch(job, plan.replicas, rank)
    size = job.training.microbatch // plan.replicas
    pieces = list(zip(torch.split(rows, size), torch.split(targets, size), strict=True))

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        for number, (x, y) in enumerate(pieces):
            if once:
                module.set_requires_gradient_sync(number == len(pieces) - 1)
                module.set_reshard_after_backward(number == len(pieces) - 1)
            (loss(module(x), y) / len(pieces)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def stages_of(plan: Baseline, position: int) -> list[int]:
    """Return the stages that process number `position` of a pipeline runs."""
    if plan.kind == "1f1b":
        return [position]
    width = plan.per_pipeline
    if plan.kind == "zbv zero-bubble":
        return [position, 2 * width - 1 - position]
    return [position, width + position]


def pipeline_step(plan: Baseline, rank: int) -> Step:
    job, width = plan.job, plan.per_pipeline
    replica, position = divmod(rank, width)
    along = [dist.new_group([r * width + p for p in range(width)]) for r in range(plan.replicas)]
    across = [dist.new_group([r * width + p for r in range(plan.replicas)]) for p in range(width)]
    ends = [sum(plan.cut[: stage + 1]) for stage in range(len(plan.cut))]
    stages, parameters = [], []
    for number in stages_of(plan, position):
        numbers = range(ends[number] - plan.cut[number], ends[number])
        module: nn.Module = Layers(job, numbers)
        parameters += list(module.parameters())
        if plan.replicas > 1 and plan.sum_by == "ddp":
            module = DistributedDataParallel(
                module, process_group=across[position], gradient_as_bucket_view=True
            )
        stages.append(
            PipelineStage(module, number, len(plan.cut), torch.device("cpu"), group=along[replica])
        )
    rows, targets = batch(job, plan.replicas, replica)
    microbatches = job.training.microbatches // plan.replicas
    optimizer = optimizer_of(job, parameters)
    schedule = (
        Schedule1F1B(stages[0], microbatches, loss)
        if plan.kind == "1f1b"
        else {
            "interleaved zero-bubble": ScheduleInterleavedZeroBubble,
            "zbv zero-bubble": ScheduleZBVZeroBubble,
        }[plan.kind](list(stages), microbatches, loss)
    )
    first = any(stage.is_first for stage in stages)
    last = any(stage.is_last for stage in stages)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        schedule.step(*[rows] * first, target=targets if last else None, return_outputs=False)
        if plan.replicas > 1 and plan.sum_by == "all-reduce":
            all_reduce_mean(parameters, across[position], plan.replicas)
        optimizer.step()

    return step


def all_reduce_mean(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, replicas: int
) -> None:
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat.div_(replicas)
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


# ---- processes


def serve(plan: Baseline, rank: int, meeting: str, pipe: Connection) -> None:
    """Serve as one process: for each number from the pipe, run a warm-up step and then so many
    steps; answer the wall and processor seconds per step."""
    os.setsid()  # a scheduling group of its own, as the engine's workers have
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=plan.processes
    )
    make = pipeline_step
    if plan.kind in ("data parallel", "one process"):
        make = data_parallel_step
    elif plan.kind.startswith("fully sharded"):
        make = sharded_step
    step = make(plan, rank)
    try:
        while True:
            count = pipe.recv()
            step()
            begun, processor = time.perf_counter(), time.process_time()
            for _ in range(count):
                step()
            processor = time.process_time() - processor
            pipe.send(((time.perf_counter() - begun) / count, processor / count))
    except EOFError:
        dist.destroy_process_group()


class TorchContender:
    """Processes of one baseline; a context manager."""

    def __init__(self, plan: Baseline) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._meeting = tempfile.TemporaryDirectory(prefix="oobleck-bench-")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(plan.processes):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(plan, rank, f"{self._meeting.name}/meet", theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def __enter__(self) -> "TorchContender":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        self._meeting.cleanup()

    def run(self, steps: int) -> Turn:
        for pipe in self._pipes:
            pipe.send(steps)
        answers: list[tuple[float, float]] = [pipe.recv() for pipe in self._pipes]
        return Turn(
            step_s=max(wall for wall, _ in answers),
            processor_s=sum(processor for _, processor in answers),
            footprint=footprint(process.pid for process in self._processes if process.pid),
        )
