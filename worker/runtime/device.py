"""Opens a worker's device, and lists the GPUs that torch sees on this host.

Agents, which load neither torch nor a driver, run this module: it prints the host's GPUs (or why
there are none) as a line of JSON. A worker opens its device after it was forked, since a process
that uses CUDA cannot be forked.
"""

import sys

import msgspec
import torch

from oobleck.host.device import Gpu, GpuReport
from oobleck.worker.runtime.errors import NodeError


def open_device(name: str) -> tuple[torch.device, str]:
    """The device and, of a GPU, the identity that no other GPU has (else an empty text).

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
    return device, report.gpus[device.index].uuid


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
