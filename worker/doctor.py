"""Checks of this host's GPUs by torch: `python -m oobleck.worker.doctor CHECK DEVICE...`.

DEVICE: cpu, or cuda:N. Prints each `Finding` as a line of JSON. The caller sets a time-out, since a
call of a sick GPU may never return.
"""

import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations

import msgspec
import torch
from torch import Tensor, nn

from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.core.orders import Finding
from oobleck.core.units import format_bytes
from oobleck.planner.profile.machine import GPUS, machine_of
from oobleck.worker.data.objective import loss
from oobleck.worker.models.registry import build_layer, initialise_parameters
from oobleck.worker.runtime.device import board_name, has_queue
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.step.stage import StageRunner

#: Share of a GPU's free memory that is filled.
_TAKEN = 0.8
#: Shares of the published FLOP/s and of the published rate between GPUs.
_SLOW_PRODUCTS, _SLOW_PEERS = 0.6, 0.5
_SLOW_COPY_BYTES_PER_S = 8e9
#: Share of the speed of torch alone.
_SLOW_ENGINE = 0.8
#: Untimed and timed steps.
_WARM_UP, _TIMED = 3, 10

#: One step of training, by its number from 1.
Step = Callable[[int], None]


def memory(devices: Sequence[str]) -> Iterator[Finding]:
    """Check that memory can be allocated, holds what is written, and is freed."""
    for device in devices:
        board = torch.get_device_module(device)
        free, total = board.mem_get_info(device)
        block = torch.full((int(free * _TAKEN) // 8,), 7, dtype=torch.int64, device=device)
        right = bool((block == 7).all())
        del block
        board.empty_cache()
        yield judge_memory(device, free, total, right=right)


def judge_memory(device: str, free: int, total: int, *, right: bool) -> Finding:
    """Judge a GPU's memory. `free`, `total`: bytes; `right`: it holds what is written."""
    if not right:
        what, fix = f"{device}: memory does not hold what is written", "replace the GPU"
        return Finding(check="memory", level="fail", what=what, fix=fix)
    what = f"{device}: {format_bytes(free)} of {format_bytes(total)} are free"
    if free < 0.9 * total:
        fix = "end what else uses it (nvidia-smi), or give --memory-per-worker"
        return Finding(check="memory", level="warn", what=what, fix=fix)
    return Finding(check="memory", level="pass", what=what)


def products(devices: Sequence[str]) -> Iterator[Finding]:
    """Measure the FLOP/s of bf16 products against the table of GPUs."""
    for device in devices:
        place = torch.device(device)
        size = 8192 if has_queue(place) else 256
        left = torch.randn(size, size, dtype=torch.bfloat16, device=device)
        multiply = functools.partial(torch.matmul, left, left)
        _timed(multiply, device)
        reached = 2 * size**3 / _timed(multiply, device, times=10)
        yield judge_products(device, board_name(place), reached)


def judge_products(device: str, name: str, reached: float) -> Finding:
    """Judge the speed of products. `name`: the board's; `reached`: FLOP/s in bf16."""
    machine = machine_of(f"cuda {name}")
    what = f"{device} ({name}): {reached / 1e12:.3g} TFLOP/s in bf16"
    least = _SLOW_PRODUCTS * machine.products_share * machine.peak_flops_per_s["bf16"]
    if machine.name in GPUS and reached < least:
        what += f", where {least / 1e12:.0f} are the least of such a GPU"
        fix = "look at its clocks, heat and power (the check gpus), and for other users"
        return Finding(check="products", level="slow", what=what, fix=fix)
    return Finding(check="products", level="pass", what=what)


def copies(devices: Sequence[str]) -> Iterator[Finding]:
    """Measure copies between pinned memory and each device, which snapshots and staged messages
    need."""
    for device in devices:
        pinned = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
        on_device = torch.empty_like(pinned, device=device)
        to_device = functools.partial(on_device.copy_, pinned)
        to_host = functools.partial(pinned.copy_, on_device)
        _timed(to_device, device)
        up = pinned.numel() / _timed(to_device, device, times=4)
        down = pinned.numel() / _timed(to_host, device, times=4)
        what = f"{device}: {up / 1e9:.0f} GB/s from the host, {down / 1e9:.0f} GB/s to it"
        if min(up, down) < _SLOW_COPY_BYTES_PER_S:
            fix = "look at the width and generation of its PCIe link (nvidia-smi -q -d PCIE)"
            yield Finding(check="copies", level="slow", what=what, fix=fix)
        else:
            yield Finding(check="copies", level="pass", what=what)


def peers(devices: Sequence[str]) -> Iterator[Finding]:
    """Check whether GPUs reach each other's memory, and how fast."""
    places = [torch.device(device) for device in devices]
    board = torch.get_device_module(places[0])
    apart = [
        f"{a.index}-{b.index}"
        for a, b in permutations(places, 2)
        if not board.can_device_access_peer(a, b)
    ]
    if apart:
        what = f"no direct way between GPUs {', '.join(apart)}: messages go through the host"
        fix = "look at 'nvidia-smi topo -p2p r', and switch IOMMU and ACS off in the BIOS"
        yield Finding(check="peers", level="slow", what=what, fix=fix)
        return
    block = torch.empty(1 << 28, dtype=torch.uint8, device=devices[0])
    on_device = torch.empty_like(block, device=devices[1])
    copy = functools.partial(on_device.copy_, block)
    _timed(copy, devices[0])
    rate = block.numel() / _timed(copy, devices[0], times=8)
    yield judge_peers(board_name(places[0]), rate)


def judge_peers(name: str, rate: float) -> Finding:
    """Judge the rate between two GPUs. `name`: the boards'; `rate`: bytes per second."""
    what = f"GPUs reach each other's memory, at {rate / 1e9:.0f} GB/s"
    machine = machine_of(f"cuda {name}")
    if machine.name in GPUS and rate < _SLOW_PEERS * machine.intra_node_bytes_per_s:
        fix = "look at its NVLinks (nvidia-smi nvlink --status, nvidia-smi topo -m)"
        return Finding(check="peers", level="slow", what=what, fix=fix)
    return Finding(check="peers", level="pass", what=what)


def speed(devices: Sequence[str]) -> Iterator[Finding]:
    """Train a small model by the engine's own step, and by torch alone, on each device."""
    for device in devices:
        place = torch.device(device)
        job = job_of(place)
        own = tokens_per_s(job, engine_step(job, place), place)
        torchs = tokens_per_s(job, plain_step(job, Plain(job).to(place), place), place)
        yield judge_speed(device, own, torchs)


def judge_speed(device: str, own: float, torchs: float) -> Finding:
    """Judge the engine's speed beside that of torch alone, in tokens per second."""
    share = own / torchs
    what = f"{device}: a step trains {own:,.0f} tokens/s, {share:.2f} of torch's {torchs:,.0f}"
    if share < _SLOW_ENGINE:
        fix = "record a step of a job (oobleck timeline) and see what it waits for"
        return Finding(check="speed", level="slow", what=what, fix=fix)
    return Finding(check="speed", level="pass", what=what)


def job_of(place: torch.device) -> JobSpec:
    """Return the job for both speed tests, large enough to keep a GPU busy."""
    large = has_queue(place)
    return JobSpec(
        name="doctor",
        model=ModelSpec(
            layers=4 if large else 2,
            hidden=2048 if large else 32,
            heads=16 if large else 2,
            sequence_length=2048 if large else 16,
            tied=False,
        ),
        data=DataSpec(text=("unused",)),
        training=TrainingSpec(steps=1, global_batch=8, microbatch=1, precision="bf16"),
    )


def engine_step(job: JobSpec, place: torch.device) -> Step:
    """Return the step of a worker that has the whole model."""
    state = ModelState(job, place)
    layers = range(job.model.layer_count)
    for layer in layers:
        state.initialise(layer)
    stage = StageRunner(state, layers, job, place)
    draws = torch.Generator().manual_seed(0)

    def step(number: int) -> None:
        state.zero_gradients()
        for microbatch in range(job.training.microbatches):
            rows = RowKeys(seed=0, step=number, positions=(microbatch,))
            stage.forward(microbatch, tokens(job, draws), rows, tokens(job, draws), by_layer=False)
            stage.backward(microbatch)
        state.apply(number, scale=1.0)

    return step


class Plain(nn.Module):
    """The whole model as one module, without the engine."""

    def __init__(self, job: JobSpec) -> None:
        super().__init__()
        self._keys = RowKeys(seed=0, step=1, positions=(0,))
        self.layers = nn.ModuleList(build_layer(job.model, n) for n in range(job.model.layer_count))
        for layer in self.layers:
            initialise_parameters(layer, job.model, 0)  # type: ignore[arg-type]  # it is a Layer

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self._keys)
        return x


def plain_step(job: JobSpec, module: nn.Module, place: torch.device) -> Step:
    """Return the step of a plain loop of torch: weights in fp32, products in bf16."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    draws = torch.Generator().manual_seed(0)
    count = job.training.microbatches

    def step(number: int) -> None:
        optimizer.zero_grad(set_to_none=False)
        for _ in range(count):
            x, targets = (tokens(job, draws).to(place, non_blocking=True) for _ in range(2))
            with torch.autocast(place.type, torch.bfloat16):
                part = loss(module(x), targets) / count
            part.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()

    return step


def tokens(job: JobSpec, draws: torch.Generator) -> Tensor:
    """Draw the tokens of a micro-batch."""
    model = job.model
    assert isinstance(model, ModelSpec), "it is built in"
    shape = (job.training.microbatch, model.sequence_length)
    return torch.randint(model.vocabulary, shape, generator=draws)


def tokens_per_s(job: JobSpec, step: Step, place: torch.device) -> float:
    """Return the speed of a step, after some that are not timed."""
    for number in range(1, _WARM_UP + 1):
        step(number)
    numbers = iter(range(_WARM_UP + 1, _WARM_UP + _TIMED + 1))
    spent_s = _timed(lambda: step(next(numbers)), place, times=_TIMED)
    model = job.model
    assert isinstance(model, ModelSpec), "it is built in"
    return job.training.global_batch * model.sequence_length / spent_s


def _timed(call: Callable[[], object], device: str | torch.device, times: int = 1) -> float:
    """Return the seconds of one call."""
    place = torch.device(device)
    if has_queue(place):
        torch.accelerator.synchronize(place)
    began = time.perf_counter()
    for _ in range(times):
        call()
    if has_queue(place):
        torch.accelerator.synchronize(place)
    return (time.perf_counter() - began) / times


CHECKS: Mapping[str, Callable[[Sequence[str]], Iterator[Finding]]] = {
    "memory": memory,
    "products": products,
    "copies": copies,
    "peers": peers,
    "speed": speed,
}


def main() -> None:
    """Run the check that the command line names."""
    name, *devices = sys.argv[1:]
    for finding in CHECKS[name](devices):
        sys.stdout.write(msgspec.json.encode(finding).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
