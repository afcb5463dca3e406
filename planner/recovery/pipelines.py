"""Whole pipelines within a plan, as plans of templates have them.

Pure. Must not know why a plan is made otherwise.
"""

from dataclasses import replace

from oobleck.planner.ids import NodeName
from oobleck.planner.programs.pipeline import Pipeline
from oobleck.planner.programs.plan import Plan


def is_of_pipelines(plan: Plan) -> bool:
    """Return whether each worker stands in one route alone, with all that it holds."""
    try:
        return Plan.of_pipelines(
            plan.pipelines, generation=plan.generation, schedule=plan.schedule
        ) == replace(plan, listing=None, rates=())
    except ValueError:
        return False


def pipelines_within(plan: Plan) -> Plan:
    """The plan itself where it is made of pipelines; else one of those of its routes that have no
    node in common, taken in their order, with all micro-batches in the same proportions."""
    if is_of_pipelines(plan):
        return plan
    taken: list[Pipeline] = []
    nodes: set[NodeName] = set()
    for pipeline in plan.pipelines:
        if nodes.isdisjoint(pipeline.nodes):
            taken.append(pipeline)
            nodes.update(pipeline.nodes)
    shares = _in_proportion([pipeline.microbatches for pipeline in taken], plan.microbatches)
    return Plan.of_pipelines(
        (replace(one, microbatches=share) for one, share in zip(taken, shares, strict=True)),
        generation=plan.generation,
        schedule=plan.schedule,
    )


def _in_proportion(parts: list[int], total: int) -> list[int]:
    """Whole numbers of that sum, none below its part; of equal remainders the first gets more."""
    whole = sum(parts)
    shares = [part * total // whole for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda k: -(parts[k] * total % whole))
    for number in by_remainder[: total - sum(shares)]:
        shares[number] += 1
    return shares
