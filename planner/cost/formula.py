"""The closed-form costs that searches compare: times of stages, pipelines and gradient sums.

`oobleck.planner.cost.replay` gives exact times for the few candidates that are worth it. Times are
integers here (ticks of a femtosecond): sums are exact, equal stages compare equal, and rounding
never decides which stage is the slowest.
"""

from dataclasses import dataclass
from itertools import pairwise

from oobleck.core.plan import PipelineTemplate
from oobleck.core.profile import Links, Profile, all_reduce_s, message_s

TICKS_PER_S = 10**15


def ticks(seconds: float) -> int:
    """Convert seconds to whole ticks."""
    return round(seconds * TICKS_PER_S)


def seconds(count: int) -> float:
    return count / TICKS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCost:
    """Cost of a template as a pipeline, apart from its share of the batch (in ticks)."""

    #: Ticks of one micro-batch all the way forward and back.
    first: int
    #: Ticks of each further micro-batch.
    period: int
    #: Gradient bytes per GPU of the stage that has most.
    gradient_bytes: int

    def time(self, microbatches: int) -> int:
        return self.first + (microbatches - 1) * self.period

    def capacity(self, time: int, most: int) -> int:
        """Return how many micro-batches, up to `most`, are done within `time`."""
        if time < self.first:
            return 0
        return most if self.period == 0 else min(most, 1 + (time - self.first) // self.period)


def pipeline_cost(template: PipelineTemplate, profile: Profile) -> PipelineCost:
    """Return the closed-form cost of a template under 1F1B.

    A micro-batch passes all stages and the messages between them. In the steady state, any run of
    neighbouring stages s..k takes in one micro-batch per round trip through it. It may hold k - s +
    1 of them. The slowest such run sets the period.

    The formula is within a few per cent of a replay. For few micro-batches on very uneven stages it
    is up to a quarter too long: short stages make up for part of the first round trip.
    """
    stages = template.stages
    times = [ticks(stage.forward_s) + ticks(stage.backward_s) for stage in stages]
    round_trips = [
        2
        * ticks(
            message_s(
                profile.layers[before.last_layer].output_bytes,
                same_node=before.node == after.node,
                links=profile.links,
            )
        )
        for before, after in pairwise(stages)
    ]
    period = 0
    for start in range(len(stages)):
        inside = 0
        for end in range(start, len(stages)):
            inside += times[end] + (round_trips[end - 1] if end > start else 0)
            if inside > period * (end - start + 1):
                period = inside // (end - start + 1)
    gradient_bytes = max(
        sum(profile.layers[layer].summed_bytes for layer in stage.layers) // stage.gpus
        for stage in stages
    )
    return PipelineCost(
        first=sum(times) + sum(round_trips), period=period, gradient_bytes=gradient_bytes
    )


def sync_ticks(gradient_bytes: int, *, pipelines: int, links: Links) -> int:
    """Return the ticks of a stage's gradient sum over that many pipelines."""
    return ticks(all_reduce_s(gradient_bytes, workers=pipelines, same_node=False, links=links))
