"""A worker's step in this process beside plain loops of torch with the same large model: tokens per
second, share of the peak, time of the host, memory."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from oobleck.core.instructions import LayerPart
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, Precision, TrainingSpec
from oobleck.core.orders import Finding
from oobleck.core.units import format_bytes
from oobleck.planner.profile.estimate import flops_per_token
from oobleck.planner.profile.machine import GPUS, machine_of
from oobleck.worker.data.objective import loss
from oobleck.worker.doctor import Step, tokens
from oobleck.worker.models.registry import build_layer
from oobleck.worker.runtime.device import board_name, has_queue
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.step.stage import StageRunner

#: Most blocks of the model, the memory of each in training, and that of everything else.
_BLOCKS, _BLOCK_BYTES, _ELSE_BYTES = 8, 8 << 30, 10 << 30
_WARM_UP, _TIMED = 2, 4
_SPREAD = 0.02
#: Share of torch's speed with the same kinds of weights.
_SLOW = 0.8

#: Name and maker of a contender's step.
Contender = tuple[str, Callable[[JobSpec, torch.device], Step]]


def step(devices: Sequence[str]) -> Iterator[Finding]:
    """Measure a worker's step beside loops of torch: as a job trains, in bf16 alone, and compiled
    block by block."""
    place = torch.device(devices[0])
    job = job_of(place)
    reached: dict[str, float] = {}
    for name, make in contenders(compiled=has_queue(place)):
        try:
            figures = measure(job, make(job, place), place)
        except (RuntimeError, ValueError) as error:
            what = f"{name}: {type(error).__name__}: {error}".partition("\n")[0]
            fix = "for want of memory, end what else uses the GPU (nvidia-smi)"
            yield Finding(check="step", level="warn", what=what, fix=fix)
        else:
            reached[name] = figures["tokens_per_s"]
            yield described(name, board_name(place), figures)
        _clear(place)
    if {"engine", "torch"} <= reached.keys():
        yield judge_shares(reached)


def job_of(place: torch.device) -> JobSpec:
    """Return the job, as large as the device has memory for."""
    large, blocks = has_queue(place), 2
    if large:
        _, total = torch.get_device_module(place).mem_get_info(place)
        blocks = max(1, min(_BLOCKS, (total - _ELSE_BYTES) // _BLOCK_BYTES))
    return JobSpec(
        name="step",
        model=ModelSpec(
            layers=blocks,
            hidden=4096 if large else 32,
            heads=32 if large else 2,
            sequence_length=4096 if large else 16,
            tied=False,
        ),
        data=DataSpec(text=("unused",)),
        training=TrainingSpec(steps=1, global_batch=8, microbatch=1, precision="bf16"),
    )


def contenders(*, compiled: bool) -> Iterator[Contender]:
    """Yield the engine and the loops of torch. `compiled`: each of them compiled, too."""
    yield "engine", engine
    yield "torch", lambda job, place: loop(job, place)
    yield "torch in bf16 alone", lambda job, place: loop(job, place, narrow=True)
    if compiled:
        yield "engine, compiled", lambda job, place: engine(_compiled(job), place)
        yield "engine, compiled, fp8", lambda job, place: engine(_compiled(job, "fp8"), place)
        yield "torch, compiled", lambda job, place: loop(job, place, compiled=True)
        yield (
            "torch in bf16 alone, compiled",
            lambda job, place: loop(job, place, narrow=True, compiled=True),
        )


def _compiled(job: JobSpec, precision: Precision = "bf16") -> JobSpec:
    return replace(job, training=replace(job.training, compile=True, precision=precision))


def engine(job: JobSpec, place: torch.device) -> Step:
    """Return the step of a worker that has the whole model, with the norm of its gradients."""
    state = ModelState(job, place)
    layers = range(job.model.layer_count)
    for layer in layers:  # drawing a job's initial weights takes long
        storage = state.allocate(layer, version=0).storage
        storage.zero_()
        storage[0].normal_(std=_SPREAD)
        state.complete(layer)
    stage = StageRunner(state, layers, job, place)
    parts = [
        part
        for layer in layers
        for part in (LayerPart(layer=layer, part="tied"), LayerPart(layer=layer, part="own"))
        if state.gradient_part(part).numel()
    ]
    draws = torch.Generator().manual_seed(0)

    def train(number: int) -> None:
        state.zero_gradients()
        for microbatch in range(job.training.microbatches):
            rows = RowKeys(seed=0, step=number, positions=(microbatch,))
            x, targets = (tokens(job, draws) for _ in range(2))
            stage.forward(microbatch, x, rows, targets, by_layer=False)
            stage.backward(microbatch)
        norm = state.squared_norm(parts) ** 0.5
        state.apply(number, scale=min(1.0, 1.0 / (norm + 1e-6)))

    return train


class _Stack(nn.Module):
    """All layers of the model."""

    def __init__(self, job: JobSpec) -> None:
        super().__init__()
        self._keys = RowKeys(seed=0, step=1, positions=(0,))
        self.layers = nn.ModuleList(build_layer(job.model, n) for n in range(job.model.layer_count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self._keys)
        return x


def loop(
    job: JobSpec, place: torch.device, *, narrow: bool = False, compiled: bool = False
) -> Step:
    """Return the step of a plain loop of torch. `narrow`: weights and moments are in bf16, else in
    fp32 under autocast."""
    with place:
        module = _Stack(job)
    if narrow:
        module.bfloat16()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=_SPREAD)
    if compiled:
        for layer in module.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    draws = torch.Generator().manual_seed(0)
    count = job.training.microbatches

    def train(number: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        for _ in range(count):
            x, targets = (tokens(job, draws).to(place, non_blocking=True) for _ in range(2))
            with torch.autocast(place.type, torch.bfloat16, enabled=not narrow):
                part = loss(module(x), targets) / count
            part.backward()  # type: ignore[no-untyped-call]  # torch's
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()

    return train


def measure(job: JobSpec, train: Step, place: torch.device) -> Mapping[str, float]:
    """Return figures of a step, after some that are not timed."""
    board = torch.get_device_module(place)
    queued = has_queue(place)
    if queued:
        board.reset_peak_memory_stats(place)
    began = host_s = 0.0
    for number in range(1, _WARM_UP + _TIMED + 1):
        if number == _WARM_UP + 1:
            board.synchronize(place)
            began, host_s = time.perf_counter(), 0.0
        asked = time.perf_counter()
        train(number)
        host_s += time.perf_counter() - asked
    board.synchronize(place)
    step_s = (time.perf_counter() - began) / _TIMED
    model = job.model
    assert isinstance(model, ModelSpec), "it is built in"
    tokens_per_s = job.training.global_batch * model.sequence_length / step_s
    return {
        "tokens_per_s": tokens_per_s,
        "flops_per_s": tokens_per_s * flops_per_token(job),
        "step_s": step_s,
        "host_s": host_s / _TIMED,
        "peak_bytes": float(board.max_memory_allocated(place)) if queued else 0.0,
        "reserved_bytes": float(board.max_memory_reserved(place)) if queued else 0.0,
    }


def described(name: str, board: str, figures: Mapping[str, float]) -> Finding:
    """Report a contender. `board`: the board's name."""
    machine = machine_of(f"cuda {board}")
    share = ""
    if machine.name in GPUS:
        mfu = figures["flops_per_s"] / machine.peak_flops_per_s["bf16"]
        figures = {**figures, "mfu": mfu}
        share = f" ({100 * mfu:.0f}% MFU)"
    what = (
        f"{name}: {figures['tokens_per_s']:,.0f} tokens/s{share}, {figures['step_s']:.3f} s a step "
        f"and {figures['host_s']:.3f} s of the host; {format_bytes(int(figures['peak_bytes']))}"
    )
    return Finding(check="step", level="pass", what=what, figures=figures)


def judge_shares(reached: Mapping[str, float]) -> Finding:
    """Judge the engine's tokens per second beside those of each loop of torch, a compiled engine's
    beside compiled loops."""
    own = {True: reached.get("engine, compiled", reached["engine"]), False: reached["engine"]}
    shares = {
        name: own[name.endswith("compiled")] / other
        for name, other in reached.items()
        if name.startswith("torch")
    }
    each = ", ".join(f"{share:.2f} of {name}" for name, share in shares.items())
    what = f"the engine's step has the speed of {each}"
    if shares["torch"] < _SLOW:
        fix = "record a step of a job (oobleck timeline) and see what it waits for"
        return Finding(check="step", level="slow", what=what, fix=fix, figures=shares)
    return Finding(check="step", level="pass", what=what, figures=shares)


def _clear(place: torch.device) -> None:
    gc.collect()
    if has_queue(place):
        torch.get_device_module(place).empty_cache()
