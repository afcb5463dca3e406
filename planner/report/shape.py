"""Description of a plan in a few words."""

from collections import Counter

from oobleck.core.plan import Plan
from oobleck.core.units import count
from oobleck.planner.programs.listing.schedule import listed_routes


def shape(plan: Plan) -> str:
    """Describe the plan's pipelines in a few words, or say that it has other routes."""
    if listed_routes(plan):
        return f"{count(len(plan.routes), 'route')} over {count(len(plan.nodes), 'node')}"
    sizes = Counter(len(pipeline.nodes) for pipeline in plan.pipelines)
    return " and ".join(
        f"{count(number, 'pipeline')} of {count(size, 'node')}"
        for size, number in sorted(sizes.items(), reverse=True)
    )
