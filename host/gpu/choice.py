"""Choice of the GPUs that workers use, of NCCL's network interfaces, and of the CPUs near a GPU.

Names are those of CUDA and the kernel. Must not know faults of GPUs.
"""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

_NUMBER = re.compile(r"[0-9]+")
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")
_BUS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ADAPTER = re.compile(r"([A-Za-z0-9_.-]+)(:[0-9]+)?")
_SYS = Path("/sys")


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """GPU, or part of a divided one (MIG), that workers of this host may use."""

    name: str
    #: Unique over all GPUs.
    uuid: str
    memory_bytes: int
    #: PCI address as in /sys/bus/pci/devices; parts of a divided GPU have the same one.
    bus: str = ""
    #: Value of CUDA_VISIBLE_DEVICES that shows only this GPU to a process.
    visible: str = ""
    #: CPUs nearest to it; none: unknown to the kernel.
    cpus: tuple[int, ...] = ()


class GpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs of a host, in the order of their numbers."""

    gpus: tuple[Gpu, ...] = ()
    #: Reason why there are none, or one of those asked for is missing.
    problem: str = ""
    #: Versions that torch was built with; empty: without.
    cuda: str = ""
    nccl: str = ""


def chosen_gpus(option: str | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs named by --gpus, or else by CUDA_VISIBLE_DEVICES; empty means all. Raises
    ValueError."""
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    if option is None:
        return () if shown is None else _before_the_end(shown)
    names = tuple(part.strip() for part in option.split(","))
    if shown is not None and _before_the_end(shown) != names:
        raise ValueError(
            f"--gpus {option}: CUDA_VISIBLE_DEVICES={shown} says another thing; leave one of them "
            "out"
        )
    for name in names:
        if not (_NUMBER.fullmatch(name) or _UUID.fullmatch(name)):
            raise ValueError(
                f"--gpus {option}: {name!r} is no GPU; give numbers, or names that begin with "
                "GPU- or MIG-, as 'nvidia-smi -L' shows them, with commas between"
            )
        if names.count(name) > 1:
            raise ValueError(f"--gpus {option}: {name} is given twice")
    return names


def _before_the_end(shown: str) -> tuple[str, ...]:
    """Split CUDA_VISIBLE_DEVICES, up to an entry of -1, at which CUDA ends the list."""
    names = [part.strip() for part in shown.split(",")]
    return tuple(names[: names.index("-1")] if "-1" in names else names) or ("",)


def check_distinct(gpus: Sequence[Gpu], option: str | None) -> None:
    """Raise ValueError if two names mean one GPU. `option`: --gpus."""
    source = "CUDA_VISIBLE_DEVICES" if option is None else "--gpus"
    for number, gpu in enumerate(gpus):
        if gpu.uuid in (other.uuid for other in gpus[:number]):
            raise ValueError(f"{source}: {gpu.visible} is a GPU that another name there means too")


def near_cpus(bus: str, root: Path = _SYS) -> tuple[int, ...]:
    """Return the CPUs nearest to the device, in order; none: unknown to the kernel."""
    try:
        text = (_device(bus, root) / "local_cpulist").read_text()
        return _read_cpus(text)
    except (OSError, ValueError):
        return ()


def _device(bus: str, root: Path) -> Path:
    if _BUS.fullmatch(bus) is None:
        raise ValueError(f"{bus!r} is no place on a PCI bus")
    return root / "bus/pci/devices" / bus


def _read_cpus(text: str) -> tuple[int, ...]:
    """Parse a list of CPUs such as 0-3,8."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def driver_version(root: Path = _SYS) -> str:
    """Return the version of NVIDIA's kernel module; empty if it is not loaded."""
    try:
        return (root / "module/nvidia/version").read_text(errors="replace").strip()[:64]
    except OSError:
        return ""


def interface_address(name: str) -> str:
    """Return an address of the interface that others can reach. Raises ValueError."""
    interfaces = psutil.net_if_addrs()
    if name not in interfaces:
        known = ", ".join(sorted(interfaces))
        raise ValueError(f"--interface {name}: this host has no such interface; it has {known}")
    for family in (socket.AF_INET, socket.AF_INET6):
        for one in interfaces[name]:
            if one.family == family and not one.address.startswith("fe80"):
                return str(one.address)
    raise ValueError(f"--interface {name}: it has no address; give it one, or name another")


def network_environment(
    interface: str | None, adapters: str | None, root: Path = _SYS
) -> dict[str, str]:
    """Return the variables that choose NCCL's interface and adapters (HCAs). Raises ValueError."""
    told = {} if interface is None else {"NCCL_SOCKET_IFNAME": f"={interface}"}
    if adapters is None:
        return told
    if adapters == "none":
        return told | {"NCCL_IB_DISABLE": "1"}
    folder = root / "class/infiniband"
    known = sorted(os.listdir(folder)) if folder.is_dir() else []
    for part in adapters.split(","):
        match = _ADAPTER.fullmatch(part)
        if match is None or match[1] not in known:
            there = ", ".join(known) or "none"
            raise ValueError(
                f"--hca {adapters}: this host has no adapter {part!r}; it has {there}; give names "
                "like mlx5_0 or mlx5_0:1 with commas between, or 'none'"
            )
    return told | {"NCCL_IB_HCA": f"={adapters}"}
