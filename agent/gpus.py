"""GPUs of this node when its agent starts: those that its workers get, with their CPUs and memory.

Must not know what becomes of them later.
"""

import os
from collections.abc import Collection, Mapping, Sequence

import msgspec

from oobleck.host.device import find_gpus
from oobleck.host.gpu.choice import (
    Gpu,
    GpuReport,
    check_distinct,
    chosen_gpus,
    driver_version,
    near_cpus,
)
from oobleck.host.gpu.users import check_unused
from oobleck.host.system.memory import total_memory
from oobleck.host.versions import Versions, installed
from oobleck.planner.profile.memory import gpu_reserve_bytes

#: A worker computes in one thread, and NCCL's own keep about one more CPU busy.
_CPUS_PER_WORKER = 2


def find(
    environment: Mapping[str, str], option: str | None, workers: int | None, *, shared: bool
) -> GpuReport:
    """Find the GPUs that this node's workers use. `option`: --gpus; `workers`: how many there are
    to be, None: as many as --gpus names, or one; `shared`: others may compute on them. Raises
    ValueError."""
    report = find_gpus(environment, chosen_gpus(option, environment))
    check_distinct(report.gpus, option)
    if workers is None:
        workers = 1 if option is None else len(report.gpus)
    used = report.gpus[: max(1, workers)]
    if not shared:
        check_unused(used)
    gpus = tuple(msgspec.structs.replace(gpu, cpus=near_cpus(gpu.bus)) for gpu in used)
    allowed = os.sched_getaffinity(0)
    return msgspec.structs.replace(report, gpus=with_room(gpus, workers, allowed))


def with_room(gpus: Sequence[Gpu], workers: int, allowed: Collection[int]) -> tuple[Gpu, ...]:
    """Return the GPUs with only those CPUs that the agent may use. A GPU whose CPUs are too few for
    all the workers that would share them gets none: its workers run on any CPU."""
    near = [{*gpu.cpus} & {*allowed} for gpu in gpus]
    told = []
    for gpu, cpus in zip(gpus, near, strict=True):
        sharers = sum(bool(near[slot % len(near)] & cpus) for slot in range(workers))
        enough = len(cpus) >= _CPUS_PER_WORKER * sharers
        told.append(msgspec.structs.replace(gpu, cpus=tuple(sorted(cpus)) if enough else ()))
    return tuple(told)


def versions(report: GpuReport) -> Versions:
    """Return the versions of the software that the node's workers compute with."""
    if not report.gpus:
        return installed()
    return msgspec.structs.replace(
        installed(), cuda=report.cuda, nccl=report.nccl, driver=driver_version()
    )


def default_memory(workers: int, gpus: Sequence[Gpu]) -> int:
    """Return the bytes for each of `workers`: a share of the host's RAM, or what is left of the
    smallest GPU beside what CUDA and NCCL take."""
    if not gpus:
        return total_memory() // max(1, workers)
    share = min(gpu.memory_bytes for gpu in gpus) // max(1, -(-workers // len(gpus)))
    return max(share - gpu_reserve_bytes(workers), share // 2)
