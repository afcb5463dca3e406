"""Speeds of kinds of workers, for estimates of jobs without a measurement.

Peaks are the published dense ones: NVIDIA's data sheets of SXM boards, NVLink one way, and a DGX's
network adapter per GPU. The shares that a model reaches are assumptions. Products of cuBLAS reach
60 to 70 % of the bf16 peak at the boards' power limits, copies 80 to 90 % of the memory's.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from oobleck.core.job.spec import Precision, TrainingSpec
from oobleck.planner.profile.memory import LINK_CTAS

_PRODUCTS_SHARE = 0.6
_MEMORY_SHARE = 0.8
_LINKS_SHARE = 0.8
#: Least time of a layer's forward on a GPU: its kernels are launched one by one.
_LAUNCHES_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Machine of one worker, and its links."""

    name: str
    #: Peak of matrix products, by the precision of the job.
    peak_flops_per_s: Mapping[Precision, float]
    #: Peak of float32 where the job allows TF32; 0: the same as without.
    tf32_flops_per_s: float = 0.0
    #: Peak of products in float8; 0: it has none, or is unknown and counted as in bfloat16.
    float8_flops_per_s: float = 0.0
    #: Share of the peak that products reach.
    products_share: float = _PRODUCTS_SHARE
    #: Rate of reads and writes beside products; None: they count for users' models only.
    memory_bytes_per_s: float | None
    intra_node_bytes_per_s: float
    inter_node_bytes_per_s: float
    #: Rate within a node of what only a link's multiprocessors carry; None: that of the node.
    link_bytes_per_s: float | None = None
    latency_s: float
    #: Least time of a layer's forward.
    least_s: float
    #: Memory of a whole board; 0: as the host reports.
    memory_bytes: int = 0
    #: Boards of a node, where it is not known.
    per_node: int = 1

    def shared(self, by: int) -> "Machine":
        """Return the share of the machine of one of `by` workers."""
        if by == 1 or self.memory_bytes_per_s is None:
            return self
        return replace(
            self,
            peak_flops_per_s={name: peak / by for name, peak in self.peak_flops_per_s.items()},
            tf32_flops_per_s=self.tf32_flops_per_s / by,
            float8_flops_per_s=self.float8_flops_per_s / by,
            memory_bytes_per_s=self.memory_bytes_per_s / by,
            intra_node_bytes_per_s=self.intra_node_bytes_per_s / by,
            inter_node_bytes_per_s=self.inter_node_bytes_per_s / by,
            link_bytes_per_s=self.link_bytes_per_s and self.link_bytes_per_s / by,
            memory_bytes=self.memory_bytes // by,
        )

    @property
    def is_gpu(self) -> bool:
        return self.memory_bytes > 0

    def peak(self, training: TrainingSpec) -> float:
        """Return the peak FLOP/s for a job. For an fp8 job it is that of bfloat16, in which it
        still computes attention and the head."""
        if training.precision == "fp32" and training.float32_matmul != "highest":
            return self.tf32_flops_per_s or self.peak_flops_per_s["fp32"]
        return self.peak_flops_per_s["bf16" if training.narrow else training.precision]

    def flops_per_s(self, training: TrainingSpec) -> float:
        """Return the rate that products reach."""
        return self.products_share * self.peak(training)

    def float8_gain_s(self, flops: float) -> float:
        """Return the time that so many operations save in float8, compared to bfloat16."""
        if not self.float8_flops_per_s:
            return 0.0
        times = 1 / self.peak_flops_per_s["bf16"] - 1 / self.float8_flops_per_s
        return flops * times / self.products_share


#: One CPU core, and loopback or a 25 Gbit/s network. Only the proportions of its times are
#: meaningful.
NOMINAL = Machine(
    name="cpu",
    peak_flops_per_s=dict.fromkeys(("fp32", "bf16", "fp64"), 20e9),
    products_share=1.0,
    memory_bytes_per_s=None,
    intra_node_bytes_per_s=4e9,
    inter_node_bytes_per_s=3e9,
    latency_s=1e-4,
    least_s=1e-6,
)


