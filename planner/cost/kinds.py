"""Pipelines that run alike: the same cut on the same places with the same share of the batch.

Owns the replay's input for them. Must not know how the cost of a plan's stages is found, nor how
long a step takes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from oobleck.core.ids import WorkerId
from oobleck.core.plan import Pipeline, PipelineTemplate, Plan, WorkerRate
from oobleck.core.profile import Profile, message_s


class Place(NamedTuple):
    """Run of layers on some workers of the pipeline's node number `node`."""

    first_layer: int
    #: Inclusive.
    last_layer: int
    gpus: int
    node: int
    #: Rate of the slowest of the workers.
    rate: float = 1.0


class StageTimes(NamedTuple):
    """Times of a stage for one micro-batch, in seconds; `update_s` is once per step."""

    forward_s: float
    backward_s: float
    #: The two parts of `backward_s`, for schedules that split it.
    backward_input_s: float
    backward_weight_s: float
    update_s: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Cut:
    """Stages of pipelines that run alike, first stage first.

    Compared by identity: a lookup by kind then need not hash hundreds of numbers. Callers keep the
    object to ask again for the same cut.
    """

    places: tuple[Place, ...]
    stages: tuple[StageTimes, ...]
    #: Seconds of the message between a stage and the next one, either way.
    message_s: tuple[float, ...]

    @property
    def workers(self) -> int:
        return sum(place.gpus for place in self.places)


class Kind(NamedTuple):
    """Pipelines that run alike: their cut and their count of micro-batches."""

    microbatches: int
    cut: Cut


def template_cut(template: PipelineTemplate, profile: Profile) -> Cut:
    """Build the cut of the template's pipelines, for schedules that do not split the backward.

    Its times are the template's, so that stages that are equal on paper stay equal.
    """
    places = [Place(s.first_layer, s.last_layer, s.gpus, s.node) for s in template.stages]
    times = []
    for stage in template.stages:
        layers = profile.layers[stage.first_layer : stage.last_layer + 1]
        update_s = sum([layer.update_s.get(stage.gpus, 0.0) for layer in layers])
        times.append(StageTimes(stage.forward_s, stage.backward_s, 0.0, 0.0, update_s))
    return Cut(places=tuple(places), stages=tuple(times), message_s=messages_s(places, profile))


#: Positions of pipelines, by micro-batches and places.
_Alike = Mapping[tuple[int, tuple[Place, ...]], tuple[int, ...]]


def pipeline_kinds(plan: Plan) -> _Alike:
    """Return the positions in the plan of pipelines that run alike, by micro-batches and places."""
    return _kinds(plan.pipelines, plan.rates)


@lru_cache(maxsize=16)
def _kinds(pipelines: tuple[Pipeline, ...], rates: tuple[WorkerRate, ...]) -> _Alike:
    slow = {one.worker: one.rate for one in rates}

    def rate(workers: Iterable[WorkerId]) -> float:
        return min(slow.get(worker, 1.0) for worker in workers)

    kinds: dict[tuple[int, tuple[Place, ...]], list[int]] = {}
    for number, pipeline in enumerate(pipelines):
        places = places_of(pipeline, rate if slow else _as_profiled)
        kinds.setdefault((pipeline.microbatches, places), []).append(number)
    return {kind: tuple(numbers) for kind, numbers in kinds.items()}


def replicas(plan: Plan) -> int:
    """Count the replicas of the model: pipelines, and one more where workers hold shadows. With a
    single replica no gradients are summed."""
    return len(plan.pipelines) + bool(plan.shadows)


def _as_profiled(workers: Iterable[WorkerId]) -> float:
    return 1.0


def places_of(
    pipeline: Pipeline, rate: Callable[[Iterable[WorkerId]], float] = _as_profiled
) -> tuple[Place, ...]:
    """Return the places of a pipeline's stages. `rate` returns the rate of workers that compute in
    step."""
    node = {name: number for number, name in enumerate(pipeline.nodes)}
    return tuple(
        Place(
            s.first_layer,
            s.last_layer,
            len(s.workers),
            node[s.workers[0].node],
            rate(s.workers),
        )
        for s in pipeline.stages
    )


def messages_s(places: Iterable[Place], profile: Profile) -> tuple[float, ...]:
    """Return the seconds of the largest message between each stage and the next; each worker sends
    its rows to the workers that compute them next.
    """
    return tuple(
        message_s(
            -(-profile.layers[before.last_layer].output_bytes // max(before.gpus, after.gpus)),
            same_node=before.node == after.node,
            links=profile.links,
        )
        for before, after in pairwise(places)
    )
