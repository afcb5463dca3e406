"""Samples of a host's GPUs by NVML, errors in the kernel's log, and processes that use the GPUs.

A sample is plain data. The kernel's log also has errors from before any process listened to NVML
(docs.nvidia.com/deploy/xid-errors). Must not know the meaning of a sample, nor the reaction.
"""

import errno
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import psutil

from oobleck.core.units import format_bytes
from oobleck.host.gpu.devices import Gpu
from oobleck.host.system.process import output_of, python


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """Process that computes on a GPU."""

    pid: int
    #: None: unknown to NVML.
    memory_bytes: int | None = None


class GpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """Sample of one board; None: the board, the driver or the caller's rights do not allow it."""

    #: Address as in /sys/bus/pci/devices.
    bus: str
    uuid: str = ""
    name: str = ""
    #: Reason why it cannot be read any more, in NVML's words; empty: it can be.
    error: str = ""
    #: Memory errors that ECC could not correct, and that it corrected, since the driver was loaded.
    ecc_uncorrected: int | None = None
    ecc_corrected: int | None = None
    #: Rows of memory that were replaced for uncorrected errors; whether a replacement waits for a
    #: reset; whether one has failed.
    rows_remapped: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    #: On boards that retire pages instead: whether one waits for a reset.
    retirement_pending: bool | None = None
    #: Bits of nvmlClocksEventReasons: reasons of lower clocks.
    clock_reasons: int | None = None
    clock_mhz: int | None = None
    most_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    #: Part of the last moment in which a kernel ran, 0 to 1.
    utilization: float | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    #: True if it is divided into parts (MIG).
    divided: bool = False
    processes: tuple[GpuProcess, ...] | None = None


class Xid(msgspec.Struct, frozen=True, kw_only=True):
    """Error that the driver has reported of a board, by its number in NVIDIA's catalogue."""

    #: Empty: unknown to NVML.
    bus: str
    code: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    gpus: tuple[GpuSample, ...] = ()
    #: Errors reported since the previous sample.
    xids: tuple[Xid, ...] = ()
    driver: str = ""
    #: Reason why nothing can be read at all; empty: it can be.
    problem: str = ""
    #: True if it never will: this host lacks a requirement.
    for_good: bool = False


# ---- Xids that NVIDIA's driver has written into the kernel's log


#: NVRM: Xid (PCI:0000:3b:00): 79, pid=...
_XID = re.compile(
    r"NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})[^)]*\): (\d+)"
)
_LOG = "/dev/kmsg"
_RECORD_BYTES = 8 << 10
#: The kernel keeps a few hundred KiB.
_MOST_RECORDS = 100_000


def read_xids() -> tuple[Xid, ...]:
    """Read each Xid once, in order; none if this user may not read the log."""
    try:
        descriptor = os.open(_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        return xids(_records(descriptor))
    finally:
        os.close(descriptor)


def _records(descriptor: int) -> Iterator[str]:
    """Yield the records of a kernel log, one read each (dev-kmsg in the kernel's ABI
    documentation)."""
    for _ in range(_MOST_RECORDS):
        try:
            record = os.read(descriptor, _RECORD_BYTES)
        except OSError as error:
            if error.errno == errno.EPIPE:  # overwritten meanwhile; read the next one
                continue
            return
        if not record:
            return
        yield record.decode(errors="replace")


def xids(lines: Iterable[str]) -> tuple[Xid, ...]:
    found = (_XID.search(line) for line in lines)
    read = (
        Xid(bus=f"{int(m[1], 16):04x}:{m[2]}:{m[3]}.0".lower(), code=int(m[4])) for m in found if m
    )
    return tuple(dict.fromkeys(read))


# ---- processes that use the GPUs


READER = "oobleck.host.gpu.nvml"
#: A healthy driver answers in a second or two.
_ANSWER_S = 30.0
#: Workers of a killed agent hold their GPUs until the driver has cleaned up.
_LEAVE_S = 10.0
_LOOK_S = 1.0


def read_sample() -> Sample:
    """Read a sample from NVML, in a process of its own."""
    try:
        output = output_of(python(READER), _ANSWER_S)
        return msgspec.json.decode(output, type=Sample)
    except subprocess.TimeoutExpired:
        return Sample(problem=f"NVML has not answered for {_ANSWER_S:.0f} s")
    except (OSError, subprocess.CalledProcessError, msgspec.DecodeError) as error:
        return Sample(problem=f"NVML cannot be asked: {error}")


def check_unused(
    gpus: Iterable[Gpu],
    read: Callable[[], Sample] = read_sample,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Raise ValueError if another process keeps computing on one of the GPUs, or one cannot be
    read. Without an answer of NVML all count as unused, and so do parts of a divided GPU, for which
    NVML shows the processes of all parts."""
    wanted = {gpu.bus: gpu for gpu in gpus if not gpu.visible.startswith("MIG-")}
    until = clock() + _LEAVE_S
    while True:
        boards = [board for board in read().gpus if board.bus in wanted]
        if lost := [f"GPU {wanted[b.bus].visible}: {b.error}" for b in boards if b.error]:
            fix = "restart the host, or name other GPUs with --gpus"
            raise ValueError(f"--device cuda: {'; '.join(lost)}; {fix}")
        found = [
            f"GPU {wanted[board.bus].visible} ({board.name}) is used by "
            f"{described(board.processes)}"
            for board in boards
            if board.processes and not board.divided
        ]
        if not found:
            return
        if clock() >= until:
            break
        sleep(_LOOK_S)
    raise ValueError(
        f"--device cuda: {'; '.join(found)}; end that, name other GPUs with --gpus, or give "
        "--share-gpus and a --memory-per-worker that leaves them theirs"
    )


def described(processes: Sequence[GpuProcess]) -> str:
    """Describe processes, each like `python3 (process 4242, 3.0 GiB)`."""
    return ", ".join(map(_one, processes))


def _one(process: GpuProcess) -> str:
    try:
        name = psutil.Process(process.pid).name()
    except (psutil.Error, ValueError):
        name = "another"
    size = f", {format_bytes(process.memory_bytes)}" if process.memory_bytes else ""
    return f"{name} (process {process.pid}{size})"
