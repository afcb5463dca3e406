"""Devices that this host computes with; loads no torch and makes no CUDA context.

The choice of GPUs, of NCCL's network interfaces, and of the CPUs near a GPU goes by the names of
CUDA and the kernel. GPUs come from a separate process that loads torch, which alone knows which of
them the environment shows to workers, and in which order. Must not know faults of GPUs.
"""

import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from oobleck.host.system.process import output_of, python

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
    #: Bytes in use on the first GPU, beyond torch's own memory, after a process has computed there;
    #: 0: it cannot compute.
    context_bytes: int = 0


def chosen_gpus(option: str | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs of --gpus, else of CUDA_VISIBLE_DEVICES; empty: all. Raises ValueError."""
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


# ---- devices of workers


_MODEL = re.compile(r"^model name\s*:\s*(.+)$", re.MULTILINE)
_SPACES = re.compile(r"\s+")
#: Torch's compiled code, below the home of the workers' user. It may be deleted at any time.
COMPILED = "~/.cache/oobleck/compiled"
#: Marks the name of a device that several workers share; their number follows.
SHARED = ", shared by "
#: Time to load torch and the driver on a busy host.
_PROBE_TIMEOUT_S = 120

#: Some libraries ask torch at their import whether there is a GPU. With this it asks NVML and
#: leaves the driver alone, which must be unused in the process that workers are forked from.
_FORK_ENVIRONMENT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_NCCL_ENVIRONMENT = {
    # Number GPUs as nvidia-smi does.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    # Every communicator has a stream. Streams beyond the number of connections share one. There,
    # work queued after a receive that waits for its peer may hold up another stream's kernels.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # To load all kernels takes seconds and a gigabyte. But the first use of one that is loaded
    # later waits for all others on the device, including a receive that waits for its peer. So
    # workers use the job's kernels before they connect (`worker/profiling/preflight.py`).
    "CUDA_MODULE_LOADING": "LAZY",
    # Have torch start neither watchdog nor monitor: the worker detects lost peers itself. The
    # watchdog would call NCCL beside the worker's threads, and sleep for a minute after each failed
    # operation, for which the group's destructor waits.
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    # For operators who enable the watchdog all the same: keep it from waiting, and from ending the
    # process, raising in its own thread or writing files for an error. The monitor would end a
    # process whose watchdog waits for a kernel to abort.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    # Limit how long a group's first operation waits for its connection: no abort ends that wait.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "45",
    # Connect at once. By default the first large all-reduce does, in the middle of a step.
    "NCCL_RUNTIME_CONNECT": "0",
    # Without NVLS: its multicast memory is freed by all members together, so an abort by some of
    # them may hang (nvidia-resiliency-ext, known issues).
    "NCCL_NVLS_ENABLE": "0",
    # Let freed memory be reused in other sizes: after a change of plan, tensors differ in size.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


def find_gpus(environment: Mapping[str, str], chosen: Sequence[str] = ()) -> GpuReport:
    """Find the GPUs that processes with `environment` can use: those chosen, by their names to
    CUDA, or all. Raises ValueError if there are none, or a chosen one cannot be used."""
    try:
        command = python("oobleck.worker.runtime.device", *chosen)
        output = output_of(command, _PROBE_TIMEOUT_S, environment)
        report = msgspec.json.decode(output, type=GpuReport)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        report = GpuReport(problem=lines[-1] if lines else f"exit code {error.returncode}")
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        report = GpuReport(problem=str(error))
    if report.problem or not report.gpus:
        raise ValueError(
            f"--device cuda: no GPU can be used here ({report.problem or 'none is visible'}); "
            "check the driver, --gpus or CUDA_VISIBLE_DEVICES, and that torch is built for CUDA, "
            "or use --device cpu"
        )
    return report


def worker_environment(device: str, address: str = "") -> dict[str, str]:
    """Return the environment variables that workers need beside the user's own. `device`: cpu or
    cuda; `address`: NCCL uses the interface that has it."""
    common = {
        "OMP_NUM_THREADS": "1",
        # Files there are executed, so the folder is not torch's default in /tmp.
        "TORCHINDUCTOR_CACHE_DIR": os.path.expanduser(COMPILED),
        # torch warns twice for each poll of a worker that waits for others to arrive.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if device != "cuda":
        return common
    interface = _interface_of(address)
    own = {"NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}
    return common | _FORK_ENVIRONMENT | _NCCL_ENVIRONMENT | own


def _interface_of(address: str) -> str:
    """Return the name of the network interface that has the address; empty if none has."""
    for name, has in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in has):
            return name
    return ""


def device_kind(gpus: Sequence[Gpu], workers: int, environment: Mapping[str, str]) -> str:
    """Return the name of the device of one of the host's `workers`; equal names mean equal speed.
    Without `gpus` it is the CPU, with the number of threads in `environment`."""
    if gpus:
        sharing = -(-workers // len(gpus))
        names = ", ".join(sorted({gpu.name for gpu in gpus}))
        return f"cuda {names}" + (f"{SHARED}{sharing}" if sharing > 1 else "")
    threads = environment.get("OMP_NUM_THREADS", "all")
    return f"cpu {_cpu_name()}, {threads} {'thread' if threads == '1' else 'threads'}"


def _cpu_name() -> str:
    try:
        match = _MODEL.search(Path("/proc/cpuinfo").read_text(errors="replace"))
    except OSError:
        return "unknown"
    return _SPACES.sub(" ", match[1].strip()) if match else "unknown"
