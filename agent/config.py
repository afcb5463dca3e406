"""Configuration of one agent, built once in `__main__`, and its workers' environment.

Workers get the variables that they need or that the operator names: jobs run any code and may print
anything, so no secret of the agent's environment may reach them.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from oobleck.core.ids import NodeName, check_name, check_rack
from oobleck.core.job.code import CodePolicy
from oobleck.core.messages import FaultRule
from oobleck.host.gpu.devices import Gpu, device_kind
from oobleck.host.versions import Versions

#: Names, and beginnings of names that end with `*`.
PASSED = (
    # the process
    *("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_*", "XDG_*"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_*", "GLIBC_TUNABLES", "PYTHON*", "VIRTUAL_ENV"),
    # threads and devices
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "BLIS_*", "NUMEXPR_*", "ONEDNN_*"),
    *("DNNL_*", "ATEN_CPU_CAPABILITY", "CUBLASLT_*", "NVSHMEM_*"),
    *("CUDA_*", "CUBLAS_*", "CUDNN_*", "NVIDIA_*", "TORCH*", "PYTORCH_*", "TRITON_*"),
    # compilers of kernels
    *("CC", "CXX", "CPATH", "LIBRARY_PATH"),
    # the network between workers
    *("NCCL_*", "UCX_*", "FI_*", "OFI_*", "IBV_*", "RES_OPTIONS", "LOCALDOMAIN"),
    *("RDMAV_*", "UCC_*"),
    # models and tokenizers; not HF_TOKEN, since nothing is fetched
    *("HF_HOME", "HF_HUB_*", "HF_DATASETS_*", "TRANSFORMERS_*", "TOKENIZERS_*", "RAYON_*"),
    # checkpoints at a URL
    *("FSSPEC_*", "AWS_*", "GOOGLE_*", "GCSFS_*", "AZURE_*", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("STORAGE_EMULATOR_HOST", "CLOUDSDK_CONFIG"),
    *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "http_proxy", "https_proxy", "no_proxy", "all_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"),
)
_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?")
#: No host holds more; a larger number is a typing error.
MOST_WORKERS = 1024
MOST_BYTES = 1 << 62
#: The shortest notice that clouds give before they take a machine back.
DRAIN_GRACE_S = 120.0
MOST_GRACE_S = 86_400.0


def read_patterns(texts: Iterable[str]) -> tuple[str, ...]:
    """Read the names in texts like `NAME,PREFIX_*`. Raises ValueError."""
    patterns = [part.strip() for text in texts for part in text.split(",")]
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern):
            raise ValueError(
                f"--pass-env {pattern}: give names of variables, or beginnings of names with * at "
                "the end, such as MY_SETTING,MY_LIBRARY_*"
            )
    return tuple(patterns)


def passed_on(environment: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """Return the part of `environment` that workers get; `more`: patterns of the operator."""
    patterns = (*PASSED, *more)
    names = {pattern for pattern in patterns if not pattern.endswith("*")}
    beginnings = tuple(pattern[:-1] for pattern in patterns if pattern.endswith("*"))
    return {
        name: value
        for name, value in environment.items()
        if name in names or name.startswith(beginnings)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    #: host:port of the master; for several heads, with commas between them.
    master: str
    name: NodeName
    hostname: str
    worker_slots: int
    #: The workers' GPUs, slot by slot in turn; none: they compute on CPUs.
    gpus: tuple[Gpu, ...]
    #: Address that other nodes reach this one's workers by; None: the one that reaches the master.
    address: str | None
    memory_per_worker_bytes: int
    #: Bytes of its GPU that each worker takes before any model.
    gpu_context_bytes: int = 0
    #: Scripted faults of a drill.
    faults: tuple[FaultRule, ...]
    #: Starts the process that workers are forked from, with this environment.
    warm_command: tuple[str, ...]
    environment: Mapping[str, str]
    #: Command that prints samples of the GPUs; none: the reader of NVML.
    watch_command: tuple[str, ...] = ()
    versions: Versions = field(default_factory=Versions)
    #: Packages and directories whose functions jobs may load; *: any.
    allow_code: tuple[str, ...] = ()
    #: Jobs may bring code of their own.
    accept_code: bool = False
    #: Longest time for the work to move off before the agent ends.
    drain_grace_s: float = DRAIN_GRACE_S
    #: Label of the node's rack; empty: unknown.
    rack: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, "node")
        try:
            check_rack(self.rack)
        except ValueError as error:
            raise ValueError(f"--rack or OOBLECK_RACK: {error}") from error
        if self.worker_slots < 1:
            raise ValueError(
                f"--workers-per-node {self.worker_slots}: a node needs at least one worker"
            )
        if self.worker_slots > MOST_WORKERS:
            raise ValueError(
                f"--workers-per-node {self.worker_slots}: a node has at most {MOST_WORKERS}; "
                "give one worker per GPU, or a few per CPU"
            )
        if self.memory_per_worker_bytes < 1:
            raise ValueError("--memory-per-worker must be more than nothing")
        if self.memory_per_worker_bytes > MOST_BYTES:
            raise ValueError("--memory-per-worker is more than any host has; write it like 8GiB")

        if not 0 <= self.drain_grace_s <= MOST_GRACE_S:
            raise ValueError(
                f"--drain-grace {self.drain_grace_s:g}: give seconds from 0 (end at once) to a day"
            )

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.gpus else "cpu"

    @property
    def device_kind(self) -> str:
        """Name of the device that one worker computes on."""
        return device_kind(self.gpus, self.worker_slots, self.environment)

    @property
    def code(self) -> CodePolicy:
        """Jobs' code that the node runs, with each directory also as it is without links."""
        links = {os.path.realpath(one) for one in self.allow_code if os.sep in one}
        allows = tuple(sorted({*self.allow_code, *links}))
        return CodePolicy(accepts=self.accept_code, allows=allows)

    def gpu_of(self, slot: int) -> Gpu | None:
        """Return the only GPU that the worker of `slot` sees; None: it computes on CPUs."""
        return self.gpus[slot % len(self.gpus)] if self.gpus else None
