"""Metrics of an agent: its workers, their GPUs, and its host.

The supervisor reads those of workers and GPUs from its state. `read_slowly` reads those of the
host; a disk may be slow, so it must not run in the event loop. Must not know how they are shown,
nor how a sick GPU is handled.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator

import psutil

from oobleck.agent.gpus import GpuHealth
from oobleck.agent.state import NodeState
from oobleck.agent.worker import WorkerState
from oobleck.core.ids import NodeName
from oobleck.host.gpu.health import CLOCK_HOLDS
from oobleck.host.gpu.sample import GpuSample
from oobleck.host.metrics import Family, Reading, families_of, single

_SLOT = ("slot",)
BUILD = Family("gauge", "oobleck_agent_info", "1; node and version.", ("node", "version"))
HEARD = Family("gauge", "oobleck_agent_connected", "1 while a master hears the agent.")
LEAVING = Family("gauge", "oobleck_agent_leaving", "1 once told to end.")
SLOTS = Family("gauge", "oobleck_agent_worker_slots", "Room for workers.")
UP = Family("gauge", "oobleck_worker_up", "1 while the slot's worker can be called.", _SLOT)
FAILED = Family(
    "gauge", "oobleck_worker_start_failed", "1 where no worker is started again.", _SLOT
)
GENERATION = Family("gauge", "oobleck_worker_generation", "Newest plan entered.", _SLOT)
STEP = Family("gauge", "oobleck_worker_committed_step", "Newest committed step.", _SLOT)
COMPUTED = Family(
    "counter",
    "oobleck_worker_compute_seconds_total",
    "Computing time in whole steps of this generation.",
    _SLOT,
)
PEAK = Family(
    "gauge",
    "oobleck_worker_device_memory_peak_bytes",
    "Peak memory on the worker's device in this generation.",
    _SLOT,
)
RESIDENT = Family(
    "gauge", "oobleck_worker_resident_memory_bytes", "Main memory of the worker.", _SLOT
)
PROCESSOR = Family(
    "counter",
    "oobleck_worker_processor_seconds_total",
    "Processor time of the worker.",
    _SLOT,
)
_GPU = ("gpu",)
INFO = Family(
    "gauge",
    "oobleck_gpu_info",
    "1 per GPU of the node's workers; gpu is its PCI address.",
    ("gpu", "uuid", "name", "driver"),
)
READABLE = Family("gauge", "oobleck_gpu_readable", "1 while NVML can read the GPU.", _GPU)
SICK = Family(
    "gauge", "oobleck_gpu_sick", "1 where the GPU needs a reset or its host a restart.", _GPU
)
TEMPERATURE = Family("gauge", "oobleck_gpu_temperature_celsius", "Temperature.", _GPU)
POWER = Family("gauge", "oobleck_gpu_power_watts", "Power.", _GPU)
UTILIZATION = Family(
    "gauge",
    "oobleck_gpu_utilization_ratio",
    "Share of the last second in which any kernel ran.",
    _GPU,
)
GPU_MEMORY = Family("gauge", "oobleck_gpu_memory_bytes", "Memory of the GPU.", _GPU)
USED = Family("gauge", "oobleck_gpu_memory_used_bytes", "Memory taken, by anybody.", _GPU)
CLOCK = Family("gauge", "oobleck_gpu_clock_hertz", "Clock of the multiprocessors.", _GPU)
MOST_CLOCK = Family("gauge", "oobleck_gpu_most_clock_hertz", "Highest clock.", _GPU)
HELD = Family(
    "gauge",
    "oobleck_gpu_clock_held_down",
    "1 where that reason holds the clock down.",
    ("gpu", "reason"),
)
ECC = Family(
    "counter",
    "oobleck_gpu_ecc_errors_total",
    "Memory errors since the driver was loaded.",
    ("gpu", "corrected"),
)
REMAPPED = Family(
    "gauge",
    "oobleck_gpu_remapped_rows",
    "Memory rows replaced for uncorrected errors.",
    _GPU,
)
RESET_WANTED = Family(
    "gauge",
    "oobleck_gpu_reset_wanted",
    "1 where the next reset replaces bad memory.",
    _GPU,
)
XIDS = Family(
    "counter",
    "oobleck_gpu_xids_total",
    "The driver's errors since the agent began, by NVIDIA's Xid; gpu is empty where unknown.",
    ("gpu", "xid"),
)
PROCESSORS = Family("gauge", "oobleck_host_processors", "Processors of the host.")
BUSY = Family(
    "counter",
    "oobleck_host_processor_seconds_total",
    "Processor time, by use.",
    ("mode",),
)
LOAD = Family("gauge", "oobleck_host_load", "Load of the last minute.")
MEMORY = Family("gauge", "oobleck_host_memory_bytes", "Memory of the host.")
AVAILABLE = Family("gauge", "oobleck_host_memory_available_bytes", "Memory still available.")
SWAPPED = Family("gauge", "oobleck_host_swap_used_bytes", "Swapped memory.")
DISK = Family(
    "gauge",
    "oobleck_host_disk_bytes",
    "Size of a writable local file system.",
    ("mount",),
)
DISK_FREE = Family(
    "gauge",
    "oobleck_host_disk_free_bytes",
    "Room left on it for users.",
    ("mount",),
)
DISK_READ = Family("counter", "oobleck_host_disk_read_bytes_total", "Bytes read.", ("disk",))
DISK_WRITTEN = Family(
    "counter", "oobleck_host_disk_written_bytes_total", "Bytes written.", ("disk",)
)
RECEIVED = Family(
    "counter",
    "oobleck_host_network_received_bytes_total",
    "Bytes received.",
    ("interface",),
)
SENT = Family(
    "counter",
    "oobleck_host_network_sent_bytes_total",
    "Bytes sent.",
    ("interface",),
)
ERRORS = Family(
    "counter",
    "oobleck_host_network_errors_total",
    "Packets with errors, or dropped.",
    ("interface",),
)
_MODES = ("user", "system", "iowait", "steal", "idle")
FAMILIES = families_of(sys.modules[__name__])


def read_workers(state: NodeState, node: NodeName, version: str) -> Iterator[Reading]:
    yield Reading(BUILD, {(node, version): 1})
    yield single(HEARD, state.no_session_since is None)
    yield single(LEAVING, state.leave_at is not None or state.shutting_down)
    yield single(SLOTS, state.slot_count)
    workers = {worker.slot: worker for worker in state.serving()}
    up = {(str(n),): float(n in workers and workers[n].card != "") for n in range(state.slot_count)}
    yield Reading(UP, up)
    failed = {(str(n),): float(slot.failed is not None) for n, slot in enumerate(state.slots)}
    yield Reading(FAILED, failed)
    running = workers.values()
    yield Reading(GENERATION, {(str(worker.slot),): worker.entered for worker in running})
    steps = {(str(w.slot),): w.committed_step for w in running if w.committed_step is not None}
    yield Reading(STEP, steps)
    computed = {(str(w.slot),): w.compute.seconds for w in running if w.compute is not None}
    yield Reading(COMPUTED, computed)
    peaks = {(str(w.slot),): w.memory.peak_bytes for w in running if w.memory is not None}
    yield Reading(PEAK, peaks)
    yield from _processes(running)


def _processes(workers: Iterable[WorkerState]) -> Iterator[Reading]:
    resident, processor = {}, {}
    for worker in workers:
        if worker.pid is None:
            continue
        try:
            process = psutil.Process(worker.pid)
            times = process.cpu_times()
            resident[str(worker.slot),] = process.memory_info().rss
            processor[str(worker.slot),] = times.user + times.system
        except psutil.Error:  # it has just ended
            continue
    yield Reading(RESIDENT, resident)
    yield Reading(PROCESSOR, processor)


#: Numbers of a sample that have a family each.
_NUMBERS: tuple[tuple[Family, Callable[[GpuSample], float | None]], ...] = (
    (TEMPERATURE, lambda board: board.temperature_c),
    (POWER, lambda board: board.power_w),
    (UTILIZATION, lambda board: board.utilization),
    (GPU_MEMORY, lambda board: board.memory_bytes),
    (USED, lambda board: board.memory_used_bytes),
    (CLOCK, lambda board: _hertz(board.clock_mhz)),
    (MOST_CLOCK, lambda board: _hertz(board.most_clock_mhz)),
    (REMAPPED, lambda board: board.rows_remapped),
    (RESET_WANTED, lambda board: _any(board.remap_pending, board.retirement_pending)),
)


def read_gpus(health: GpuHealth) -> Iterator[Reading]:
    """Read the metrics of GPUs. A number that a board or its driver does not give has no series."""
    boards = health.newest()
    known = {bus: board for bus, board in boards.items() if not board.error}
    yield Reading(INFO, {(bus, one.uuid, one.name, health.driver): 1 for bus, one in known.items()})
    watched = dict.fromkeys(health.places, 0.0)
    yield Reading(READABLE, {(bus,): float(bus in known and health.watched) for bus in watched})
    sick = health.sick_places()
    yield Reading(SICK, {(bus,): float(bus in sick) for bus in boards})
    # Leave out volatile values that are no longer updated.
    live = known if health.watched else {}
    for family, number in _NUMBERS:
        values = {bus: number(board) for bus, board in live.items()}
        yield Reading(family, {(bus,): value for bus, value in values.items() if value is not None})
    held = {
        (bus, reason): float(bool(board.clock_reasons & bits))
        for bus, board in live.items()
        if board.clock_reasons is not None
        for reason, bits in CLOCK_HOLDS.items()
    }
    yield Reading(HELD, held)
    errors = {
        (bus, corrected): count
        for bus, board in known.items()
        for corrected, count in (("yes", board.ecc_corrected), ("no", board.ecc_uncorrected))
        if count is not None
    }
    yield Reading(ECC, errors)
    yield Reading(XIDS, {(bus, str(code)): n for (bus, code), n in health.xid_counts.items()})


def _hertz(mhz: int | None) -> float | None:
    return None if mhz is None else mhz * 1e6


def _any(*flags: bool | None) -> float | None:
    known = [flag for flag in flags if flag is not None]
    return float(any(known)) if known else None


def read_slowly() -> Iterator[Reading]:
    """Read the metrics of the host, leaving out groups that the kernel or a container does not
    show."""
    for group in (_processors, _memory, _swap, _file_systems, _disks, _network):
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            yield from group()


def _processors() -> Iterator[Reading]:
    yield single(PROCESSORS, os.cpu_count() or 1)
    times = psutil.cpu_times()
    yield Reading(BUSY, {(mode,): getattr(times, mode) for mode in _MODES})
    yield single(LOAD, os.getloadavg()[0])


def _memory() -> Iterator[Reading]:
    memory = psutil.virtual_memory()
    yield single(MEMORY, memory.total)
    yield single(AVAILABLE, memory.available)


def _swap() -> Iterator[Reading]:
    yield single(SWAPPED, psutil.swap_memory().used)


def _network() -> Iterator[Reading]:
    traffic = psutil.net_io_counters(pernic=True)
    yield Reading(RECEIVED, {(name,): one.bytes_recv for name, one in traffic.items()})
    yield Reading(SENT, {(name,): one.bytes_sent for name, one in traffic.items()})
    lost = {(n,): one.errin + one.errout + one.dropin + one.dropout for n, one in traffic.items()}
    yield Reading(ERRORS, lost)


def _file_systems() -> Iterator[Reading]:
    sizes, free = {}, {}
    # Skip read-only file systems, such as images of packages and CDs: they are always full.
    parts = (part for part in psutil.disk_partitions() if "ro" not in part.opts.split(","))
    # A container sees one disk at many places; the first one is enough.
    mounts = {part.device: part.mountpoint for part in reversed([*parts])}
    for mount in sorted(mounts.values()):
        try:
            found = os.statvfs(mount)
        except OSError:
            continue
        name = os.fsencode(mount).decode(errors="replace")  # a kernel's names are any bytes
        sizes[name,] = found.f_blocks * found.f_frsize
        free[name,] = found.f_bavail * found.f_frsize
    yield Reading(DISK, sizes)
    yield Reading(DISK_FREE, free)


def _disks() -> Iterator[Reading]:
    counters = psutil.disk_io_counters(perdisk=True) or {}
    disks = {name: disk for name, disk in counters.items() if _is_whole(name)}
    yield Reading(DISK_READ, {(name,): disk.read_bytes for name, disk in disks.items()})
    yield Reading(DISK_WRITTEN, {(name,): disk.write_bytes for name, disk in disks.items()})


def _is_whole(disk: str) -> bool:
    """Return whether it is a hardware disk. Partitions, loop and memory devices, and devices made
    of other disks are not: their bytes would count twice."""
    return os.path.exists(f"/sys/block/{disk.replace('/', '!')}/device")
