"""Reader of this host's GPUs by NVML, through the package nvidia-ml-py if that is installed.

  python -m oobleck.host.gpu.nvml [SECONDS | peers]

prints a `Sample` as a line of JSON. With SECONDS it prints one at that interval, and one with each
error that the driver reports. With `peers` it prints `Peers`: GPUs that cannot reach each other's
memory, and those with ECC off. It is a process of its own because a call of a sick driver may never
return.
"""

import ctypes
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations
from typing import Any

import msgspec

from oobleck.host.gpu.sample import GpuProcess, GpuSample, Sample, Xid
from oobleck.host.system.process import output_of, python

# ---- peers


_ANSWER_S = 20.0
#: nvmlGpuP2PCapsIndex_t: reading. nvidia-ml-py's constant of that name is not a number.
_READ = 0
#: nvmlGpuP2PStatus_t, as in nvml.h.
_REASONS = {
    1: "the chipset does not do it",
    2: "the GPUs do not do it",
    3: "the chipset does not do it across sockets",
    4: "a setting of the driver forbids it",
    5: "not supported",
    6: "not known",
}


class Peers(msgspec.Struct, frozen=True, kw_only=True):
    #: Places of two GPUs, and the reason.
    apart: tuple[tuple[str, str, str], ...] = ()
    without_ecc: tuple[str, ...] = ()


def read_peers() -> Peers:
    """Read `Peers` in a process of its own; empty if NVML does not answer."""
    try:
        output = output_of(python("oobleck.host.gpu.nvml", "peers"), _ANSWER_S)
        return msgspec.json.decode(output, type=Peers)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError):
        return Peers()


def ask_peers(nvml: Any) -> Peers:
    """Ask NVML. `nvml`: the module pynvml. Raises its NVMLError if it cannot be asked at all."""
    nvml.nvmlInit()
    boards: dict[str, Any] = {}
    for number in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            boards[_bus(nvml, handle)] = handle
    apart = []
    for (one, first), (other, second) in combinations(boards.items(), 2):
        with suppress(nvml.NVMLError):
            status = nvml.nvmlDeviceGetP2PStatus(first, second, _READ)
            if status:
                apart.append((one, other, _REASONS.get(int(status), f"status {status}")))
    without = []
    for bus, handle in boards.items():
        with suppress(nvml.NVMLError):  # boards without ECC raise it
            if not nvml.nvmlDeviceGetEccMode(handle)[0]:
                without.append(bus)
    return Peers(apart=tuple(apart), without_ecc=tuple(without))


#: Interval of polling for errors where NVML cannot wait for them, and of reports where many come.
_LEAST_S = 0.5
#: Most errors that are reported with one sample.
_MOST_XIDS = 64


def read_forever(every_s: float | None) -> Iterator[Sample]:
    """Yield a sample at once, then one at each interval and error; None: only one."""
    try:
        import pynvml as nvml
    except ImportError:
        problem = "the package nvidia-ml-py is not installed: pip install nvidia-ml-py"
        yield Sample(problem=problem, for_good=True)
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        missing = error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND
        yield Sample(problem=f"NVML: {error}", for_good=missing)
        return
    reader = _Reader(nvml)
    yield reader.read(())
    while every_s is not None:
        yield reader.read(reader.wait(every_s))


