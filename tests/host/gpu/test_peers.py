"""What NVML says of GPUs' ways to each other, by a module that stands for nvidia-ml-py."""

from types import SimpleNamespace
from typing import Any

from oobleck.host.gpu.nvml import Peers, ask_peers, read_peers

BUSES = (b"00000000:3B:00.0", b"00000000:B3:00.0", b"00000000:D8:00.0")


class NVMLError(Exception):
    pass


def nvml(statuses: dict[frozenset[int], int], ecc: dict[int, int]) -> Any:
    """Of three boards, the last of which cannot be opened; who is not in `ecc` has none."""

    def handle(number: int) -> int:
        if number == 2:
            raise NVMLError
        return number

    def mode(board: int) -> tuple[int, int]:
        if board not in ecc:
            raise NVMLError
        return ecc[board], 1

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetPciInfo=lambda board: SimpleNamespace(busId=BUSES[board]),
        nvmlDeviceGetP2PStatus=lambda one, other, index: statuses.get(frozenset((one, other)), 0),
        nvmlDeviceGetEccMode=mode,
    )


def test_gpus_that_reach_each_other() -> None:
    assert ask_peers(nvml({}, {0: 1})) == Peers()


def test_gpus_that_do_not_and_one_without_ecc() -> None:
    found = ask_peers(nvml({frozenset((0, 1)): 4}, {0: 0, 1: 1}))
    why = "a setting of the driver forbids it"
    assert found.apart == (("0000:3b:00.0", "0000:b3:00.0", why),)
    assert found.without_ecc == ("0000:3b:00.0",)


def test_a_host_without_a_driver_says_nothing() -> None:
    assert read_peers() == Peers()
