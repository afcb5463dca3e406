"""Configuration of one agent, built once in `__main__` and passed down."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from oobleck.core.ids import NodeName, check_name
from oobleck.core.messages import FaultRule
from oobleck.host.device import device_kind
from oobleck.host.gpu.choice import Gpu
from oobleck.host.versions import Versions

#: No host holds more; a larger number is a typing error.
MOST_WORKERS = 1024
MOST_BYTES = 1 << 62
#: The shortest notice that clouds give before they take a machine back.
DRAIN_GRACE_S = 120.0
MOST_GRACE_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    #: host:port of the master; of several heads, with commas between them.
    master: str
    name: NodeName
    hostname: str
    worker_slots: int
    #: Of the workers, slot by slot in turn; none: they compute on CPUs.
    gpus: tuple[Gpu, ...]
    #: Address that other nodes reach this one's workers by; None: the one that reaches the master.
    address: str | None
    memory_per_worker_bytes: int
    #: Scripted faults of a drill.
    faults: tuple[FaultRule, ...]
    #: Starts the process that workers are forked from, with this environment.
    warm_command: tuple[str, ...]
    environment: Mapping[str, str]
    #: Prints samples of the GPUs; none: what reads NVML.
    watch_command: tuple[str, ...] = ()
    versions: Versions = field(default_factory=Versions)
    #: Packages and directories whose functions jobs may load; *: any.
    allow_code: tuple[str, ...] = ()
    #: Jobs may bring code of their own.
    accept_code: bool = False
    #: How long the work may take to move off when the agent is told to end.
    drain_grace_s: float = DRAIN_GRACE_S

    def __post_init__(self) -> None:
        check_name(self.name, "node")
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
        """Name of what one worker computes on."""
        return device_kind(self.gpus, self.worker_slots, self.environment)

    def gpu_of(self, slot: int) -> Gpu | None:
        """Return the GPU of the worker of `slot`, which sees no other; None: it computes on CPUs.
        If there are more slots than GPUs, slots share them."""
        return self.gpus[slot % len(self.gpus)] if self.gpus else None
