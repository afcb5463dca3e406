"""Processes that use the GPUs of this host. Must not know the reaction."""

import subprocess
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import psutil

from oobleck.core.units import format_bytes
from oobleck.host.gpu.choice import Gpu
from oobleck.host.gpu.sample import GpuProcess, Sample
from oobleck.host.system.process import output_of, python

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
    """Raise ValueError if another process keeps computing on one of the GPUs, or one of them cannot
    be read.

    If NVML does not answer, all count as unused. For a part of a divided GPU NVML shows the
    processes of all parts, so none of them count.
    """
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
