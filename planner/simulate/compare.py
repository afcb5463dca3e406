"""Comparison of policies on one trace, and bounds that hold for all of them.

Owns the bounds. Must not know how a replay goes.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from oobleck.core.errors import PlanInfeasible
from oobleck.core.job.spec import RecoveryPolicy
from oobleck.core.units import count
from oobleck.planner.recovery.outlook import MTBF_S
from oobleck.planner.report.account import Result, ticks
from oobleck.planner.simulate.costs import Costs
from oobleck.planner.simulate.racks import Racks
from oobleck.planner.simulate.replay import Setting, replay
from oobleck.planner.simulate.shapes import Shapes
from oobleck.planner.simulate.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Samples per second that a policy is measured by."""

    #: With the best known plan of the live nodes at each instant, and changes free.
    free_changes: float
    #: In proportion to the live nodes.
    live_nodes: float
    #: With all nodes at all times.
    full: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Results of several policies on one trace."""

    results: Mapping[RecoveryPolicy, Result]
    bounds: Bounds
    #: Sum of the live nodes' time.
    node_s: float

    def data(self, price: float | None = None) -> Mapping[str, Any]:
        """Return it as plain data, for JSON. `price`: that of a node for an hour."""
        return {
            "policies": {
                policy: result.data(price, self.node_s) for policy, result in self.results.items()
            },
            "bounds": {
                "free_changes_samples_per_s": self.bounds.free_changes,
                "live_nodes_samples_per_s": self.bounds.live_nodes,
                "full_samples_per_s": self.bounds.full,
            },
        }


def set_up(
    trace: Trace,
    shapes: Shapes,
    *,
    nodes: int,
    costs: Costs,
    until_s: float | None,
    spares: int = 0,
    mtbf_s: float = MTBF_S,
    racks: Racks | None = None,
) -> Setting:
    """Return the setting of replays, with `spares` of the nodes outside the job until it loses one.
    Raises PlanInfeasible where so many nodes have no plan, and ValueError, with the line, where the
    trace never has enough nodes."""
    full = shapes.first(nodes)
    end_s = trace.end_s if until_s is None else until_s
    if ticks(end_s) <= 0:
        raise ValueError("line 2: all rows are at time 0; give a later row, or --until TIME")
    most, line = 0, 0
    for instant, live in trace.live():
        if live > most:
            most, line = live, instant.line
    if spares:
        shapes.first(nodes - spares)
    try:
        shapes.first(most)
    except PlanInfeasible as infeasible:
        raise ValueError(
            f"line {line}: there are never more than {count(most, 'node')}: {infeasible}"
        ) from infeasible
    return Setting(
        trace=trace,
        shapes=shapes,
        costs=costs,
        until_s=end_s,
        full_step_s=full.step_s * costs.step_ratio,
        batch=shapes.microbatches * shapes.terms.profile.microbatch,
        nodes=nodes,
        most_nodes=nodes - spares if spares else None,
        mtbf_s=mtbf_s,
        racks={name: rack for rack, own in (racks or {}).items() for name in own},
    )


def compare(
    setting: Setting,
    policies: Sequence[RecoveryPolicy],
    report: Callable[[str, float], None] = lambda what, time_s: None,
) -> Comparison:
    """Replay the trace under each policy. `report` gets what is being done and how far it is."""
    results = {
        policy: replay(setting, policy, lambda at, name=policy: report(name, at))  # type: ignore[misc]
        for policy in policies
    }
    node_s = node_seconds(setting)
    return Comparison(results=results, bounds=_bounds(setting, node_s, report), node_s=node_s)


def node_seconds(setting: Setting) -> float:
    """Return the sum of the live nodes' time, whether or not they are in the plan."""
    return sum(span_s * live for span_s, live in _spans(setting))


def live_nodes(setting: Setting) -> list[tuple[float, int]]:
    """Return the times of changes in seconds, each with the number of live nodes from then on."""
    at_s, changes = 0.0, []
    for span_s, live in _spans(setting):
        changes.append((at_s, live))
        at_s += span_s
    return changes


def _spans(setting: Setting) -> list[tuple[float, int]]:
    """Return the times between instants, each with the number of live nodes."""
    before_s, before, spans = 0.0, 0, []
    for instant, live in setting.trace.live():
        at = min(instant.time_s, setting.until_s)
        spans.append((at - before_s, before))
        before_s, before = at, live
    return [*spans, (setting.until_s - before_s, before)]


def _bounds(setting: Setting, node_s: float, report: Callable[[str, float], None]) -> Bounds:
    full = setting.batch / setting.full_step_s
    spans = [(span_s, live) for span_s, live in _spans(setting) if span_s]
    rates = {}
    for live in sorted({live for _, live in spans}):
        rates[live] = _best_rate(setting, live)
        report("bounds", 0.0)
    free = sum(span_s * rates[live] for span_s, live in spans)
    return Bounds(
        free_changes=free / setting.until_s,
        live_nodes=full * node_s / setting.nodes / setting.until_s,
        full=full,
    )


def _best_rate(setting: Setting, nodes: int) -> float:
    """Return the samples per second of the best known plan of at most so many nodes; 0: there is
    none. Re-routed plans may be faster than first ones."""
    terms, shapes = setting.shapes.terms, setting.shapes
    least = min(terms.fault_tolerance + 1, nodes // terms.sizes.start)
    with suppress(PlanInfeasible):
        shapes.first(nodes, max(1, least))
    found = [step_s for number, step_s in shapes.shortest_s.items() if number <= nodes]
    return setting.batch / (min(found) * setting.costs.step_ratio) if found else 0.0
