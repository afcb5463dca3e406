"""Devices that this host computes with; loads no torch and makes no CUDA context.

The names of CPUs come from the kernel, GPUs from a process of their own that loads torch, which
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
#: What torch has compiled, below the home of the user whom the workers run as. Anything may be
#: removed there at any time.
COMPILED = "~/.cache/oobleck/compiled"
#: In the name of a device that several workers have; how many comes behind.
SHARED = ", shared by "
#: Loading torch and the driver on a busy host.
_PROBE_TIMEOUT_S = 120

#: Some libraries ask torch at their import whether there is a GPU; this way it asks NVML and leaves
#: the driver alone, which must not be in use in the process that workers are forked from.
_FORK_ENVIRONMENT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_NCCL_ENVIRONMENT = {
    # Numbers of GPUs are those of nvidia-smi.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    # Every communicator has a stream. Streams beyond the number of connections share one, where
    # what is queued behind a receive that waits for its peer may hold up another stream's kernels.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # The first use of a kernel that is loaded late waits for all others on the device, a receive
    # that waits for its peer among them.
    "CUDA_MODULE_LOADING": "EAGER",
    # torch's watchdog must not end the process for an error, raise it in its own thread, write
    # files about it or wait: a lost peer is the worker's to recover from. Its monitor would end a
    # process whose watchdog waits for a kernel to abort.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    # How long the first use of a group waits for it to connect, which an abort cannot end.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "45",
    # Else the first large sum connects its members, in the middle of a step.
    "NCCL_RUNTIME_CONNECT": "0",
    # Multicast memory of the switch is freed by all of a communicator's members together, so an
    # abort of some may hang (nvidia-resiliency-ext, known issues).
    "NCCL_NVLS_ENABLE": "0",
    # Memory comes back in pieces of the size that was asked for: plans differ in what they need.
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
    cuda; `address`: where others reach this host; NCCL then uses the interface that has it."""
    common = {
        "OMP_NUM_THREADS": "1",
        # What lies there is run, so it is not where torch has it, in /tmp.
        "TORCHINDUCTOR_CACHE_DIR": os.path.expanduser(COMPILED),
        # torch warns twice for each look of a worker that waits for others to arrive.
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
    """Return the name of what one of the host's `workers` computes on; equal names mean equal
    speed.

    `gpus`: that the workers use; none: they compute on CPUs, and `environment` says with how many
    threads.
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
