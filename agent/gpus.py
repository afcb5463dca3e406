"""The GPUs of this node when its agent starts: those that its workers get, and what goes with them.

Must not know what becomes of them later.
"""

from collections.abc import Mapping, Sequence

import msgspec

from oobleck.agent.processes.memory import total_memory
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
from oobleck.host.versions import Versions, installed
from oobleck.planner.profile.memory import gpu_reserve_bytes


def find(environment: Mapping[str, str], option: str | None, *, shared: bool) -> GpuReport:
    """The GPUs of this node's workers. `option`: --gpus; `shared`: others may compute on them.
    Raises ValueError."""
    report = find_gpus(environment, chosen_gpus(option, environment))
    check_distinct(report.gpus)
    if not shared:
        check_unused(report.gpus)
    gpus = tuple(msgspec.structs.replace(gpu, cpus=near_cpus(gpu.bus)) for gpu in report.gpus)
    return msgspec.structs.replace(report, gpus=gpus)


def versions(report: GpuReport) -> Versions:
    """Of what the node's workers compute with."""
    if not report.gpus:
        return installed()
    return msgspec.structs.replace(
        installed(), cuda=report.cuda, nccl=report.nccl, driver=driver_version()
    )


def default_memory(workers: int, gpus: Sequence[Gpu]) -> int:
    """Bytes for each of `workers` where they share the host's RAM, or what is left of the smallest
    GPU beside what CUDA and NCCL take."""
    if not gpus:
        return total_memory() // max(1, workers)
    share = min(gpu.memory_bytes for gpu in gpus) // max(1, -(-workers // len(gpus)))
    return max(share - gpu_reserve_bytes(workers), share // 2)
