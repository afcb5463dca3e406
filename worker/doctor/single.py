"""Checks of one device at a time. Of several, `memory`, `products` and `copies` try each, `forks`
deals them out, and `killed` and `waits` try the first."""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from oobleck.core.finding import Finding
from oobleck.core.units import format_bytes
from oobleck.host.detection import Detection
from oobleck.planner.profile.machine import GPUS, machine_of

#: Forked at once, as an agent does for a node of so many workers.
_FORKS = 4
_FREE_S = 5.0
#: For the memory of a killed process; the host is told to be sick after that.
FREED_S = 30.0
_KILLED_S = 1.0
#: Of what the table of GPUs says: below it something is wrong.
_SLOW = 0.6
#: Of a board's memory that is taken and given back.
_TAKEN = 0.8
_DRIVER = "/dev/nvidia"


def forks(devices: Sequence[str]) -> Iterator[Finding]:
    """Check that workers can be forked: what they are forked from has one thread and no driver
    open, and each child computes soon."""
    import oobleck.worker.warm  # noqa: F401  # as the warm process does

    threads = len(os.listdir("/proc/self/task"))
    opened = [target for target in map(_target, Path("/proc/self/fd").iterdir()) if target]
    if threads > 1 or opened:
        what = f"the warm process has {threads} threads and {', '.join(opened) or 'no driver'} open"
        fix = "find the library that does that at its import (py-spy dump), and update it"
        yield Finding(check="forks", level="fail", what=what, fix=fix)
        return
    began = time.monotonic()
    children = [_forked(devices[number % len(devices)]) for number in range(_FORKS)]
    failed = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(failed):
        what, fix = f"forked workers end with {failed}", _by_hand("forks", devices)
        yield Finding(check="forks", level="fail", what=what, fix=fix)
    else:
        yield of_forks(time.monotonic() - began, on_gpu=devices[0] != "cpu")


def of_forks(spent_s: float, *, on_gpu: bool) -> Finding:
    """`spent_s`: until all of them have computed something."""
    what = f"{_FORKS} workers are forked at once and compute after {spent_s:.1f} s"
    grace_s = Detection().gpu_grace_s
    if on_gpu and spent_s > grace_s:
        what += f", where a loss waits {grace_s:g} s for a new process"
        fix = "each becomes a plan without it and a join; nvidia-smi -pm 1 keeps the driver ready"
        return Finding(check="forks", level="slow", what=what, fix=fix)
    return Finding(check="forks", level="pass", what=what)


def _target(descriptor: Path) -> str:
    """Return the file that `descriptor` has open if it is the driver's; empty: it is another
    one's."""
    try:
        target = os.readlink(descriptor)
    except OSError:  # closed meanwhile
        return ""
    return target if target.startswith(_DRIVER) else ""


def _forked(device: str) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:
        ones = torch.ones(64, 64, device=device)
        status = 0 if float((ones @ ones).sum()) == 64.0**3 else 2
    finally:
        os._exit(status)


