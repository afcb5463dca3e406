"""Metrics of the host, as its kernel tells them. Reading them may wait for a disk, so it is not for
the event loop. Must not know workers, nor what the agent does."""

import contextlib
import os
from collections.abc import Iterator

import psutil

from oobleck.host.metrics.families import Family, Reading, single

PROCESSORS = Family("gauge", "oobleck_host_processors", "Processors of the host.")
BUSY = Family(
    "counter",
    "oobleck_host_processor_seconds_total",
    "Time of the host's processors, by what they spent it on.",
    ("mode",),
)
LOAD = Family("gauge", "oobleck_host_load", "Processes that ran or waited, over the last minute.")
MEMORY = Family("gauge", "oobleck_host_memory_bytes", "Memory of the host.")
AVAILABLE = Family(
    "gauge", "oobleck_host_memory_available_bytes", "Memory that processes can still get."
)
SWAPPED = Family("gauge", "oobleck_host_swap_used_bytes", "Memory that is swapped out.")
DISK = Family(
    "gauge",
    "oobleck_host_disk_bytes",
    "Size of a file system on a local disk that can be written.",
    ("mount",),
)
DISK_FREE = Family(
    "gauge",
    "oobleck_host_disk_free_bytes",
    "Room left on it for other users than root.",
    ("mount",),
)
DISK_READ = Family(
    "counter", "oobleck_host_disk_read_bytes_total", "Bytes read of a whole disk.", ("disk",)
)
DISK_WRITTEN = Family(
    "counter", "oobleck_host_disk_written_bytes_total", "Bytes written to a whole disk.", ("disk",)
)
RECEIVED = Family(
    "counter",
    "oobleck_host_network_received_bytes_total",
    "Bytes received at an interface, by workers and all else.",
    ("interface",),
)
SENT = Family(
    "counter",
    "oobleck_host_network_sent_bytes_total",
    "Bytes sent at an interface, by workers and all else.",
    ("interface",),
)
ERRORS = Family(
    "counter",
    "oobleck_host_network_errors_total",
    "Packets with errors, and dropped ones, at an interface.",
    ("interface",),
)

_MODES = ("user", "system", "iowait", "steal", "idle")


def read() -> Iterator[Reading]:
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
    # What cannot be written never fills up: images of packages and CDs are full.
    parts = (part for part in psutil.disk_partitions() if "ro" not in part.opts.split(","))
    # A container sees one disk at many places; the first one tells as much as all.
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
