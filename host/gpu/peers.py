"""Report, by NVML, of GPUs that cannot reach each other's memory, and of those with ECC off.

  python -m oobleck.host.gpu.peers

prints `Peers` as a line of JSON. It is a process of its own because a call of a sick driver may
never return. Must not know the reaction.
"""

import subprocess
import sys
from contextlib import suppress
from itertools import combinations
from typing import Any

import msgspec

from oobleck.host.system.process import output_of, python

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
    """Read `Peers` in a process of its own; empty if NVML does not answer, which another check
    reports."""
    try:
        output = output_of(python("oobleck.host.gpu.peers"), _ANSWER_S)
        return msgspec.json.decode(output, type=Peers)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError):
        return Peers()


def ask(nvml: Any) -> Peers:
    """Ask NVML. `nvml`: the module pynvml. Raises its NVMLError if it cannot be asked at all."""
    nvml.nvmlInit()
    boards: dict[str, Any] = {}
    for number in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            boards[_place(nvml, handle)] = handle
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


def _place(nvml: Any, handle: Any) -> str:
    bus = nvml.nvmlDeviceGetPciInfo(handle).busId
    text = bus.decode() if isinstance(bus, bytes) else str(bus)
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"


def main() -> None:
    try:
        import pynvml as nvml
    except ImportError:
        found = Peers()
    else:
        try:
            found = ask(nvml)
        except nvml.NVMLError:
            found = Peers()
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


if __name__ == "__main__":
    main()
