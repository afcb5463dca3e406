"""Checks of a host with GPUs that need no torch: driver, health by NVML, limits, shared memory and
the environment. Must not know how findings are shown.
"""

import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from oobleck.host.device import worker_environment
from oobleck.host.finding import Finding, Level
from oobleck.host.gpu.choice import driver_version
from oobleck.host.gpu.health import hindrance, troubles
from oobleck.host.gpu.sample import GpuSample, Sample
from oobleck.host.gpu.users import described, read_sample
from oobleck.planner.units import format_bytes

#: NCCL's buffers in shared memory, for eight GPUs with many communicators.
_LEAST_SHARED = 1 << 30
_ADAPTERS = Path("/sys/class/infiniband")


def look() -> Iterator[Finding]:
    yield driver()
    yield from health(read_sample())
    yield shared_memory(Path("/dev/shm"))
    yield from locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], _ADAPTERS)
    yield from environment(os.environ)


def driver() -> Finding:
    version = driver_version()
    if version:
        return Finding(check="driver", level="pass", what=f"NVIDIA's driver {version} is loaded")
    what = "NVIDIA's driver is not loaded"
    fix = "install it (nvidia-smi must answer), and restart the host or modprobe nvidia"
    return Finding(check="driver", level="fail", what=what, fix=fix)


def health(sample: Sample) -> Iterator[Finding]:
    """Of all GPUs of the host."""
    if sample.problem:
        what = f"the health of GPUs is not known: {sample.problem}"
        fix = "with a driver and nvidia-ml-py agents drain nodes before their GPUs die"
        yield Finding(check="gpus", level="warn", what=what, fix=fix)
    for trouble in troubles(sample.gpus, sample.xids):
        what = f"GPU {trouble.bus}: {trouble.what}"
        level: Level = "fail" if trouble.sick else "warn"
        yield Finding(check="gpus", level=level, what=what, fix=trouble.fix)
    for board in sample.gpus:
        yield from _use(board)


def _use(board: GpuSample) -> Iterator[Finding]:
    where = f"GPU {board.bus} ({board.name})"
    if board.error:
        return
    if board.processes:
        what = f"{where} is used by {described(board.processes)}"
        fix = "end that, or choose other GPUs with --gpus"
        yield Finding(check="gpus", level="warn", what=what, fix=fix)
    if why := hindrance([board], ()):
        fix = "look at its cooling, power and clocks (nvidia-smi -q -d PERFORMANCE)"
        yield Finding(check="gpus", level="slow", what=f"{where} is held back: {why}", fix=fix)
    elif not board.processes:
        yield Finding(check="gpus", level="pass", what=f"{where} is well, and nobody uses it")


def shared_memory(place: Path) -> Finding:
    size = shutil.disk_usage(place).total
    what = f"{place} has {format_bytes(size)}"
    if size >= _LEAST_SHARED:
        return Finding(check="shared memory", level="pass", what=what)
    fix = f"give it {format_bytes(_LEAST_SHARED)} (docker --shm-size, or mount -o remount,size=)"
    return Finding(
        check="shared memory", level="warn", what=f"{what}, too little for NCCL", fix=fix
    )


def locked_memory(limit: int, adapters: Path) -> Iterator[Finding]:
    """`limit`: of this user, in bytes. Adapters read and write locked memory alone."""
    if not (adapters.is_dir() and os.listdir(adapters)):
        return
    if limit == resource.RLIM_INFINITY:
        what = "any amount of memory may be locked, as adapters need it"
        yield Finding(check="locked memory", level="pass", what=what)
    else:
        what = f"{format_bytes(limit)} of memory may be locked, and adapters need more"
        fix = (
            "set 'memlock unlimited' in /etc/security/limits.conf, LimitMEMLOCK=infinity in a unit"
        )
        yield Finding(check="locked memory", level="fail", what=what, fix=fix)


def environment(given: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that stand against what agents set for workers on GPUs."""
    for name, wanted in worker_environment("cuda").items():
        if name.startswith(("NCCL_", "TORCH_NCCL_", "CUDA_")) and given.get(name, wanted) != wanted:
            what = f"{name}={given[name]} stands against the {wanted} that workers need"
            fix = f"unset {name}, or know why (host/device.py says what it is for)"
            yield Finding(check="environment", level="warn", what=what, fix=fix)
