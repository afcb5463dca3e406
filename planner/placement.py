"""Which node takes which place of a new plan, so that the fewest bytes of state move."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from oobleck.planner.assignment import best_assignment
from oobleck.planner.cost import pipeline_cost
from oobleck.planner.ids import Generation, NodeName, WorkerId
from oobleck.planner.instantiate import share_batch
from oobleck.planner.plan import Pipeline, Plan, place
from oobleck.planner.profile import Profile
from oobleck.planner.template import PipelineTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One pipeline of the next plan: its size, and the pipeline that it is if it stays."""

    size: int
    kept: Pipeline | None
    #: The pipeline that it was before, smaller or bigger, if there is one.
    origin: Pipeline | None


def keep_fitting(sizes: Sequence[int], plan: Plan, alive: frozenset[NodeName]) -> tuple[Slot, ...]:
    """Slots of these sizes in which whole pipelines of `plan` stay as far as sizes allow."""
    free = list(sizes)
    slots = []
    for pipeline in plan.pipelines:
        if len(pipeline.nodes) in free and alive.issuperset(pipeline.nodes):
            free.remove(len(pipeline.nodes))
            slots.append(Slot(size=len(pipeline.nodes), kept=pipeline, origin=pipeline))
    return (
        *slots,
        *(Slot(size=size, kept=None, origin=None) for size in sorted(free, reverse=True)),
    )


def put_in_place(
    slots: Sequence[Slot],
    plan: Plan,
    alive: frozenset[NodeName],
    *,
    templates: Mapping[int, PipelineTemplate],
    profile: Profile,
    generation: Generation,
) -> Plan:
    """The next plan: pipelines that stay, and the other nodes where they hold the most already."""
    staying = {node for slot in slots if slot.kept for node in slot.kept.nodes}
    placed = _nodes_by_slot(
        [slot for slot in slots if slot.kept is None],
        templates,
        sorted(alive - staying),
        plan,
        [layer.state_bytes for layer in profile.layers],
    )
    shares = share_batch(
        [pipeline_cost(templates[slot.size], profile) for slot in slots], plan.microbatches
    )
    pipelines: list[Pipeline] = []
    first = 0
    for slot, share in zip(slots, shares, strict=True):
        if slot.kept is not None:
            pipeline = replace(slot.kept, first_microbatch=first, microbatches=share)
        else:
            pipeline = place(
                templates[slot.size],
                placed.pop(0),
                first_microbatch=first,
                microbatches=share,
            )
        pipelines.append(pipeline)
        first += share
    return Plan(generation=generation, pipelines=tuple(pipelines))


def _nodes_by_slot(
    slots: Sequence[Slot],
    templates: Mapping[int, PipelineTemplate],
    pool: Sequence[NodeName],
    plan: Plan,
    state_bytes: Sequence[int],
) -> list[tuple[NodeName, ...]]:
    """Nodes of the pool for every slot, in the order of its template."""
    held = plan.holdings()
    gains: list[list[int]] = []
    for slot in slots:
        home = slot.origin.nodes if slot.origin else ()
        for position in range(slot.size):
            needs = _needs(templates[slot.size], position)
            gains.append(
                [
                    # Bytes count first; among equals a node stays beside its old neighbours.
                    _kept_bytes(node, needs, held, state_bytes) * 2 + (node in home)
                    for node in pool
                ]
            )
    chosen = [pool[column] for column in best_assignment(gains)]
    result = []
    for slot in slots:
        result.append(tuple(chosen[: slot.size]))
        del chosen[: slot.size]
    return result


def _needs(template: PipelineTemplate, position: int) -> list[range]:
    """The layers of each worker of the template's node, by slot."""
    return [
        stage.layers
        for stage in template.stages
        if stage.node == position
        for _ in range(stage.gpus)
    ]


def _kept_bytes(
    node: NodeName,
    needs: Sequence[range],
    held: Mapping[WorkerId, range],
    state_bytes: Sequence[int],
) -> int:
    """State that need not come from elsewhere; what comes from the same node counts half."""
    nothing = range(0)
    on_node = {
        layer for slot in range(len(needs)) for layer in held.get(WorkerId(node, slot), nothing)
    }
    total = 0
    for slot, layers in enumerate(needs):
        own = held.get(WorkerId(node, slot), nothing)
        total += sum(
            state_bytes[layer] * (2 if layer in own else 1)
            for layer in layers
            if layer in own or layer in on_node
        )
    return total
