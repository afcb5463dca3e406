"""GPUs of this node: those for its workers, with CPUs and memory, and the watch over NVML.

A process reads NVML for the agent (`oobleck.host.gpu.nvml`) and is restarted when it ends. A sick
driver may hold it for ever; the agent continues, and says so. Must not know what samples mean.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import msgspec

from oobleck.host.gpu.devices import (
    Gpu,
    GpuReport,
    check_distinct,
    chosen_gpus,
    driver_version,
    find_gpus,
    near_cpus,
)
from oobleck.host.gpu.sample import READER, Sample, check_unused
from oobleck.host.system.memory import total_memory
from oobleck.host.system.process import with_parent
from oobleck.host.versions import Versions, installed
from oobleck.planner.profile.memory import gpu_reserve_bytes

#: A worker computes in one thread, and NCCL's own keep about one more CPU busy.
_CPUS_PER_WORKER = 2
#: Interval between samples.
_EVERY_S = 10.0
#: Silence after which the driver counts as hung; the first sample waits for the libraries too.
_SILENCE_S = 60.0
_AGAIN_S = 30.0
_END_S = 1.0
_MOST_BYTES = 1 << 20


def find(
    environment: Mapping[str, str], option: str | None, workers: int | None, *, shared: bool
) -> GpuReport:
    """Find the GPUs that this node's workers use. `option`: --gpus; `workers`: their number; None:
    as many as --gpus names, or one. `shared`: others may compute on them. Raises ValueError."""
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
    """Return the bytes for each of `workers`. On CPUs that is a share of the host's RAM. On GPUs it
    is a share of the smallest GPU, less the memory that CUDA and NCCL take."""
    if not gpus:
        return total_memory() // max(1, workers)
    share = min(gpu.memory_bytes for gpu in gpus) // max(1, -(-workers // len(gpus)))
    return max(share - gpu_reserve_bytes(workers), share // 2)


logger = logging.getLogger(__name__)


async def watch(
    environment: Mapping[str, str],
    tell: Callable[[Sample], None],
    command: Sequence[str] = (),
) -> None:
    """Report each sample, and why no more come. Return when cancelled, or when this host can give
    none. `command` prints samples; none: the reader of NVML."""
    command = command or [*with_parent(READER), str(_EVERY_S)]
    while True:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
                limit=_MOST_BYTES,
            )
        except OSError as error:
            tell(Sample(problem=f"the process that asks NVML does not start: {error.strerror}"))
        else:
            try:
                last = await _listen(process, tell)
            finally:
                await _end(process)
            if last.for_good:
                logger.warning("the health of GPUs is not watched", extra={"reason": last.problem})
                return
            tell(last)
            # A process that the driver holds does not end, and another one would be held as well.
            await process.communicate()
        await asyncio.sleep(_AGAIN_S)


async def _listen(process: asyncio.subprocess.Process, tell: Callable[[Sample], None]) -> Sample:
    """Report each sample of GPUs, and return the one that says why no more come."""
    assert process.stdout is not None
    try:
        while True:
            async with asyncio.timeout(_SILENCE_S):
                line = await process.stdout.readline()
            if not line:
                return Sample(problem="the process that asks NVML has ended")
            sample = msgspec.json.decode(line, type=Sample)
            if sample.problem:
                return sample
            tell(sample)
    except TimeoutError:
        return Sample(problem=f"NVML has been silent for {_SILENCE_S:.0f} s")
    except ValueError as error:  # too long, or no sample
        return Sample(problem=f"what NVML says is not understood: {error}")


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            await process.communicate()
