"""Rates of workers that are slower than profiled.

Owns the type and what may be said. Must not know where rates come from.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from oobleck.planner.ids import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRate:
    """A worker takes 1 / rate of the profile's time."""

    worker: WorkerId
    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ValueError(
                f"rate of {self.worker}: {self.rate} is no share of the profiled speed; give one "
                "above 0 and below 1"
            )


def slow_workers(rates: Mapping[WorkerId, float], among: Iterable[WorkerId]) -> Sequence[WorkerId]:
    """List those of the workers `among` that are slower than profiled, sorted."""
    wanted = set(among)
    return sorted(worker for worker, rate in rates.items() if rate != 1 and worker in wanted)


def check_rates(rates: Sequence[WorkerRate], workers: Iterable[WorkerId]) -> None:
    """Raises ValueError unless they are those of some of the `workers`, each once and sorted."""
    for before, after in pairwise(rates):
        if after.worker <= before.worker:
            raise ValueError(
                f"rates must be sorted, each worker once: {after.worker} after {before.worker}"
            )
    if rates and (others := {one.worker for one in rates}.difference(workers)):
        raise ValueError(f"rate of {min(others)}: it is no worker of the plan")
