"""Sample of a host's GPUs by NVML at one moment, as plain data.

Must not know what it means.
"""

import msgspec


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """Process that computes on a GPU."""

    pid: int
    #: None: NVML does not say.
    memory_bytes: int | None = None


class GpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """Sample of one board. None in a field: the board, the driver or the caller's rights do not
    give it."""

    #: As in /sys/bus/pci/devices.
    bus: str
    uuid: str = ""
    name: str = ""
    #: Why it cannot be read any more, in NVML's words; empty: it can.
    error: str = ""
    #: Errors of memory that ECC could not correct, and could, since the driver was loaded.
    ecc_uncorrected: int | None = None
    ecc_corrected: int | None = None
    #: Rows of memory that were replaced for uncorrected errors; a replacement waits for a reset;
    #: one has failed.
    rows_remapped: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    #: Of boards that retire pages instead: one waits for a reset.
    retirement_pending: bool | None = None
    #: Bits of nvmlClocksEventReasons: what holds the clocks down.
    clock_reasons: int | None = None
    clock_mhz: int | None = None
    most_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    #: Part of the last moment in which a kernel ran, 0 to 1.
    utilization: float | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    #: It is divided into parts (MIG).
    divided: bool = False
    processes: tuple[GpuProcess, ...] | None = None


class Xid(msgspec.Struct, frozen=True, kw_only=True):
    """Error that the driver has reported of a board, by its number in NVIDIA's catalogue."""

    #: Empty: NVML does not say which board's.
    bus: str
    code: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    gpus: tuple[GpuSample, ...] = ()
    #: Reported since the sample before.
    xids: tuple[Xid, ...] = ()
    driver: str = ""
    #: Why nothing can be read at all; empty: it can.
    problem: str = ""
    #: Nor later: this host lacks what it takes.
    for_good: bool = False