def _gpu(
    name: str,
    *,
    bf16: float,
    fp8: float = 0.0,
    tf32: float,
    fp32: float,
    fp64: float,
    memory_gib: int,
    memory: float,
    links: float,
    network: float,
    nvlink: float | None = None,
) -> Machine:
    """Build a machine from units of 1e12 FLOP/s and 1e9 bytes/s; `memory_gib` is as torch reports
    it. `nvlink`: one connection of NVLink, as NCCL counts it (src/graph/topo.h).
    """
    # NCCL gives messages two channels for each connection, so half of one to each channel.
    link = None if nvlink is None else LINK_CTAS * nvlink / 2 * 1e9
    return Machine(
        name=name,
        peak_flops_per_s={"bf16": bf16 * 1e12, "fp32": fp32 * 1e12, "fp64": fp64 * 1e12},
        tf32_flops_per_s=tf32 * 1e12,
        float8_flops_per_s=fp8 * 1e12,
        memory_bytes_per_s=_MEMORY_SHARE * memory * 1e9,
        intra_node_bytes_per_s=_LINKS_SHARE * links * 1e9,
        inter_node_bytes_per_s=_LINKS_SHARE * network * 1e9,
        link_bytes_per_s=link,
        latency_s=2e-5,
        least_s=_LAUNCHES_S,
        memory_bytes=memory_gib << 30,
        per_node=8,
    )


_BLACKWELL = {"fp8": 4500.0, "bf16": 2250.0, "tf32": 1125.0, "fp32": 75.0, "fp64": 37.0}
_HOPPER = {
    "fp8": 1979.0,
    "bf16": 989.0,
    "tf32": 494.0,
    "fp32": 67.0,
    "fp64": 67.0,
    "links": 450,
    "nvlink": 20.6,
    "network": 50,
}
_AMPERE = {"bf16": 312.0, "tf32": 156.0, "fp32": 19.5, "fp64": 19.5}
_NVLINK_3 = {"links": 300, "nvlink": 20.0, "network": 25}
GPUS: Mapping[str, Machine] = {
    machine.name: machine
    for machine in (
        _gpu("b200", **_BLACKWELL, links=900, nvlink=40.1, network=50, memory_gib=178, memory=7700),
        _gpu("h200", **_HOPPER, memory_gib=140, memory=4800),
        _gpu("h100", **_HOPPER, memory_gib=79, memory=3350),
        _gpu("a100-40gb", **_AMPERE, **_NVLINK_3, memory_gib=39, memory=1555),
        _gpu("a100", **_AMPERE, **_NVLINK_3, memory_gib=79, memory=2039),
    )
}


#: Kinds by the names that drivers give their boards. Other boards with the same chip, such as H100
#: PCIe, and slices of them (MIG) compute less or have no NVLink.
_BOARDS: Mapping[str, str] = {
    "B200": "b200",
    "H200": "h200",
    "GH200 144G HBM3e": "h200",
    "H100 80GB HBM3": "h100",
    "GH200 480GB": "h100",
    "A100-SXM4-40GB": "a100-40gb",
    "A100-SXM4-80GB": "a100",
}
#: Guess for all other GPUs: an A100 without NVLink, on PCIe of the fourth generation.
OTHER_GPU = _gpu("gpu", **_AMPERE, links=32, network=12.5, memory_gib=39, memory=1555)
_KIND = re.compile(r"cuda (?P<names>.+?)(, shared by (?P<sharing>[1-9][0-9]{0,3}))?")


def machine_of(device_kind: str) -> Machine:
    """Return the machine by an agent's name for its workers' devices, such as `cuda NVIDIA H100
    80GB HBM3`.

    If a node has several kinds of GPUs, it is the slowest one. A name that is not of a GPU gives
    `NOMINAL`.
    """
    match = _KIND.fullmatch(device_kind)
    if match is None:
        return NOMINAL
    boards = [_board(name) for name in match["names"].split(", ")]
    slowest = min(boards, key=lambda board: board.peak_flops_per_s["bf16"])
    return slowest.shared(int(match["sharing"] or 1))


def _board(name: str) -> Machine:
    known = _BOARDS.get(name.removeprefix("NVIDIA "))
    return OTHER_GPU if known is None else GPUS[known]


def why_no_float8(device_kind: str) -> str:
    """Return why a known kind of GPU has no products in float8; empty: it has, or is not known."""
    match = _KIND.fullmatch(device_kind)
    lacking = [name for name in match["names"].split(", ") if _lacks_float8(name)] if match else []
    return f"{lacking[0]} has no products in float8 (training.precision: fp8)" if lacking else ""


def _lacks_float8(board: str) -> bool:
    known = _board(board)
    return known is not OTHER_GPU and not known.float8_flops_per_s


def slowest_of(device_kinds: Collection[str], training: TrainingSpec) -> Machine:
    """Return the slowest machine for this job; `NOMINAL` if `device_kinds` is empty."""
    machines = [machine_of(kind) for kind in sorted(device_kinds)]
    return min(machines, key=lambda one: one.flops_per_s(training), default=NOMINAL)
