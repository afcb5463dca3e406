"""Pipelines as text: a few words, the layers of each GPU, and the compute of each stage over time.

Owns layout only; alike pipelines are drawn once. Boxes and strips fill the given width; sentences
are on one line, for the printer to fold. Must not decide or estimate.
"""

from collections import Counter
from collections.abc import Sequence

from oobleck.core.ids import NodeName
from oobleck.core.instructions import BackwardInput, BackwardWeight, Forward
from oobleck.core.plan import Plan
from oobleck.core.routes import Hold
from oobleck.core.schedules import Schedule
from oobleck.core.units import count, format_bytes, runs
from oobleck.planner.cost.estimate import KindEstimate, StepEstimate
from oobleck.planner.cost.replay import Event, timeline
from oobleck.planner.programs.listing.schedule import listed_routes

#: Columns of a drawing by default, and the fewest.
WIDTH, NARROWEST = 80, 40
#: Most stages and micro-batches of a readable timeline.
MOST_STAGES, MOST_MICROBATCHES = 16, 26
#: Most alike pipelines, and nodes of each, that are named.
_NAMED = 4


def shape(plan: Plan) -> str:
    """Describe the plan's pipelines in a few words, or say that it has other routes."""
    if listed_routes(plan):
        return f"{count(len(plan.routes), 'route')} over {count(len(plan.nodes), 'node')}"
    sizes = Counter(len(pipeline.nodes) for pipeline in plan.pipelines)
    return " and ".join(
        f"{count(number, 'pipeline')} of {count(size, 'node')}"
        for size, number in sorted(sizes.items(), reverse=True)
    )


def draw_pipelines(plan: Plan, estimate: StepEstimate, *, memory_limit: int, width: int) -> str:
    """Draw each kind of pipeline once: stages in order, with node, layers, GPUs and peak memory."""
    return "\n".join(_draw_kind(plan, kind, memory_limit, width) for kind in estimate.kinds)


def _draw_kind(plan: Plan, kind: KindEstimate, memory_limit: int, width: int) -> str:
    pipeline = kind.pipeline
    nodes = count(len(pipeline.nodes), "node")
    if kind.count == 1:
        share = plan.shares[kind.numbers[0]]
        batch = (
            f"micro-batch {share[0]}"
            if len(share) == 1
            else f"micro-batches {share[0]}-{share[-1]}"
        )
        lines = [f"pipeline {kind.numbers[0]}: {nodes}, {batch}"]
    else:
        plural = "es" if pipeline.microbatches > 1 else ""
        batch = f"{pipeline.microbatches} micro-batch{plural}"
        lines = [f"{kind.count} x pipeline: {nodes}, {batch} each"]
    columns = [
        _column(stage, peak, memory_limit, gpus=_shared(pipeline.stages))
        for stage, peak in zip(pipeline.stages, kind.peak_bytes, strict=True)
    ]
    lines += _boxes(columns, [stage.workers[0].node for stage in pipeline.stages], width)
    if kind.count > 1:
        others = [
            f"{number} ({some(plan.pipelines[number].nodes)})" for number in kind.numbers[1:_NAMED]
        ]
        more = f" and {kind.count - _NAMED} more" if kind.count > _NAMED else ""
        lines.append(f"  the same: pipeline {', '.join(others)}{more}")
    return "\n".join(lines)


def draw_shadows(plan: Plan) -> str:
    """Describe which workers hold layers without running them; of many workers, the first ones."""
    layers = {layer for own in plan.shadows.values() for layer in own}
    held = [
        f"{worker}: {', '.join(f'{r[0]}-{r[-1]}' if len(r) > 1 else str(r[0]) for r in runs(own))}"
        for worker, own in list(plan.shadows.items())[:_NAMED]
    ]
    if more := len(plan.shadows) - len(held):
        held.append(f"and {count(more, 'more worker')}")
    nodes = {worker.node for worker in plan.shadows}
    return (
        f"shadows: {count(len(layers), 'layer')} also on {count(len(nodes), 'node')} "
        f"({'; '.join(held)})"
    )


