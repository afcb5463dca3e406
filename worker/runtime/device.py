"""Opening of a worker's device, and the list of GPUs that torch sees on this host.

Agents, which load neither torch nor a driver, run this module. It prints a line of JSON: the host's
GPUs, or those of the given CUDA names, or why there are none. A worker opens its device after it
was forked, since a process that uses CUDA cannot be forked.

Also owns the clock of work that is queued on a device. Only this module and NCCL's name the kind of
accelerator: elsewhere a device has a queue or none.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import torch

from oobleck.core.messages import Launch
from oobleck.host.gpu.devices import Gpu, GpuReport
from oobleck.host.timeline import boot_id
from oobleck.planner.profile.memory import allocator_share, strangers_bytes
from oobleck.worker.runtime.errors import NodeError

#: Types of devices with queues and pinned host memory. ROCm builds of torch name theirs cuda, too.
_ACCELERATORS = ("cuda", "xpu")
#: First of NVIDIA's GPUs that multiply in float8 (Ada); Hopper is 9.0.
_FLOAT8_CAPABILITY = (8, 9)


def has_queue(device: torch.device) -> bool:
    """Return whether work on the device is only queued, and runs later, as on accelerators."""
    return device.type in _ACCELERATORS


def mark_queued(device: torch.device) -> torch.Event | None:
    """Return an event after all work queued on the device so far; None for one without a queue."""
    return torch.accelerator.current_stream(device).record_event() if has_queue(device) else None


def board_name(device: torch.device) -> str:
    """Return the name of the device's board; cpu for a CPU."""
    if not has_queue(device):
        return "cpu"
    return str(torch.get_device_module(device).get_device_name(device))


def no_float8(device: torch.device) -> str:
    """Return why products in float8 cannot run on the device; empty: they can."""
    if device.type == "cpu":
        return ""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"this version has none for {board_name(device)}"
    if (found := torch.cuda.get_device_capability(device)) < _FLOAT8_CAPABILITY:
        least, has = (".".join(map(str, one)) for one in (_FLOAT8_CAPABILITY, found))
        return f"{board_name(device)} has none (compute capability {has}, at least {least})"
    return ""


def take_place(launch: Launch) -> None:
    """Make only the worker's own GPU visible, and run near it. Call it before CUDA is used and
    before the computing threads begin."""
    if launch.visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = launch.visible
    if cpus := os.sched_getaffinity(0).intersection(launch.cpus):
        os.sched_setaffinity(0, cpus)


def open_device(name: str) -> tuple[torch.device, str]:
    """Return the device and, for a GPU, the id of its board, which is unique over all hosts (else
    an empty text). The parts of a divided GPU (MIG) have the same id.

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
    """Return NCCL's version, such as 2.29.7; an empty string where torch has no NCCL."""
    if not torch.distributed.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # no types


def torch_version() -> tuple[int, int]:
    """Return torch's major and minor version."""
    major, minor, *_ = torch.__version__.split(".")
    return int(major), int(minor)


def limit_allocator(device: torch.device, beside_bytes: int) -> None:
    """Make torch return its cached memory, and limit its allocator so that CUDA and communicators,
    of `beside_bytes`, get theirs from the driver."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    found = torch.cuda.get_device_properties(device)
    share = allocator_share(found.total_memory, beside_bytes)
    torch.cuda.set_per_process_memory_fraction(share, device)


def held_by_others(device: torch.device, beside_bytes: int) -> int:
    """Return the bytes of a GPU that other processes hold; 0 for a CPU. `beside_bytes`: bytes of
    CUDA and communicators in this process, which should be the only one there."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return strangers_bytes(total - free, torch.cuda.memory_reserved(device), beside_bytes)


def context_bytes(device: torch.device) -> int:
    """Compute something on a GPU, and return the bytes in use there beside torch's memory: CUDA's,
    and those of other processes. 0 where it cannot compute."""
    try:
        ones = torch.ones(256, 256, dtype=torch.bfloat16, device=device)
        ones.mm(ones).float().softmax(0).norm().item()
        free, total = torch.cuda.mem_get_info(device)
        return total - free - torch.cuda.memory_reserved(device)
    except RuntimeError:
        return 0


