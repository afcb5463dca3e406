"""Diagnosis from samples of GPUs: whether a GPU is sick, and why one is slow.

A GPU is sick if it has to be reset, or its host restarted, before it can be trusted again, by
NVML's own report, a bad row of memory that could not be replaced, or an Xid whose "immediate
action" in NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors) is RESET_GPU, RESTART_BM or a
workflow that ends there. Everything else is only reported. Xids of the program that ran (13, 31,
43, 45 and others) are no evidence about the GPU. Pure. Must not know the origin of samples, nor the
reaction.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from oobleck.host.gpu.sample import GpuSample, Xid

_RESET = "reset it (nvidia-smi --gpu-reset) or restart the host; if it comes back, replace it"
_LATER = "reset it (nvidia-smi --gpu-reset) when it is convenient"
_SICK: Mapping[int, str] = {
    46: "it has stopped processing",
    48: "memory error that ECC cannot correct",
    62: "its micro-controller has halted",
    64: "a bad row of memory could not be replaced",
    74: "NVLink error",
    79: "it has fallen off the bus",
    95: "memory error that hits all programs",
    109: "it does not switch contexts",
    110: "security fault",
    119: "its system processor does not answer",
    120: "error of its system processor",
    136: "NVLink does not come up",
    140: "memory error that ECC cannot correct, and the driver could not mark",
    143: "it could not be initialised",
    158: "it has timed out for good",
}
_MINOR: Mapping[int, str] = {
    63: "a bad row of memory is replaced with the next reset",
    92: "ECC corrects many errors of memory",
    94: "memory error that hit one program alone",
    121: "corrected errors on its link to the CPU",
    **dict.fromkeys(range(144, 151), "NVLink error"),
    155: "NVLink error",
    156: "a bad part of it is retired with the next reset",
    157: "a bad part of it could not be retired",
}
#: Bits of nvmlClocksEventReasons, those that explain most first: heat and power before settings.
_REASONS: Mapping[int, str] = {
    0x40: "too hot",
    0x20: "too hot",
    0x80: "the power supply holds it back",
    0x08: "the hardware holds it back",
    0x04: "at its power limit",
    0x10: "in step with a slower GPU (sync boost)",
    0x02: "clocks are set lower",
    0x100: "clocks are set lower for a display",
}
#: The same bits by their names in metrics.
CLOCK_HOLDS: Mapping[str, int] = {
    "heat": 0x20 | 0x40,
    "power_supply": 0x80,
    "power_limit": 0x04,
    "hardware": 0x08,
    "slower_gpu": 0x10,
    "setting": 0x02 | 0x100,
}
#: Samples per diagnosis: a single one means nothing.
LOOK = 6


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """Fault of a GPU."""

    #: Empty: it is unknown which one.
    bus: str
    what: str
    fix: str
    #: True if nothing should be trained on it.
    sick: bool = False

    def __str__(self) -> str:
        return f"GPU {self.bus or 'unknown'}: {self.what}; {self.fix}"


def troubles(boards: Iterable[GpuSample], xids: Iterable[Xid]) -> tuple[Trouble, ...]:
    """Return the faults in the newest samples and in the errors so far, the sick GPUs first."""
    found = [trouble for board in boards for trouble in _of_board(board)]
    for xid in dict.fromkeys(xids):
        known = _SICK.get(xid.code) or _MINOR.get(xid.code)
        if known is not None:
            # An Xid that names no GPU may be about the GPU of another agent of this host.
            sick = xid.code in _SICK and xid.bus != ""
            fix = "restart the host" if xid.code == 79 else _RESET if sick else _LATER
            what = f"Xid {xid.code}, {known}"
            found.append(Trouble(bus=xid.bus, what=what, fix=fix, sick=sick))
    return tuple(sorted(found, key=lambda trouble: not trouble.sick))


def _of_board(board: GpuSample) -> Iterable[Trouble]:
    bus = board.bus
    if board == GpuSample(bus=bus):
        yield Trouble(bus=bus, what="NVML can read nothing of it", fix="check the kernel's log")
    if board.error:
        yield Trouble(bus=bus, what=board.error, fix="restart the host", sick=True)
    if board.remap_failed:
        what = "a bad row of memory could not be replaced"
        yield Trouble(bus=bus, what=what, fix="replace the GPU", sick=True)
    elif board.remap_pending:
        what = "a bad row of memory is replaced with the next reset"
        yield Trouble(bus=bus, what=what, fix=_LATER)
    if board.retirement_pending:
        what = "a bad page of memory is retired with the next reset"
        yield Trouble(bus=bus, what=what, fix=_LATER)
    if board.ecc_uncorrected:
        what = f"{board.ecc_uncorrected} memory errors that ECC could not correct, since it started"
        yield Trouble(bus=bus, what=what, fix=_LATER)


def hindrance(samples: Sequence[GpuSample], own: Collection[int]) -> str:
    """Return what slows a GPU in most of the samples, newest last; empty if nothing shows. `own`:
    processes that may use it; if NVML names none of them, its numbers may be of another
    namespace."""
    most = len(samples) // 2 + 1
    words = dict.fromkeys(
        word
        for bit, word in _REASONS.items()
        if sum(bool((each.clock_reasons or 0) & bit) for each in samples) >= most
    )
    # The driver sets this bit together with a more precise one: heat or the power supply.
    if len(words) > 1:
        words.pop("the hardware holds it back", None)
    newest = samples[-1] if samples else GpuSample(bus="")
    parts = list(words)
    if words and newest.clock_mhz and newest.most_clock_mhz:
        parts.append(f"{newest.clock_mhz} of {newest.most_clock_mhz} MHz")
    if "too hot" in words and newest.temperature_c is not None:
        parts.append(f"{newest.temperature_c} °C")
    pids = [process.pid for process in newest.processes or ()]
    others = [pid for pid in pids if pid not in own] if set(pids) & set(own) else []
    if others:
        parts.append(f"shared with process {', '.join(map(str, others))}")
    return ", ".join(parts)