def memory(devices: Sequence[str]) -> Iterator[Finding]:
    """Check that memory can be taken, holds what is written, and comes back."""
    for device in devices:
        free, total = torch.cuda.mem_get_info(device)
        taken = int(free * _TAKEN)
        block = torch.full((taken // 8,), 7, dtype=torch.int64, device=device)
        right = bool((block == 7).all())
        del block
        torch.cuda.empty_cache()
        yield of_memory(device, free, total, right=right)


def of_memory(device: str, free: int, total: int, *, right: bool) -> Finding:
    """`free`, `total`: bytes; `right`: they hold what is written."""
    if not right:
        what, fix = f"{device}: memory does not hold what is written", "replace the GPU"
        return Finding(check="memory", level="fail", what=what, fix=fix)
    what = f"{device}: {format_bytes(free)} of {format_bytes(total)} are free"
    if free < 0.9 * total:
        fix = "end what else uses it (nvidia-smi), or give --memory-per-worker"
        return Finding(check="memory", level="warn", what=what, fix=fix)
    return Finding(check="memory", level="pass", what=what)


def killed(devices: Sequence[str]) -> Iterator[Finding]:
    """Measure how soon the memory of a killed process is free."""
    device = devices[0]
    code = (
        "import sys, torch; d = sys.argv[1]; n = int(torch.cuda.mem_get_info(d)[0] * 0.5); "
        "t = torch.empty(n, dtype=torch.uint8, device=d); print('taken', n, flush=True); "
        "sys.stdin.read()"
    )

    def free() -> int:
        return torch.cuda.mem_get_info(device)[0]

    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", code, device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    line = ""
    for line in holder.stdout:
        if line.startswith("taken "):
            break
    taken = int(line.split()[1]) if line.startswith("taken ") else 0
    held = free()
    holder.kill()
    freed_s = freed_after(free, held + taken // 2) if taken else None
    with suppress(subprocess.TimeoutExpired):  # a driver may hold it
        holder.wait(_KILLED_S)
    holder.stdin.close()
    holder.stdout.close()
    yield of_killed(taken, freed_s, line.strip())


def freed_after(
    free: Callable[[], int],
    wanted: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> float | None:
    """Seconds until so many bytes are free; None: they are not within `FREED_S`."""
    began = clock()
    while free() < wanted:
        if clock() - began > FREED_S:
            return None
        sleep(0.01)
    return clock() - began


def of_killed(taken: int, freed_s: float | None, said: str) -> Finding:
    """`taken`: bytes; `said`: by whom they were to be taken."""
    if not taken:
        what = f"no process can hold memory: {said or 'it says nothing'}"
        fix = "end what else uses the GPU (nvidia-smi)"
        return Finding(check="killed", level="fail", what=what, fix=fix)
    if freed_s is None:
        what = f"of {format_bytes(taken)} of a killed process half are not free in {FREED_S:.0f} s"
        fix = "see whether it ends (ps: state D), or others took them (nvidia-smi)"
        return Finding(check="killed", level="fail", what=what, fix=fix)
    what = f"memory of a killed process is free after {freed_s:.1f} s"
    if freed_s > _FREE_S:
        fix = "recoveries wait for that: update the driver"
        return Finding(check="killed", level="slow", what=what, fix=fix)
    return Finding(check="killed", level="pass", what=what)


def _by_hand(check: str, devices: Sequence[str]) -> str:
    command = " ".join(["python -m oobleck.worker.doctor", check, *devices])
    return f"run '{command}' and see what it prints"


def products(devices: Sequence[str]) -> Iterator[Finding]:
    """Measure how many bf16 FLOP/s products reach, against what such a GPU should."""
    for device in devices:
        on_gpu = device != "cpu"
        size = 8192 if on_gpu else 256
        left = torch.randn(size, size, dtype=torch.bfloat16, device=device)
        multiply = functools.partial(torch.matmul, left, left)
        _timed(multiply, on_gpu)
        reached = 2 * size**3 / _timed(multiply, on_gpu, times=10)
        name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
        yield of_products(device, name, reached)


def of_products(device: str, name: str, reached: float) -> Finding:
    """`name`: of the board; `reached`: FLOP/s in bf16."""
    machine = machine_of(f"cuda {name}")
    what = f"{device} ({name}): {reached / 1e12:.3g} TFLOP/s in bf16"
    least = _SLOW * machine.products_share * machine.peak_flops_per_s["bf16"]
    if machine.name in GPUS and reached < least:
        what += f", where {least / 1e12:.0f} are the least of such a GPU"
        fix = "look at its clocks, heat and power (the check gpus), and for other users"
        return Finding(check="products", level="slow", what=what, fix=fix)
    return Finding(check="products", level="pass", what=what)


def _timed(call: Callable[[], object], on_gpu: bool, times: int = 1) -> float:
    """Seconds of one call."""
    if on_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        call()
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def copies(devices: Sequence[str]) -> Iterator[Finding]:
    """Rates of pinned memory to the device and back, which snapshots and staged messages take."""
    for device in devices:
        pinned = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(pinned, device=device)
        to_device = functools.partial(there.copy_, pinned)
        to_host = functools.partial(pinned.copy_, there)
        _timed(to_device, True)
        up = pinned.numel() / _timed(to_device, True, times=4)
        down = pinned.numel() / _timed(to_host, True, times=4)
        what = f"{device}: {up / 1e9:.0f} GB/s from the host, {down / 1e9:.0f} GB/s to it"
        if min(up, down) < 8e9:
            fix = "look at the width and generation of its PCIe link (nvidia-smi -q -d PCIE)"
            yield Finding(check="copies", level="slow", what=what, fix=fix)
        else:
            yield Finding(check="copies", level="pass", what=what)


def waits(devices: Sequence[str]) -> Iterator[Finding]:
    """Report which calls wait for another stream's kernel: these must not be made while a receive
    waits for its peer. Nothing is judged: the transport is made for GPUs on which all of them
    do."""
    device = torch.device(devices[0])
    torch.cuda.set_device(device)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch does not say
    torch.empty(1 << 29, dtype=torch.uint8, device=device)  # what cudaFree gives back
    calls: dict[str, Callable[[], object]] = {
        "first use of a kernel": lambda: torch.special.zeta(
            torch.full((8,), 2.0, device=device), 1.5
        ),
        "cudaMalloc": lambda: torch.empty(1 << 28, dtype=torch.uint8, device=device),
        "cudaHostAlloc": lambda: torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True),
        "cudaFree": torch.cuda.empty_cache,
    }
    torch.cuda.synchronize()
    waiting = []
    for name, call in calls.items():
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]  # half a second
        began = time.perf_counter()
        call()
        if time.perf_counter() - began > 0.2:
            waiting.append(name)
        torch.cuda.synchronize()
    what = f"while a kernel runs, these wait: {', '.join(waiting) or 'none of those tried'}"
    yield Finding(check="waits", level="pass", what=what)
