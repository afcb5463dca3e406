"""Pipelines that run alike: the same cut on the same places with the same share of the batch.

Owns what the replay has to know of them, from a template or from a plan. Must not know how long a
step takes.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from oobleck.planner.cost.stagecost import StageCost, stage_cost
from oobleck.planner.profile.links import message_s
from oobleck.planner.profile.profile import Profile
from oobleck.planner.programs.plan import Pipeline, Plan, Stage
from oobleck.planner.programs.template import PipelineTemplate


class Place(NamedTuple):
    """Layers on some workers of the pipeline's node number `node`."""

    first_layer: int
    #: Inclusive.
    last_layer: int
    gpus: int
    node: int


class StageTimes(NamedTuple):
    """What one micro-batch takes of a stage, seconds; `update_s` is once per step."""

    forward_s: float
    backward_s: float
    #: The two parts of `backward_s`, for schedules that split it.
    backward_input_s: float
    backward_weight_s: float
    update_s: float


class Kind(NamedTuple):
    """Pipelines that run alike."""

    microbatches: int
    #: First stage first.
    places: tuple[Place, ...]
    stages: tuple[StageTimes, ...]
    #: Of the message between a stage and the next one, either way, seconds.
    message_s: tuple[float, ...]


def template_kind(template: PipelineTemplate, microbatches: int, profile: Profile) -> Kind:
    """A pipeline of the template, for schedules that do not split the backward.

    Its times are the template's, in which stages that are equal on paper are equal.
    """
    places = [Place(s.first_layer, s.last_layer, s.gpus, s.node) for s in template.stages]
    times = []
    for stage in template.stages:
        layers = profile.layers[stage.first_layer : stage.last_layer + 1]
        update_s = sum(layer.update_s.get(stage.gpus, 0.0) for layer in layers)
        times.append(StageTimes(stage.forward_s, stage.backward_s, 0.0, 0.0, update_s))
    return Kind(microbatches, tuple(places), tuple(times), _messages_s(places, profile))


def pipeline_kind(pipeline: Pipeline, profile: Profile) -> Kind:
    """Of a pipeline in a plan, under any schedule. Raises ValueError, as `stage_cost`."""
    places = _places(pipeline)
    costs = [cost_of(stage, profile) for stage in pipeline.stages]
    times = [
        StageTimes(
            cost.forward_s,
            cost.backward_s,
            cost.backward_input_s,
            cost.backward_weight_s,
            cost.update_s,
        )
        for cost in costs
    ]
    return Kind(pipeline.microbatches, places, tuple(times), _messages_s(places, profile))


def cost_of(stage: Stage, profile: Profile) -> StageCost:
    """Raises ValueError, as `stage_cost`."""
    return stage_cost(
        profile,
        stage.first_layer,
        stage.last_layer,
        len(stage.workers),
        resident=stage.resident,
    )


def pipeline_kinds(plan: Plan) -> list[tuple[int, ...]]:
    """The positions in the plan of pipelines that run alike, kind by kind."""
    kinds: dict[object, list[int]] = {}
    for number, pipeline in enumerate(plan.pipelines):
        kinds.setdefault((pipeline.microbatches, _places(pipeline)), []).append(number)
    return [tuple(numbers) for numbers in kinds.values()]


def _places(pipeline: Pipeline) -> tuple[Place, ...]:
    node = {name: number for number, name in enumerate(pipeline.nodes)}
    return tuple(
        Place(s.first_layer, s.last_layer, len(s.workers), node[s.workers[0].node])
        for s in pipeline.stages
    )


def _messages_s(places: Iterable[Place], profile: Profile) -> tuple[float, ...]:
    """Each worker sends its rows to those that hold them; the largest of these messages counts."""
    return tuple(
        message_s(
            -(-profile.layers[before.last_layer].output_bytes // max(before.gpus, after.gpus)),
            same_node=before.node == after.node,
            links=profile.links,
        )
        for before, after in pairwise(places)
    )


def workers_of(places: Sequence[Place]) -> int:
    """How many workers the places have together."""
    return sum(place.gpus for place in places)
