"""GPUs of this node: those for its workers, with CPUs and memory, and the watch over NVML.

A process reads NVML for the agent (`oobleck.host.gpu.nvml`) and is restarted when it ends. A sick
driver may hold it for ever; the agent continues, and says so.
"""

import asyncio
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

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
from oobleck.host.gpu.health import LOOK, hindrance, troubles
from oobleck.host.gpu.sample import READER, GpuSample, Sample, Xid, check_unused
from oobleck.host.system.memory import total_memory
from oobleck.host.system.process import with_parent
from oobleck.host.versions import Versions, installed
from oobleck.planner.profile.memory import gpu_reserve_bytes, worker_context_bytes

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
    as many as --gpus names, or one. `shared`: others may compute on them. The report's
    `context_bytes` are those of a worker. Raises ValueError."""
    report = find_gpus(environment, chosen_gpus(option, environment))
    check_distinct(report.gpus, option)
    if workers is None:
        workers = 1 if option is None else len(report.gpus)
    used = report.gpus[: max(1, workers)]
    if not shared:
        check_unused(used)
    gpus = tuple(msgspec.structs.replace(gpu, cpus=near_cpus(gpu.bus)) for gpu in used)
    allowed = os.sched_getaffinity(0)
    # On shared GPUs the measured bytes include those of other processes.
    measured = 0 if shared else report.context_bytes
    return msgspec.structs.replace(
        report, gpus=with_room(gpus, workers, allowed), context_bytes=worker_context_bytes(measured)
    )


def with_room(gpus: Sequence[Gpu], workers: int, allowed: Collection[int]) -> tuple[Gpu, ...]:
    """Return the GPUs with only those CPUs that the agent may use. A GPU whose CPUs are too few for
    all the workers that would share them gets none: its workers run on any CPU."""
    near = [{*gpu.cpus} & {*allowed} for gpu in gpus]
    with_cpus = []
    for gpu, cpus in zip(gpus, near, strict=True):
        sharers = sum(bool(near[slot % len(near)] & cpus) for slot in range(workers))
        enough = len(cpus) >= _CPUS_PER_WORKER * sharers
        with_cpus.append(msgspec.structs.replace(gpu, cpus=tuple(sorted(cpus)) if enough else ()))
    return tuple(with_cpus)


def versions(report: GpuReport) -> Versions:
    """Return the versions of the software that the node's workers compute with."""
    if not report.gpus:
        return installed()
    return msgspec.structs.replace(
        installed(), cuda=report.cuda, nccl=report.nccl, driver=driver_version()
    )


def default_memory(workers: int, gpus: Sequence[Gpu], context_bytes: int) -> int:
    """Return the bytes for each of `workers`. On CPUs that is a share of the host's RAM. On GPUs it
    is a share of the smallest GPU, less the memory that CUDA (`context_bytes`) and NCCL take."""
    if not gpus:
        return total_memory() // max(1, workers)
    share = min(gpu.memory_bytes for gpu in gpus) // max(1, -(-workers // len(gpus)))
    return max(share - gpu_reserve_bytes(workers, context_bytes), share // 2)


logger = logging.getLogger(__name__)


async def watch(
    environment: Mapping[str, str],
    tell: Callable[[Sample], None],
    command: Sequence[str] = (),
) -> None:
    """Report each sample, and the reason when samples stop. Return when cancelled, or when this
    host can give none. `command` prints samples; none: the reader of NVML."""
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


# ---- state of the GPUs that the agent's workers use, from samples of NVML


#: Longest text in the node's status.
_MOST = 1000
#: Most errors that are remembered; further ones are repetitions.
_MOST_XIDS = 64


@dataclass(slots=True)
class GpuHealth:
    #: Places of the GPUs, slot by slot in turn; none: workers compute on CPUs.
    places: Sequence[str] = ()
    #: The last samples of each of these places.
    _samples: dict[str, deque[GpuSample]] = field(default_factory=dict)
    #: All errors that the driver has reported of them since the agent began, oldest first.
    _xids: list[Xid] = field(default_factory=list)
    #: How often each was reported, by place and code.
    xid_counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    #: Driver version of the newest sample that had one.
    driver: str = ""
    #: Why the GPUs' state is unknown now; empty: it is known.
    _problem: str = ""

    def take(self, sample: Sample) -> None:
        self._problem = sample.problem
        self.driver = sample.driver or self.driver
        for board in sample.gpus:
            if board.bus in self.places:
                self._samples.setdefault(board.bus, deque(maxlen=LOOK)).append(board)
        shown = {board.bus for board in sample.gpus}
        for bus in () if sample.problem else self._samples.keys() - shown:
            # After a restart the reader of NVML cannot open a board that was lost meanwhile.
            self._samples[bus].append(GpuSample(bus=bus, error="NVML does not show it any more"))
        for xid in sample.xids:
            if xid.bus and xid.bus not in self.places:
                continue
            if xid not in self._xids:
                if len(self._xids) == _MOST_XIDS:
                    continue
                self._xids.append(xid)
            self.xid_counts[xid.bus, xid.code] += 1

    @property
    def watched(self) -> bool:
        """True while samples arrive."""
        return bool(self.places) and not self._problem

    def newest(self) -> Mapping[str, GpuSample]:
        """Return the newest sample of each GPU, by its place."""
        return {bus: samples[-1] for bus, samples in self._samples.items()}

    def sick_places(self) -> set[str]:
        """Return the places of the GPUs on which nothing should be trained."""
        found = troubles(self.newest().values(), self._xids)
        return {trouble.bus for trouble in found if trouble.sick}

    def summary(self) -> tuple[str, str]:
        """Return why nothing should be trained here, and the lesser troubles; empty: none."""
        found = troubles(self.newest().values(), self._xids)
        sick = [str(trouble) for trouble in found if trouble.sick]
        concerns = [str(trouble) for trouble in found if not trouble.sick]
        if self._problem:
            concerns.append(f"the health of the GPUs is not known: {self._problem}")
        return _as_lines(sick), "; ".join(concerns)[:_MOST]

    def hindrance(self, slot: int, own: Collection[int]) -> str:
        """Return what slows the worker of the slot, if anything. `own`: processes of the node's
        workers."""
        if not self.places:
            return ""
        samples = self._samples.get(self.places[slot % len(self.places)], ())
        return hindrance(tuple(samples), own)[:_MOST]


def _as_lines(troubles: Sequence[str]) -> str:
    """Join as many troubles as fit, each whole, since the master compares them."""
    text = "\n".join(troubles)[: _MOST + 1]
    return text if len(text) <= _MOST else text[: text.rindex("\n")]
