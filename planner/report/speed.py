"""Tokens per second of a plan, and what part of the GPUs' peak they are (MFU)."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What a job asks of a worker, and the most that one does."""

    #: Of a step, forward and backward, without what is computed again.
    flops_per_token: float
    tokens_per_sample: int
    peak_flops_per_s: float

    def data(self, *, samples: int, step_s: float, workers: int) -> dict[str, Any]:
        """Of steps of so many samples on so many workers."""
        tokens_per_s = samples * self.tokens_per_sample / step_s
        flops_per_s = tokens_per_s / workers * self.flops_per_token
        return {
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_worker": tokens_per_s / workers,
            "flops_per_s_per_worker": flops_per_s,
            "mfu": flops_per_s / self.peak_flops_per_s,
        }


def speed_line(data: dict[str, Any]) -> str:
    """For people."""
    return (
        f"speed: {data['tokens_per_s']:,.0f} tokens/s, {data['tokens_per_s_per_worker']:,.0f} per "
        f"GPU; {data['flops_per_s_per_worker'] / 1e12:.0f} TFLOP/s per GPU, "
        f"{100 * data['mfu']:.0f}% of the peak (MFU)"
    )
