"""Opens a worker's device, and lists the GPUs that torch sees on this host.

Agents, which load neither torch nor a driver, run this module: it prints the host's GPUs (or why
there are none) as a line of JSON. A worker opens its device after it was forked, since a process
that uses CUDA cannot be forked.
"""

import sys
from typing import Any

import msgspec
import torch

from oobleck.host.device import Gpu, GpuReport
from oobleck.host.timeline import boot_id
from oobleck.planner.profile.memory import allocator_share
from oobleck.worker.runtime.errors import NodeError


def open_device(name: str) -> tuple[torch.device, str]:
    """The device and, of a GPU, the board that it is on, which no other host has (else an empty
    text): the parts of a divided GPU (MIG) have the same.

    `name`: cpu, or cuda:N. Raises NodeError.
    """
    device = torch.device(name)
    if device.type == "cpu":
        return device, ""
    report = find_gpus()
    if device.index is None or device.index >= len(report.gpus):
        raise NodeError(
            f"device {name}: this node has {len(report.gpus)} usable GPUs"
            f"{f' ({report.problem})' if report.problem else ''}; start its agent with --device "
            "cpu, or make the GPU visible to it"
        )
    torch.cuda.set_device(device)
    return device, _board(device)


def nccl_version() -> str:
    """Such as 2.29.7; empty where torch has none."""
    if not torch.distributed.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # no types


def limit_allocator(device: torch.device, communicator_bytes: int) -> None:
    """Have torch give back what it keeps of the GPU and take no more than leaves CUDA and
    communicators of so many bytes theirs, which they have from the driver."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    found = torch.cuda.get_device_properties(device)
    share = allocator_share(found.total_memory, communicator_bytes)
    torch.cuda.set_per_process_memory_fraction(share, device)


def _board(device: torch.device) -> str:
    found: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack where it is
    where = [found.pci_domain_id, found.pci_bus_id, found.pci_device_id]
    return f"{boot_id()}/{':'.join(f'{number:x}' for number in where)}"


def find_gpus() -> GpuReport:
    """The GPUs in torch's order. Makes a CUDA context."""
    if torch.version.cuda is None:
        return GpuReport(problem=f"torch {torch.__version__} is built without CUDA")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch does not say
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:  # no driver, or one that is too old
        return GpuReport(problem=str(error).partition("\n")[0])
    return GpuReport(
        gpus=tuple(
            Gpu(name=gpu.name, uuid=str(gpu.uuid), memory_bytes=gpu.total_memory) for gpu in found
        )
    )


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(find_gpus()).decode() + "\n")
