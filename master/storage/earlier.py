"""Plans as they were written before they had routes: pipelines with their stages.

Pure, on parsed JSON or MessagePack. Must not know journals or snapshots.
"""

from typing import Any


def with_routes(value: Any) -> Any:
    """The same with each plan of pipelines in it as one of holds and routes. Raises ValueError."""
    if isinstance(value, list):
        return [with_routes(item) for item in value]
    if not isinstance(value, dict):
        return value
    if {"generation", "pipelines"} <= value.keys():
        return _plan(value)
    return {name: with_routes(item) for name, item in value.items()}


def _plan(plan: dict[str, Any]) -> dict[str, Any]:
    try:
        return _of_routes(plan, plan["pipelines"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a plan of pipelines: {error!r}") from error


def _of_routes(plan: dict[str, Any], pipelines: Any) -> dict[str, Any]:
    others = {name: item for name, item in plan.items() if name != "pipelines"}
    return others | {
        "holds": [stage for pipeline in pipelines for stage in pipeline["stages"]],
        "routes": [
            {"hops": pipeline["stages"], "microbatches": pipeline["microbatches"]}
            for pipeline in pipelines
        ],
    }
