"""Checks of a host with GPUs that need no torch.

They cover driver, health by NVML and by the kernel's log, paths between GPUs, limits, shared memory
and the environment. Must not know how findings are shown.
"""

import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from oobleck.core.orders import About, Finding, Level
from oobleck.core.units import format_bytes
from oobleck.host.gpu.devices import driver_version, worker_environment
from oobleck.host.gpu.health import hindrance, troubles
from oobleck.host.gpu.nvml import Peers, read_peers
from oobleck.host.gpu.sample import GpuSample, Sample, described, read_sample, read_xids

#: Size of NCCL's buffers in shared memory, for eight GPUs with many communicators.
_LEAST_SHARED = 1 << 30
ADAPTERS = Path("/sys/class/infiniband")


def look() -> Iterator[Finding]:
    """Examine this host's GPUs before a later check by torch."""
    yield driver()
    yield from health(read_sample())
    yield shared_memory(Path("/dev/shm"))
    yield from locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], ADAPTERS)
    yield from environment(os.environ)


def is_here(about: About) -> bool:
    """Return whether there are GPUs to examine."""
    return about.device == "cuda" or driver_version() != ""


def look_for_agent(about: About, *, gently: bool) -> Iterator[Finding]:
    """Examine the GPUs of this host's agent. `gently`: its workers are using them."""
    if about.device == "cuda":
        yield driver()
        yield shared_memory(Path("/dev/shm"))
        yield from environment(about.variables)
    sample = read_sample()
    # Errors reported before any process listened are only in the kernel's log.
    logged = read_xids()
    sample = msgspec.structs.replace(sample, xids=tuple(dict.fromkeys((*sample.xids, *logged))))
    yield from health(of_agent(sample, about), busy=gently)
    yield from peers(read_peers(), about)


def of_agent(sample: Sample, about: About) -> Sample:
    """Return the part of the sample about the agent's GPUs. Errors that name no GPU may be
    of any."""
    if not about.gpus:
        return sample
    return msgspec.structs.replace(
        sample,
        gpus=tuple(board for board in sample.gpus if board.bus in about.gpus),
        xids=tuple(xid for xid in sample.xids if not xid.bus or xid.bus in about.gpus),
    )


def peers(found: Peers, about: About) -> Iterator[Finding]:
    for one, other, why in found.apart:
        if about.gpus and not {one, other} <= {*about.gpus}:
            continue
        what = f"GPUs {one} and {other} cannot reach each other's memory ({why})"
        fix = "messages go through the host: check ACS and IOMMU (nvidia-smi topo -p2p r)"
        yield Finding(check="p2p", level="slow", what=what, fix=fix)
    for bus in found.without_ecc:
        if about.gpus and bus not in about.gpus:
            continue
        what = f"GPU {bus} has ECC off: a flipped bit of its memory goes unnoticed"
        fix = "turn it on (nvidia-smi -e 1) and reset the GPU"
        yield Finding(check="ecc", level="warn", what=what, fix=fix)


def driver() -> Finding:
    version = driver_version()
    if version:
        return Finding(check="driver", level="pass", what=f"NVIDIA's driver {version} is loaded")
    what = "NVIDIA's driver is not loaded"
    fix = "install it (nvidia-smi must answer), and restart the host or modprobe nvidia"
    return Finding(check="driver", level="fail", what=what, fix=fix)


def health(sample: Sample, *, busy: bool = False) -> Iterator[Finding]:
    """Report on the health of all GPUs in the sample. `busy`: the agent's own workers use them."""
    if sample.problem:
        what = f"the health of GPUs is not known: {sample.problem}"
        fix = "with a driver and nvidia-ml-py agents drain nodes before their GPUs die"
        yield Finding(check="gpus", level="warn", what=what, fix=fix)
    for trouble in troubles(sample.gpus, sample.xids):
        what = f"GPU {trouble.bus}: {trouble.what}"
        level: Level = "fail" if trouble.sick else "warn"
        yield Finding(check="gpus", level=level, what=what, fix=trouble.fix)
    for board in sample.gpus:
        yield from _use(board, busy=busy)


def _use(board: GpuSample, *, busy: bool) -> Iterator[Finding]:
    where = f"GPU {board.bus} ({board.name})"
    if board.error:
        return
    if board.processes and not busy:
        what = f"{where} is used by {described(board.processes)}"
        fix = "end that, or choose other GPUs with --gpus"
        yield Finding(check="gpus", level="warn", what=what, fix=fix)
    if why := hindrance([board], ()):
        fix = "check its cooling, power and clocks (nvidia-smi -q -d PERFORMANCE)"
        yield Finding(check="gpus", level="slow", what=f"{where} is held back: {why}", fix=fix)
    elif busy or not board.processes:
        use = "its workers use it" if busy else "it is unused"
        yield Finding(check="gpus", level="pass", what=f"{where} is well, and {use}")


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
    """Check the limit on locked memory, which all memory of network adapters is. `limit`: of this
    user, in bytes."""
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
    """Report variables that conflict with those that agents set for workers on GPUs."""
    for name, wanted in worker_environment("cuda").items():
        if name.startswith(("NCCL_", "TORCH_NCCL_", "CUDA_")) and given.get(name, wanted) != wanted:
            what = f"{name}={given[name]} conflicts with the {wanted} that workers need"
            fix = f"unset {name}, or keep it for a reason (host/gpu/devices.py explains it)"
            yield Finding(check="environment", level="warn", what=what, fix=fix)