def some(nodes: Sequence[NodeName]) -> str:
    """Return the names of the first nodes and of the last one."""
    if len(nodes) > _NAMED + 1:
        return f"{', '.join(nodes[:_NAMED])}, ... {nodes[-1]}"
    return ", ".join(nodes)


def _shared(stages: Sequence[Hold]) -> bool:
    """Return whether a node has several stages, or a stage several GPUs."""
    nodes = {stage.workers[0].node for stage in stages}
    return len(nodes) < sum(len(stage.workers) for stage in stages)


def _column(stage: Hold, peak: int, limit: int, *, gpus: bool) -> list[str]:
    slots = [worker.slot for worker in stage.workers]
    layers = (
        f"layer {stage.first_layer}"
        if stage.first_layer == stage.last_layer
        else f"layers {stage.first_layer}-{stage.last_layer}"
    )
    name = str(stage.workers[0]) if gpus else stage.workers[0].node
    if len(slots) > 1:
        name += f"-{slots[-1]}"
    memory = f"{format_bytes(peak)} {100 * peak / limit:.0f}%"
    return [name, layers, memory]


def _boxes(columns: Sequence[Sequence[str]], nodes: Sequence[str], width: int) -> list[str]:
    """Draw boxes side by side, in as many rows as needed; `||` marks a change of node."""
    lines: list[str] = []
    row: list[int] = []
    used = 0
    for number, column in enumerate(columns):
        wide = max(map(len, column)) + len(" || ")
        if row and used + wide > width:
            lines += _row(columns, nodes, row)
            row, used = [], 0
        used += wide if row else wide + len("  ")
        row.append(number)
    return lines + _row(columns, nodes, row)


def _row(columns: Sequence[Sequence[str]], nodes: Sequence[str], row: Sequence[int]) -> list[str]:
    several = len(set(nodes)) < len(nodes)
    lines = []
    for index in range(len(columns[0])):
        cells = [columns[n][index].ljust(max(map(len, columns[n]))) for n in row]
        line = "  | " + cells[0]
        for number, cell in zip(row[1:], cells[1:], strict=True):
            line += " || " if several and nodes[number] != nodes[number - 1] else " | "
            line += cell
        lines.append(line + " |")
    return lines


def draw_timeline(kind: KindEstimate, schedule: Schedule, *, width: int) -> str | None:
    """Draw the compute of each stage over time, a line per stage; None where it would not be
    readable."""
    pipeline = kind.pipeline
    if len(pipeline.stages) > MOST_STAGES or pipeline.microbatches > MOST_MICROBATCHES:
        return None
    rows = timeline(schedule, kind.kind)
    end = max(row[-1].ended_s for row in rows)
    if end <= 0:
        return None
    label = len(f"stage {len(rows) - 1}")
    columns = max(NARROWEST, width) - label - 2
    split = any(event.kind is BackwardInput for row in rows for event in row)
    legend = "0-9 forward, a-z backward" + (", + weight gradients" if split else "") + ", . idle"
    lines = [f"pipeline {kind.numbers[0]} up to its gradient sums ({end:.4g} s):", f"  {legend}"]
    for stage, row in enumerate(rows):
        lines.append(f"{f'stage {stage}'.rjust(label)}  {_strip(row, end, columns)}")
    return "\n".join(lines)


def _strip(row: Sequence[Event], end: float, columns: int) -> str:
    """Return a line with the micro-batch that is computed in the middle of each column."""
    marks = []
    events = iter(row)
    event = next(events, None)
    for column in range(columns):
        at = (column + 0.5) * end / columns
        while event is not None and event.ended_s <= at:
            event = next(events, None)
        marks.append(_mark(event) if event is not None and event.begun_s <= at else ".")
    return "".join(marks)


def _mark(event: Event) -> str:
    if event.kind is Forward:
        return str(event.microbatch % 10)
    return "+" if event.kind is BackwardWeight else chr(ord("a") + event.microbatch)
