"""Tokens per second of a plan or a job, and their share of the GPUs' peak (MFU)."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.planner.profile.estimate import flops_per_token
from oobleck.planner.profile.machine import GPUS, machine_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Work of a job per token and sample, and the peak of one worker."""

    #: Operations of a step, forward and backward, without recomputation.
    flops_per_token: float
    tokens_per_sample: int
    peak_flops_per_s: float

    def data(self, *, samples: int, step_s: float, workers: int) -> dict[str, Any]:
        """Return the speed of steps of so many samples on so many workers, as plain data."""
        tokens_per_s = samples * self.tokens_per_sample / step_s
        flops_per_s = tokens_per_s / workers * self.flops_per_token
        return {
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_worker": tokens_per_s / workers,
            "flops_per_s_per_worker": flops_per_s,
            "mfu": flops_per_s / self.peak_flops_per_s,
        }


#: Estimates as shares of torchtitan's published figures, least and most, by the names of speeds:
#: for Llama 3 8B on H100, with fp8 also for 70B and 405B (docs/planning.md). None was measured.
PUBLISHED: Mapping[str, tuple[float, float]] = {
    "without_compile": (0.96, 0.99),
    "with_compile": (0.87, 0.91),
    "with_fp8": (0.87, 1.38),
}


def speed_lines(data: dict[str, Any]) -> str:
    """Describe the speed in lines for people: as the job has it, otherwise with and without compile
    and fp8, and how far estimates are from published figures."""
    lines = [f"speed: {_figures(data)}"]
    lines += [f"  {_way(key)}: {_figures(data[key])}" for key in PUBLISHED if key in data]
    shares = ", ".join(
        f"{least:.2f} to {most:.2f} {_way(key)}" for key, (least, most) in PUBLISHED.items()
    )
    return "\n".join([*lines, f"  share of published figures that estimates reach: {shares}"])


def _way(key: str) -> str:
    return "with compile and fp8" if key == "with_fp8" else key.replace("_", " ")


def _figures(data: dict[str, Any]) -> str:
    return (
        f"{data['tokens_per_s']:,.0f} tokens/s, {data['tokens_per_s_per_worker']:,.0f} per "
        f"GPU; {data['flops_per_s_per_worker'] / 1e12:.0f} TFLOP/s per GPU, "
        f"{100 * data['mfu']:.0f}% of the peak (MFU)"
    )


def utilization(job: JobSpec, tokens_per_s: float, device_kinds: Iterable[str]) -> float | None:
    """Return the share of its workers' peak that a job reaches; None: the model is a user's, or
    some device is unknown. `device_kinds`: the agents' name for each worker's device."""
    if not isinstance(job.model, ModelSpec):
        return None
    peak_flops_per_s = 0.0
    for kind, count in Counter(device_kinds).items():
        machine = machine_of(kind)
        if machine.name not in GPUS:
            return None
        peak_flops_per_s += count * machine.peak(job.training)
    return tokens_per_s * _flops_per_token(job) / peak_flops_per_s if peak_flops_per_s else None


#: Cached, since pages that show a job ask repeatedly.
_flops_per_token = lru_cache(maxsize=32)(flops_per_token)
