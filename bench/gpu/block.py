"""Costs of a block of a large model, measured as for a job without a profile: its share of the peak
FLOP/s, its update, its way to the host; and the memory that torch and CUDA take beside it."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.attention import SDPBackend

from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.core.orders import Finding
from oobleck.core.profile import LayerProfile
from oobleck.core.units import format_bytes
from oobleck.planner.profile.estimate import flops_per_token
from oobleck.planner.profile.machine import GPUS, machine_of
from oobleck.planner.profile.memory import GPU_CONTEXT_BYTES, MARGIN_SHARE
from oobleck.worker.checkpoint.snapshots import Ring
from oobleck.worker.profiling.measure_layers import measure_layers
from oobleck.worker.runtime.device import board_name

#: Share of the peak; a block reaches 0.4 to 0.5 on boards of the table.
_LEAST_MFU = 0.25
#: Share of the memory's published rate; an update reads and writes its state twice or more.
_LEAST_RATE = 0.2
_BLOCK = 1


def job_of(place: torch.device) -> JobSpec:
    large = place.type == "cuda"
    return JobSpec(
        name="doctor",
        model=ModelSpec(
            layers=1,
            hidden=4096 if large else 64,
            heads=32 if large else 2,
            sequence_length=4096 if large else 32,
            tied=False,
        ),
        data=DataSpec(text=("unused",)),
        training=TrainingSpec(steps=1, global_batch=2, microbatch=1, precision="bf16"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of a block."""

    flops_per_s: float
    #: Bytes of the whole state per second of an update.
    update_bytes_per_s: float
    #: Bytes per second of a checkpoint's state to host memory.
    snapshot_bytes_per_s: float


def block(devices: Sequence[str]) -> Iterator[Finding]:
    """Report a block's rates, the kernel of its attention, and memory that plans do not count."""
    for device in devices:
        place = torch.device(device)
        on_gpu = place.type == "cuda"
        name = board_name(place)
        job = job_of(place)
        found = measure_layers(job, place, device, lambda: None).kinds[_BLOCK]
        yield judge_rates(device, name, rates_of(job, found, snapshot_s(place, found.moved_bytes)))
        for shape, grouped in (("as many key heads", False), ("fewer key heads", True)):
            yield judge_attention(device, shape, kernel(place, grouped=grouped), on_gpu=on_gpu)
        if on_gpu:
            free, total = torch.cuda.mem_get_info(place)
            yield judge_reserved(
                device,
                allocated=torch.cuda.max_memory_allocated(place),
                reserved=torch.cuda.max_memory_reserved(place),
                beside=total - free - torch.cuda.memory_reserved(place),
            )


def rates_of(job: JobSpec, found: LayerProfile, snapshot_s: float) -> Rates:
    """Return the rates of a block. `found`: its costs; `snapshot_s`: seconds of its snapshot."""
    model = job.model
    assert isinstance(model, ModelSpec), "it is built in"
    larger = replace(job, model=replace(model, layers=model.layers + 1))
    more = flops_per_token(larger) - flops_per_token(job)
    tokens = job.training.microbatch * model.sequence_length
    return Rates(
        flops_per_s=more * tokens / (found.forward_s[1] + found.backward_s[1]),
        update_bytes_per_s=found.state_bytes / found.update_s[1],
        snapshot_bytes_per_s=found.moved_bytes / snapshot_s,
    )


def snapshot_s(place: torch.device, size: int) -> float:
    """Return the seconds of so many bytes through the ring of a checkpoint."""
    source = torch.zeros(1, size // 4, device=place)
    into = torch.zeros(1, size // 4)
    ring = Ring(place)
    ring.copy(source, into)
    began = time.perf_counter()
    ring.copy(source, into)
    return time.perf_counter() - began


def judge_rates(device: str, name: str, found: Rates) -> Finding:
    """Judge a block's rates. `name`: the board's."""
    machine = machine_of(f"cuda {name}")
    known = machine.name in GPUS
    mfu = found.flops_per_s / machine.peak_flops_per_s["bf16"]
    share = f", {100 * mfu:.0f}% of the peak (MFU)" if known else ""
    what = (
        f"{device} ({name}): a block trains at {found.flops_per_s / 1e12:.3g} TFLOP/s{share}; its "
        f"update passes {found.update_bytes_per_s / 1e9:.3g} GB/s of state, its way to the host "
        f"{found.snapshot_bytes_per_s / 1e9:.3g} GB/s"
    )
    memory = machine.memory_bytes_per_s
    slow_update = known and memory and found.update_bytes_per_s < _LEAST_RATE * memory
    if known and mfu < _LEAST_MFU:
        fix = "see the checks products and attention, and record a step (oobleck timeline)"
        return Finding(check="block", level="slow", what=what, fix=fix)
    if slow_update:
        fix = "see the check memory, and for other users of the GPU"
        return Finding(check="block", level="slow", what=what, fix=fix)
    return Finding(check="block", level="pass", what=what)


def kernel(place: torch.device, *, grouped: bool) -> SDPBackend:
    """Return the kernel that torch computes attention with, for heads as a large model has them."""
    draws = {"dtype": torch.bfloat16, "device": place}
    query = torch.zeros(1, 8, 256, 128, **draws)  # type: ignore[call-overload]  # of two types
    shared = query[:, :2] if grouped else query
    chosen: int = torch._fused_sdp_choice(query, shared, shared, is_causal=True, enable_gqa=grouped)
    return SDPBackend(chosen)


def judge_attention(device: str, shape: str, chosen: SDPBackend, *, on_gpu: bool) -> Finding:
    """Judge the kernel of attention."""
    what = f"{device}: attention in bf16 with {shape} is computed by {chosen.name.lower()}"
    if on_gpu and chosen == SDPBackend.MATH:
        what += ", which makes whole matrices of scores"
        fix = "use a torch that was built for this GPU; long sequences take much memory until then"
        return Finding(check="attention", level="slow", what=what, fix=fix)
    return Finding(check="attention", level="pass", what=what)


def judge_reserved(device: str, *, allocated: int, reserved: int, beside: int) -> Finding:
    """Judge memory beyond that of tensors. `allocated`, `reserved`: the most that torch has handed
    out, and held; `beside`: the rest of the board that is taken, as by CUDA."""
    what = (
        f"{device}: torch held {format_bytes(reserved)} to hand out {format_bytes(allocated)}; "
        f"{format_bytes(beside)} beside are CUDA's and others'"
    )
    if reserved - allocated > allocated // (MARGIN_SHARE - 1):
        fix = "plans leave a tenth for that: give agents a lower --memory-per-worker"
        return Finding(check="reserved", level="warn", what=what, fix=fix)
    if beside > GPU_CONTEXT_BYTES:
        what += f", where plans count {format_bytes(GPU_CONTEXT_BYTES)}"
        fix = "end what else uses the GPU (nvidia-smi), or give --memory-per-worker"
        return Finding(check="reserved", level="warn", what=what, fix=fix)
    return Finding(check="reserved", level="pass", what=what)
