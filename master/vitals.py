"""Counters of how well the master's loop keeps up. Must not know who looks at it."""

from dataclasses import dataclass, field

from oobleck.host.metrics.families import SHORT_S, Durations


@dataclass(slots=True)
class Vitals:
    #: Iterations of the loop.
    iterations: Durations = field(default_factory=lambda: Durations(SHORT_S))
    #: How often, and by how much in sum, it came too late to look.
    late_times: int = 0
    late_s: float = 0.0
