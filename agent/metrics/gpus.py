"""Metrics of the GPUs that the node's workers use, from what NVML has said of them last. Must not
know how they are shown, nor what is done about a sick one."""

from collections.abc import Callable, Iterator

from oobleck.agent.health import GpuHealth
from oobleck.host.gpu.health import CLOCK_HOLDS
from oobleck.host.gpu.sample import GpuSample
from oobleck.host.metrics.families import Family, Reading

_GPU = ("gpu",)

INFO = Family(
    "gauge",
    "oobleck_gpu_info",
    "1 for each GPU of the node's workers; the label gpu is its place on the PCI bus.",
    ("gpu", "uuid", "name", "driver"),
)
READABLE = Family(
    "gauge", "oobleck_gpu_readable", "1 while NVML tells how the GPU is, 0 where it cannot.", _GPU
)
SICK = Family(
    "gauge", "oobleck_gpu_sick", "1 where the GPU has to be reset, or its host restarted.", _GPU
)
TEMPERATURE = Family("gauge", "oobleck_gpu_temperature_celsius", "Temperature of the GPU.", _GPU)
POWER = Family("gauge", "oobleck_gpu_power_watts", "Power that the GPU takes.", _GPU)
UTILIZATION = Family(
    "gauge",
    "oobleck_gpu_utilization_ratio",
    "Part of the last moment, a second at most, in which a kernel ran, however few processors it "
    "used.",
    _GPU,
)
MEMORY = Family("gauge", "oobleck_gpu_memory_bytes", "Memory of the GPU.", _GPU)
USED = Family("gauge", "oobleck_gpu_memory_used_bytes", "Memory that is taken, by whomever.", _GPU)
CLOCK = Family("gauge", "oobleck_gpu_clock_hertz", "Clock of the multiprocessors.", _GPU)
MOST_CLOCK = Family("gauge", "oobleck_gpu_most_clock_hertz", "The highest that it can be.", _GPU)
HELD = Family(
    "gauge",
    "oobleck_gpu_clock_held_down",
    "1 where the clock is held down for that reason.",
    ("gpu", "reason"),
)
ECC = Family(
    "counter",
    "oobleck_gpu_ecc_errors_total",
    "Errors of memory that ECC corrected, or could not, since the driver was loaded.",
    ("gpu", "corrected"),
)
REMAPPED = Family(
    "gauge",
    "oobleck_gpu_remapped_rows",
    "Rows of memory that were replaced for errors that ECC could not correct.",
    _GPU,
)
RESET_WANTED = Family(
    "gauge",
    "oobleck_gpu_reset_wanted",
    "1 where a bad row or page of memory is replaced with the next reset.",
    _GPU,
)
XIDS = Family(
    "counter",
    "oobleck_gpu_xids_total",
    "Errors that the driver has reported since the agent began, by their number in NVIDIA's "
    "catalogue of Xids; the label gpu is empty where it does not say which GPU's.",
    ("gpu", "xid"),
)

#: What of a sample is a number of its own, as the family has it.
_NUMBERS: tuple[tuple[Family, Callable[[GpuSample], float | None]], ...] = (
    (TEMPERATURE, lambda board: board.temperature_c),
    (POWER, lambda board: board.power_w),
    (UTILIZATION, lambda board: board.utilization),
    (MEMORY, lambda board: board.memory_bytes),
    (USED, lambda board: board.memory_used_bytes),
    (CLOCK, lambda board: _hertz(board.clock_mhz)),
    (MOST_CLOCK, lambda board: _hertz(board.most_clock_mhz)),
    (REMAPPED, lambda board: board.rows_remapped),
    (RESET_WANTED, lambda board: _any(board.remap_pending, board.retirement_pending)),
)


def read(health: GpuHealth) -> Iterator[Reading]:
    """Read the metrics of GPUs. A number that a board or its driver does not give has no series."""
    boards = health.newest()
    known = {bus: board for bus, board in boards.items() if not board.error}
    yield Reading(INFO, {(bus, one.uuid, one.name, health.driver): 1 for bus, one in known.items()})
    watched = dict.fromkeys(health.places, 0.0)
    yield Reading(READABLE, {(bus,): float(bus in known and health.watched) for bus in watched})
    sick = health.sick_places()
    yield Reading(SICK, {(bus,): float(bus in sick) for bus in boards})
    # What changes all the time means nothing once it is old.
    live = known if health.watched else {}
    for family, number in _NUMBERS:
        told = {bus: number(board) for bus, board in live.items()}
        yield Reading(family, {(bus,): value for bus, value in told.items() if value is not None})
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
    told = [flag for flag in flags if flag is not None]
    return float(any(told)) if told else None
