"""Sample of a host's GPUs by NVML at one moment, as plain data.

Must not know its meaning.
"""

import msgspec


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """Process that computes on a GPU."""

    pid: int
    #: None: unknown to NVML.
    memory_bytes: int | None = None


class GpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """Sample of one board. A field is None where the board, the driver or the caller's rights do
    not allow it."""

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