class _Reader:
    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._driver = _text(self._ask("nvmlSystemGetDriverVersion"))
        #: Handles by place.
        self._boards: dict[str, Any] = {}
        for number in range(self._ask("nvmlDeviceGetCount") or 0):
            # A board that cannot be opened has no known place; torch misses it too.
            with suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(number)
                self._boards[_bus(nvml, handle)] = handle
        #: Places by the targets of handles: a lost board no longer reports its place.
        self._places = {_address(handle): bus for bus, handle in self._boards.items()}
        self._events = self._listen()

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Call NVML's function `name`; return None if the driver, the package or the board lacks
        it. Raises NVMLError if the board is gone."""
        nvml, call = self._nvml, getattr(self._nvml, name, None)
        try:
            return None if call is None else call(*arguments)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                raise
            return None

    def _listen(self) -> Any:
        """Return the event set on which to wait for errors; None if this driver reports none."""
        nvml, listening = self._nvml, False
        events = self._ask("nvmlEventSetCreate")
        for handle in self._boards.values() if events is not None else ():
            with suppress(nvml.NVMLError):
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                listening = True
        return events if listening else None

    def wait(self, timeout_s: float) -> tuple[Xid, ...]:
        """Wait up to `timeout_s` for an error. Return it, and those that have arrived with it."""
        nvml, begun = self._nvml, time.monotonic()
        found: list[Xid] = []
        while self._events is not None and len(found) < _MOST_XIDS:
            try:
                event = nvml.nvmlEventSetWait(self._events, 0 if found else int(1000 * timeout_s))
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_TIMEOUT:
                    return tuple(found)
                break  # a lost GPU, which the next sample reports
            if not found:
                time.sleep(_LEAST_S)
            bus = self._places.get(_address(event.device), "")
            found.append(Xid(bus=bus, code=int(event.eventData)))
        if not found:
            time.sleep(max(_LEAST_S, timeout_s - (time.monotonic() - begun)))
        return tuple(found)

    def read(self, xids: tuple[Xid, ...]) -> Sample:
        gpus = tuple(self._board(bus, handle) for bus, handle in self._boards.items())
        return Sample(gpus=gpus, xids=xids, driver=self._driver)

    def _board(self, bus: str, handle: Any) -> GpuSample:
        try:
            return self._read_board(bus, handle)
        except self._nvml.NVMLError as error:
            return GpuSample(bus=bus, error=str(error))

    def _read_board(self, bus: str, handle: Any) -> GpuSample:
        nvml, ask = self._nvml, self._ask
        volatile = nvml.NVML_VOLATILE_ECC
        rows = ask("nvmlDeviceGetRemappedRows", handle) or (None, None, None, None)
        # Drivers before 535 have only the older name, which means the same.
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:
            reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        milliwatts = ask("nvmlDeviceGetPowerUsage", handle)
        use = ask("nvmlDeviceGetUtilizationRates", handle)
        divided = ask("nvmlDeviceGetMigMode", handle)
        running = ask("nvmlDeviceGetComputeRunningProcesses_v3", handle)
        return GpuSample(
            bus=bus,
            uuid=_text(ask("nvmlDeviceGetUUID", handle)),
            name=_text(ask("nvmlDeviceGetName", handle)),
            ecc_uncorrected=ask(
                "nvmlDeviceGetTotalEccErrors",
                *(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, volatile),
            ),
            ecc_corrected=ask(
                "nvmlDeviceGetTotalEccErrors",
                *(handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, volatile),
            ),
            rows_remapped=rows[1],
            remap_pending=_flag(rows[2]),
            remap_failed=_flag(rows[3]),
            retirement_pending=_flag(ask("nvmlDeviceGetRetiredPagesPendingStatus", handle)),
            clock_reasons=reasons,
            clock_mhz=ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            most_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
            temperature_c=ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            power_w=None if milliwatts is None else milliwatts / 1000,
            utilization=None if use is None else use.gpu / 100,
            memory_bytes=None if memory is None else memory.total,
            memory_used_bytes=None if memory is None else memory.used,
            divided=divided is not None and bool(divided[0]),
            processes=None if running is None else tuple(map(_process, running)),
        )


def _bus(nvml: Any, handle: Any) -> str:
    """Return the board's address as in /sys/bus/pci/devices."""
    domain, _, rest = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _flag(value: int | None) -> bool | None:
    return None if value is None else bool(value)


def _process(entry: Any) -> GpuProcess:
    return GpuProcess(pid=int(entry.pid), memory_bytes=entry.usedGpuMemory)


def _text(value: str | bytes | None) -> str:
    if value is None:
        return ""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def main() -> None:
    if sys.argv[1:] == ["peers"]:
        _print(_peers_here())
        return
    every_s = float(sys.argv[1]) if sys.argv[1:] else None
    for sample in read_forever(every_s):
        _print(sample)


def _print(value: Sample | Peers) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def _peers_here() -> Peers:
    """Return what NVML says of this host's GPUs; empty if it cannot be asked."""
    try:
        import pynvml as nvml
    except ImportError:
        return Peers()
    try:
        return ask_peers(nvml)
    except nvml.NVMLError:
        return Peers()


if __name__ == "__main__":
    main()
