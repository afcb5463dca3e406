"""Checks of two processes that share a job's work: many groups beside each other, and replicas that
must stay equal to the bit; and what torch's own data parallelism reaches, to compare with."""

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from oobleck.core.finding import Finding
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.core.units import format_bytes
from oobleck.planner.profile.memory import GROUP_CTAS, sum_bytes
from oobleck.worker.data.objective import loss
from oobleck.worker.doctor.pair import SMALL, pair
from oobleck.worker.models.initial import initialise_parameters
from oobleck.worker.models.registry import build_layer
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.step.stage import StageRunner

#: As many as workers of a large plan are in.
_GROUPS = 20
_STEPS = 20
#: Untimed and timed steps of torch's data parallelism.
_WARM_UP, _TIMED = 3, 10
#: Of a group beyond what plans count.
_MORE = 1.5
_CONNECT_S = 15.0


def groups(devices: Sequence[str]) -> Iterator[Finding]:
    """Check that two processes connect many groups at once, what these take, and that all of it
    comes back."""
    words, codes = pair("groups", devices)
    if codes != [0, 0]:
        what = f"{_GROUPS} groups of two cannot be used beside each other: {words or 'they hang'}"
        fix = "see NCCL_DEBUG=INFO; a job can do without NCCL: resources: {transport: tcp}"
        yield Finding(check="groups", level="fail", what=what, fix=fix)
        return
    connect_s, taken, left, threads, abort_s = words.split()
    yield of_groups(float(connect_s), int(taken), int(left), int(threads), float(abort_s))


def of_groups(connect_s: float, taken: int, left: int, threads: int, abort_s: float) -> Finding:
    """`taken`: bytes of a GPU that all groups took; `left`, `threads`: bytes and threads that are
    still there after their aborts."""
    each = taken // _GROUPS
    what = (
        f"{_GROUPS} groups connect in {connect_s:.1f} s and take {format_bytes(each)} each; all "
        f"are aborted in {abort_s:.2f} s"
    )
    if left > taken // 2 or threads > _GROUPS // 2:
        what += f", but {format_bytes(left)} and {threads} threads of theirs stay"
        fix = "every loss would leave as much: update NCCL and the driver"
        return Finding(check="groups", level="fail", what=what, fix=fix)
    if each > _MORE * sum_bytes():
        what += f", where plans count {format_bytes(sum_bytes())}"
        fix = "leave that more of the GPU free: give agents --memory-per-worker"
        return Finding(check="groups", level="warn", what=what, fix=fix)
    if connect_s > _CONNECT_S:
        fix = "every recovery waits for that: look at NCCL_DEBUG=INFO and at the network's names"
        return Finding(check="groups", level="slow", what=what, fix=fix)
    return Finding(check="groups", level="pass", what=what)


def connect_many(place: torch.device, rank: int, folder: Path, connect_s: float) -> str:
    """Seconds until all were used, bytes that they take, bytes and threads that stay after their
    abort, and seconds of that."""
    on_gpu = place.type == "cuda"
    threads, free = _threads(), _free(place)
    began = time.monotonic()
    made = [
        dist.new_group([0, 1], pg_options=_options() if on_gpu else None) for _ in range(_GROUPS)
    ]
    numbers = [torch.ones(SMALL, device=place) for _ in made]
    for group, one in zip(made, numbers, strict=True):
        dist.all_reduce(one, group=group)
    assert all(float(one.sum()) == 2 * SMALL for one in numbers), "a sum is wrong"
    connected_s, taken = time.monotonic() - began, free - _free(place)
    dist.barrier()
    began = time.monotonic()
    ends = [threading.Thread(target=_end, args=(group, place)) for group in made]
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    del group, made
    aborted_s = time.monotonic() - began
    assert float(torch.ones(8, 8, device=place).sum()) == 64.0, "the device computes no more"
    left, more = free - _free(place), _threads() - threads
    dist.barrier()
    return f"{connected_s} {max(0, taken)} {max(0, left)} {max(0, more)} {aborted_s}"


def _options() -> object:
    """Return the options that workers make their groups with, except that torch connects them."""
    from torch._C._distributed_c10d import ProcessGroupNCCL  # builds of torch for CPUs lack it

    options = ProcessGroupNCCL.Options()
    options.config.max_ctas = GROUP_CTAS
    return options


