"""Reader of this host's GPUs by NVML, through the package nvidia-ml-py if that is installed.

  python -m oobleck.host.gpu.nvml [SECONDS]

prints a `Sample` as a line of JSON. With SECONDS it prints one at that interval, and one with each
error that the driver reports. It is a process of its own because a call of a sick driver may never
return.
"""

import ctypes
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from oobleck.host.gpu.sample import GpuProcess, GpuSample, Sample, Xid

#: Interval of polling for errors where NVML cannot wait for them, and of reports where many come.
_LEAST_S = 0.5
#: Most errors that are reported with one sample.
_MOST_XIDS = 64


def read_forever(every_s: float | None) -> Iterator[Sample]:
    """Yield a sample at once, then one every so many seconds and with each error; None:
    only one."""
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
                self._boards[self._bus(handle)] = handle
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

    def _bus(self, handle: Any) -> str:
        domain, _, rest = _text(self._nvml.nvmlDeviceGetPciInfo(handle).busId).partition(":")
        return f"{int(domain, 16):04x}:{rest.lower()}"

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
        """Return the errors that arrive within the time; after the first, those that arrive with
        it.
        """
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


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _flag(value: int | None) -> bool | None:
    return None if value is None else bool(value)


def _process(told: Any) -> GpuProcess:
    return GpuProcess(pid=int(told.pid), memory_bytes=told.usedGpuMemory)


def _text(value: str | bytes | None) -> str:
    if value is None:
        return ""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def main() -> None:
    every_s = float(sys.argv[1]) if sys.argv[1:] else None
    for sample in read_forever(every_s):
        sys.stdout.write(msgspec.json.encode(sample).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
