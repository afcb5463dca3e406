"""What `oobleck plan` shows: templates, the plan and what a step of it takes, as data and text."""

from collections.abc import Mapping
from typing import Any

from oobleck.planner.compile import compile_programs
from oobleck.planner.cost import pipeline_cost, seconds, sync_ticks
from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.ids import Generation, NodeName
from oobleck.planner.instantiate import instantiate
from oobleck.planner.plan import Plan
from oobleck.planner.profile import Profile
from oobleck.planner.reconfigure import reconfigure
from oobleck.planner.simulate import simulate
from oobleck.planner.specification import node_specification
from oobleck.planner.template import PipelineTemplate
from oobleck.planner.templates import generate_templates
from oobleck.planner.units import count


def plan_report(
    profile: Profile,
    *,
    nodes: int,
    fault_tolerance: int,
    global_batch: int,
    min_nodes: int = 1,
    lost: int = 0,
) -> dict[str, Any]:
    """Templates and plan for nodes n1 .. n<nodes> as plain data.

    With `lost` there is also, one after the other, what follows the loss of the first pipeline's
    last node; where nothing fits any more, plan and rule are None and the reason says why. Raises
    ValueError naming the field and the fix, or PlanInfeasible.
    """
    plan, templates = _make(
        profile,
        nodes=nodes,
        fault_tolerance=fault_tolerance,
        global_batch=global_batch,
        min_nodes=min_nodes,
    )
    if not 0 <= lost < nodes:
        raise ValueError(f"lost is {lost}; it must be at least 0 and less than nodes ({nodes})")
    report: dict[str, Any] = {
        "templates": [_template(template) for _, template in sorted(templates.items())],
        "plan": _plan(plan, profile, templates),
    }
    if not lost:
        return report
    after = report["after_losses"] = []
    for _ in range(lost):
        gone = plan.pipelines[0].nodes[-1]
        try:
            change = reconfigure(
                plan,
                [node for node in plan.nodes if node != gone],
                templates=templates,
                profile=profile,
                fault_tolerance=fault_tolerance,
                generation=Generation(plan.generation + 1),
            )
        except PlanInfeasible as infeasible:
            after.append({"lost": gone, "rule": None, "reason": str(infeasible), "plan": None})
            break
        plan = change.plan
        after.append(
            {
                "lost": gone,
                "rule": change.rule,
                "reason": change.reason,
                "plan": _plan(plan, profile, templates),
            }
        )
    return report


def draw_plan(
    profile: Profile,
    *,
    nodes: int,
    fault_tolerance: int,
    global_batch: int,
    min_nodes: int = 1,
) -> str:
    """The plan's pipelines as text: a line for each, its stages as boxes of layers and nodes."""
    plan, templates = _make(
        profile,
        nodes=nodes,
        fault_tolerance=fault_tolerance,
        global_batch=global_batch,
        min_nodes=min_nodes,
    )
    return draw(plan, profile, templates)


def draw(plan: Plan, profile: Profile, templates: Mapping[int, PipelineTemplate]) -> str:
    lines = []
    for number, pipeline in enumerate(plan.pipelines):
        last = pipeline.first_microbatch + pipeline.microbatches - 1
        batch = (
            f"micro-batch {last}"
            if pipeline.microbatches == 1
            else f"micro-batches {pipeline.first_microbatch}-{last}"
        )
        cells = []
        for stage in pipeline.stages:
            layers = (
                f"layer {stage.first_layer}"
                if stage.first_layer == stage.last_layer
                else f"layers {stage.first_layer}-{stage.last_layer}"
            )
            cells.append((layers, ", ".join(map(str, stage.workers))))
        widths = [max(map(len, cell)) for cell in cells]
        lines.append(f"pipeline {number}: {count(len(pipeline.nodes), 'node')}, {batch}")
        lines.extend(
            "  | " + " | ".join(c[row].ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"
            for row in (0, 1)
        )
    lines.append(f"estimated step: {step_s(plan, profile, templates):.4g} s")
    return "\n".join(lines) + "\n"


def step_s(plan: Plan, profile: Profile, templates: Mapping[int, PipelineTemplate]) -> float:
    """Estimated time of one step: by a dry run, or by the cost model's formula where stages of
    several workers have no programs yet."""
    if all(len(stage.workers) == 1 for p in plan.pipelines for stage in p.stages):
        return simulate(compile_programs(plan, tied=False), profile, plan=plan).step_s
    missing = {len(p.nodes) for p in plan.pipelines} - set(templates)
    for size in sorted(missing):  # a reconfiguration may go beyond the specification
        templates = {**templates, **generate_templates(profile, range(size, size + 1))}
    costs = [pipeline_cost(templates[len(p.nodes)], profile) for p in plan.pipelines]
    slowest = max(cost.time(p.microbatches) for cost, p in zip(costs, plan.pipelines, strict=True))
    gradient_bytes = max(cost.gradient_bytes for cost in costs)
    return seconds(slowest + sync_ticks(gradient_bytes, pipelines=len(costs), links=profile.links))


def _make(
    profile: Profile, *, nodes: int, fault_tolerance: int, global_batch: int, min_nodes: int
) -> tuple[Plan, Mapping[int, PipelineTemplate]]:
    if global_batch < 1 or global_batch % profile.microbatch:
        raise ValueError(
            f"global_batch is {global_batch}; it must be a multiple of microbatch "
            f"({profile.microbatch})"
        )
    sizes = node_specification(
        profile, nodes=nodes, fault_tolerance=fault_tolerance, min_nodes=min_nodes
    )
    templates = generate_templates(profile, sizes)
    plan = instantiate(
        templates,
        [NodeName(f"n{number}") for number in range(1, nodes + 1)],
        profile=profile,
        microbatches=global_batch // profile.microbatch,
        min_pipelines=fault_tolerance + 1,
        generation=Generation(1),
    )
    return plan, templates


def _template(template: PipelineTemplate) -> dict[str, Any]:
    return {
        "nodes": template.nodes,
        "stages": [
            {
                "first_layer": stage.first_layer,
                "last_layer": stage.last_layer,
                "node": stage.node,
                "gpus": stage.gpus,
                "forward_s": stage.forward_s,
                "backward_s": stage.backward_s,
            }
            for stage in template.stages
        ],
        "iteration_s": template.iteration_s,
    }


def _plan(
    plan: Plan, profile: Profile, templates: Mapping[int, PipelineTemplate]
) -> dict[str, Any]:
    return {
        "pipelines": [
            {"template_nodes": len(p.nodes), "microbatches": p.microbatches} for p in plan.pipelines
        ],
        "step_s": step_s(plan, profile, templates),
    }