def _end(group: dist.ProcessGroup, place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.set_device(place)
        dist.distributed_c10d._abort_process_group(group)  # not public
    else:
        dist.destroy_process_group(group)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _free(place: torch.device) -> int:
    if place.type != "cuda":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(place)[0]


def replicas(devices: Sequence[str]) -> Iterator[Finding]:
    """Check that two replicas, each with samples of its own, have the same bits after some
    steps."""
    words, codes = pair("replicas", devices)
    yield of_replicas(words, codes == [0, 0])


def of_replicas(words: str, ended: bool) -> Finding:
    """`words`: what `train_alike` said."""
    if not ended:
        what = f"two replicas do not train: {words or 'they hang'}"
        fix = "look at what the checks sums and products say"
        return Finding(check="replicas", level="fail", what=what, fix=fix)
    if words != "equal":
        what = f"after {_STEPS} steps two replicas differ in layers {words}"
        fix = "sums or updates are not the same on both GPUs: do not train on them"
        return Finding(check="replicas", level="fail", what=what, fix=fix)
    what = f"two replicas are the same to the bit after {_STEPS} steps"
    return Finding(check="replicas", level="pass", what=what)


def train_alike(place: torch.device, rank: int, folder: Path, connect_s: float) -> str:
    """The layers whose weights or moments differ at the end; `equal`: there are none."""
    job = job_of(place)
    state = ModelState(job, place)
    layers = range(job.model.layer_count)
    for layer in layers:
        state.initialise(layer)
    stage = StageRunner(state, layers, job, place)
    rows = torch.Generator().manual_seed(rank)
    for step in range(1, _STEPS + 1):
        state.zero_gradients()
        x, targets = (_tokens(job, rows) for _ in range(2))
        keys = RowKeys(seed=0, step=step, positions=(rank,))
        stage.forward(0, x, keys, targets)
        stage.backward(0)
        for layer in layers:
            dist.all_reduce(state.layers[layer].gradient)
        state.apply(step, scale=0.5)
    digests = [
        hashlib.sha256(state.snapshot(layer).numpy().data.cast("B")).digest() for layer in layers
    ]
    own = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).to(place)
    both = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(both, own)
    differ = (both[0] != both[1]).view(len(layers), -1).any(1).tolist()
    return ", ".join(str(n) for n, one in zip(layers, differ, strict=True) if one) or "equal"


def train_by_ddp(place: torch.device, rank: int, folder: Path, connect_s: float) -> str:
    """Tokens per second of both together, by torch's DistributedDataParallel."""
    job = job_of(place)
    model, training = job.model, job.training
    assert isinstance(model, ModelSpec), "it is built in"
    module: nn.Module = _Layers(job).to(place)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=place.type == "cuda")
    module = DistributedDataParallel(module, gradient_as_bucket_view=True)
    rows = torch.Generator().manual_seed(rank)
    micro = training.microbatches // 2
    began = 0.0
    for step in range(_WARM_UP + _TIMED):
        if step == _WARM_UP:
            dist.barrier()
            began = _now(place)
        optimizer.zero_grad(set_to_none=False)
        for number in range(micro):
            x, targets = (_tokens(job, rows).to(place) for _ in range(2))
            module.require_backward_grad_sync = number == micro - 1
            part = loss(module(x), targets) / micro
            part.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
    spent_s = _now(place) - began
    tokens = _TIMED * training.global_batch * model.sequence_length
    dist.barrier()
    return str(tokens / spent_s)


class _Layers(nn.Module):
    """The whole model as one module of one argument."""

    def __init__(self, job: JobSpec) -> None:
        super().__init__()
        self._keys = RowKeys(seed=0, step=1, positions=tuple(range(job.training.microbatch)))
        self.layers = nn.ModuleList(build_layer(job.model, n) for n in range(job.model.layer_count))
        for layer in self.layers:
            initialise_parameters(layer, job.model, 0)  # type: ignore[arg-type]  # it is a Layer

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self._keys)
        return x


def _now(place: torch.device) -> float:
    if place.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _tokens(job: JobSpec, rows: torch.Generator) -> Tensor:
    model = job.model
    assert isinstance(model, ModelSpec), "it is built in"
    shape = (job.training.microbatch, model.sequence_length)
    return torch.randint(model.vocabulary, shape, generator=rows)


def job_of(place: torch.device) -> JobSpec:
    """Return the job that both train: large enough for a GPU to have something to do."""
    large = place.type == "cuda"
    return JobSpec(
        name="doctor",
        model=ModelSpec(
            layers=8 if large else 2,
            hidden=1024 if large else 32,
            heads=16 if large else 2,
            sequence_length=1024 if large else 16,
            tied=False,
        ),
        data=DataSpec(text=("unused",)),
        training=TrainingSpec(steps=_STEPS, global_batch=16, microbatch=1),
    )