def _board(device: torch.device) -> str:
    return f"{boot_id()}/{_bus(torch.cuda.get_device_properties(device))}"


def _bus(found: Any) -> str:  # torch's stubs lack its PCI fields
    """Return the PCI address as the kernel writes it; GPUs are the first function of their
    devices."""
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def find_gpus() -> GpuReport:
    """Return the GPUs in torch's order. Makes a CUDA context."""
    built_for = torch.version.cuda or torch.version.hip
    report = GpuReport(cuda=built_for or "", nccl=nccl_version())
    if built_for is None:
        problem = f"torch {torch.__version__} is built without CUDA"
        return msgspec.structs.replace(report, problem=problem)
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # untyped in torch
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:  # no driver, or one that is too old
        return msgspec.structs.replace(report, problem=str(error).partition("\n")[0])
    gpus = tuple(
        Gpu(
            name=gpu.name,
            uuid=str(gpu.uuid),
            memory_bytes=gpu.total_memory,
            bus=_bus(gpu),
            visible=str(number),
        )
        for number, gpu in enumerate(found)
    )
    return msgspec.structs.replace(report, gpus=gpus)


def find_chosen(names: Sequence[str]) -> GpuReport:
    """Return the GPUs with these CUDA names.

    Each is examined by a process of its own, which sees no other. CUDA shows a process only one
    part of a divided GPU, and nothing after a name that it does not know.
    """
    report = GpuReport()
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for name in names:
            found = pool.apply(_find_one, (name,))
            if not found.gpus:
                problem = f"{name or 'an empty name'}: {found.problem or 'is not there'}"
                return msgspec.structs.replace(found, gpus=(), problem=problem)
            gpus = (*report.gpus, msgspec.structs.replace(found.gpus[0], visible=name))
            report = msgspec.structs.replace(found, gpus=gpus)
    return report


def _find_one(name: str) -> GpuReport:
    os.environ["CUDA_VISIBLE_DEVICES"] = name
    return _with_context(find_gpus())


def _with_context(report: GpuReport) -> GpuReport:
    if not report.gpus:
        return report
    return msgspec.structs.replace(report, context_bytes=context_bytes(torch.device("cuda:0")))


if __name__ == "__main__":
    report = find_chosen(sys.argv[1:]) if sys.argv[1:] else _with_context(find_gpus())
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")


# ---- Host times of work that is queued on a device, where it runs later than it is queued.
#
# Marks are events of the device. The device measures their distance from the first mark; the host
# waits for the first one and takes its time. One thread uses it.


Mark = TypeVar("Mark")


class DeviceClock(Generic[Mark]):
    def __init__(
        self,
        mark: Callable[[], Mark],
        between: Callable[[Mark, Mark], float],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Make a clock. `mark`: queues a mark; `between`: seconds from one mark to another, once
        both have passed.
        """
        self.mark = mark
        self._between = between
        self._now_ns = now_ns
        self._first: Mark | None = None
        self._first_ns = 0

    def begin(self) -> None:
        """Begin the clock, before any other mark. Waits for queued work."""
        self._first = self.mark()
        self._between(self._first, self._first)
        self._first_ns = self._now_ns()

    def at_ns(self, mark: Mark) -> int:
        """Return the mark's time in ns on the host's monotonic clock. Waits until the mark has
        passed."""
        assert self._first is not None, "it has begun"
        return self._first_ns + round(1e9 * self._between(self._first, mark))


def clock_of(device: torch.device) -> DeviceClock[torch.Event] | None:
    """Return the device's clock; None for a device that computes synchronously."""
    return DeviceClock(moment, seconds_between) if has_queue(device) else None


def moment() -> torch.Event:
    """Queue an event on the present stream."""
    event = torch.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(one: torch.Event, other: torch.Event) -> float:
    """Return the seconds from one event to another; wait for the latter."""
    other.synchronize()
    return float(one.elapsed_time(other)) / 1e3
