"""The formula that searches compare by: what stages, pipelines and gradient sums take.

`oobleck.planner.cost.replay` tells it exactly for the few that are worth it. Times are integers
here (ticks of a femtosecond), so that sums are exact, equal stages are equal, and which stage is
the slowest never hangs on rounding.
"""

from dataclasses import dataclass
from itertools import pairwise

from oobleck.core.plan import PipelineTemplate
from oobleck.core.profile import Links, Profile, all_reduce_s, message_s

TICKS_PER_S = 10**15


def ticks(seconds: float) -> int:
    """Seconds in whole ticks."""
    return round(seconds * TICKS_PER_S)


def seconds(count: int) -> float:
    return count / TICKS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCost:
    """Cost of a template as a pipeline, apart from its share of the batch (in ticks)."""

    #: One micro-batch all the way forward and back.
    first: int
    #: Each further micro-batch.
    period: int
    #: Gradient bytes of the stage (per GPU) that has most of them.
    gradient_bytes: int

    def time(self, microbatches: int) -> int:
        return self.first + (microbatches - 1) * self.period

    def capacity(self, time: int, most: int) -> int:
        """Return how many micro-batches, up to `most`, are done within `time`."""
        if time < self.first:
            return 0
        return most if self.period == 0 else min(most, 1 + (time - self.first) // self.period)


def pipeline_cost(template: PipelineTemplate, profile: Profile) -> PipelineCost:
    """1F1B in closed form.

    A micro-batch passes all stages and the messages between them. In the steady state, any run of
    neighbouring stages s..k takes in one micro-batch per round trip through it and may have
    k - s + 1 of them inside, so the slowest such run sets the period. Against a replay this is up
    to a quarter too long for few micro-batches on very uneven stages, since short stages make up
    for part of the first round trip, and within a few per cent otherwise.
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
    """Gradient sync of a stage with that many gradient bytes over that many pipelines."""
    return ticks(all_reduce_s(gradient_bytes, workers=pipelines, same_node=False, links=links))
