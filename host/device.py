"""Devices that this host computes with; loads no torch and makes no CUDA context.

The names of CPUs come from the kernel. GPUs come from a separate process that loads torch, which
alone knows which of them the environment shows to workers, and in which order.
"""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from oobleck.host.gpu.choice import Gpu, GpuReport
from oobleck.host.system.process import output_of, python

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
    # The first use of a lazily loaded kernel waits for all others on the device, including a
    # receive that waits for its peer.
    "CUDA_MODULE_LOADING": "EAGER",
    # torch's watchdog must not end the process for an error, raise it in its own thread, write
    # files about it or wait. The worker recovers from a lost peer itself. Its monitor would end a
    # process whose watchdog waits for a kernel to abort.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    # Longest wait of a group's first use for its connection, which an abort cannot end.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "45",
    # Otherwise the first large sum connects its members in the middle of a step.
    "NCCL_RUNTIME_CONNECT": "0",
    # All members of a communicator free the switch's multicast memory together, so an abort by some
    # may hang (nvidia-resiliency-ext, known issues).
    "NCCL_NVLS_ENABLE": "0",
    # Return memory in pieces of the requested sizes, since plans differ in their needs.
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
    """Return the environment variables that workers need beside the user's own.

    `device`: cpu or cuda; `address`: where others reach this host, so that NCCL uses the interface
    with that address.
    """
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

    `gpus`: GPUs that the workers use; without any they compute on CPUs, with the number of threads
    in `environment`.
    """
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
