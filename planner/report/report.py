"""Report of `oobleck plan`: templates, the plan and its step estimate, as data and text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oobleck.core.ids import Generation, NodeName
from oobleck.core.job.spec import RecoveryPolicy
from oobleck.core.plan import PipelineTemplate, Plan
from oobleck.core.profile import MOST_NODES, Profile
from oobleck.core.schedules import Schedule
from oobleck.core.ties import Ties
from oobleck.core.units import count, format_bytes, runs
from oobleck.planner.cost.estimate import KindEstimate, StepEstimate
from oobleck.planner.profile.memory import GPU_CONTEXT_BYTES, gpu_reserve_bytes
from oobleck.planner.programs.communicators import MOST_COMMUNICATORS, Needed, needed
from oobleck.planner.recovery.course import most_more
from oobleck.planner.recovery.outlook import MTBF_S, Outlook
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.planner.recovery.terms import Terms
from oobleck.planner.report.drawing import (
    WIDTH,
    draw_pipelines,
    draw_shadows,
    draw_timeline,
    some,
)
from oobleck.planner.report.tables import Loss, Slowness, losses, read_rates, slowness
from oobleck.planner.search.catalogue import Catalogue
from oobleck.planner.search.choose import ScheduleChoice, choose_schedule
from oobleck.planner.search.firstplan import make_first_plan, node_specification

#: Planning for more takes too long to be of use.
MOST_SAMPLES = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Plan under its chosen schedule."""

    plan: Plan
    #: Nodes that the plan leaves out.
    idle: tuple[NodeName, ...] = ()
    choice: ScheduleChoice
    #: Groups of layers that share parameters.
    tied: Ties = False

    @property
    def needs(self) -> Needed:
        """Communicators that the plan needs, and their memory of a GPU."""
        return needed(self.plan, tied=self.tied)

    def step_s_by(self, profile: Profile) -> float:
        """Return the plan's step time by another profile."""
        plan = self.plan
        return choose_schedule(plan, profile, tied=self.tied, wanted=plan.schedule).step_s

    @property
    def estimate(self) -> StepEstimate:
        return self.choice.estimates[self.choice.schedule]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Answer to `oobleck plan`."""

    profile: Profile
    templates: Mapping[int, PipelineTemplate]
    first: Outcome
    #: Losses, each with its plan if that is one of templates; None: losses were not asked for.
    losses: tuple[tuple[Loss, Outcome | None], ...] | None
    #: None: slow workers were not asked for.
    slowness: Slowness | None = None

    def data(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        report: dict[str, Any] = {
            "templates": [_template(template) for _, template in sorted(self.templates.items())],
            "plan": _plan(self.first, self.profile),
        }
        if self.losses is not None:
            report["after_losses"] = [
                loss.data(_loss_plan(loss, outcome, self.profile)) for loss, outcome in self.losses
            ]
        if self.slowness is not None:
            report["slow"] = self.slowness.data()
        return report

    def drawing(self, width: int = WIDTH) -> str:
        """Draw the plan's pipelines, the timeline of the first where it is small, and the step."""
        return draw(self.first, self.profile, width)


def make_report(
    profile: Profile,
    *,
    nodes: int,
    fault_tolerance: int,
    global_batch: int,
    min_nodes: int = 1,
    lost: int = 0,
    tied: Ties = False,
    wanted: Schedule | None = None,
    policy: RecoveryPolicy = "templates",
    slow: Sequence[str] = (),
    shadows: bool = False,
    mtbf_s: float = MTBF_S,
) -> PlanReport:
    """Make templates and plan for nodes n1 .. n<nodes>.

    With `lost` the report also has the results of so many losses, one after the other, answered by
    `policy`. `tied`: groups of layers that share parameters. `wanted`: schedule to use; None: the
    best one. `slow`: slow workers, as `read_rates` parses them; the report has the answers to them
    before any loss. `shadows`: nodes may hold layers without running them. `mtbf_s`: mean time
    between losses of a node.

    Raises ValueError with the field and the fix, or PlanInfeasible.
    """
    _check(profile, nodes, global_batch, lost)
    sizes = node_specification(
        profile,
        nodes=nodes,
        fault_tolerance=fault_tolerance,
        min_nodes=min_nodes,
        shadows=shadows,
    )
    names = [NodeName(f"n{number}") for number in range(1, nodes + 1)]
    rates = read_rates(slow, names, profile.gpus_per_node)
    catalogue = Catalogue(tied=tied)
    made = make_first_plan(
        catalogue,
        sizes,
        names,
        profile=profile,
        microbatches=global_batch // profile.microbatch,
        min_pipelines=fault_tolerance + 1,
        generation=Generation(1),
        wanted=wanted,
        shadows=shadows,
    )
    offer = made.offer
    first = Outcome(plan=made.plan, idle=_unused(made.plan, names), choice=made.choice, tied=tied)
    terms = Terms(
        profile=profile,
        sizes=sizes,
        fault_tolerance=fault_tolerance,
        tied=tied,
        schedule=wanted,
        shadows=shadows,
    )
    asked = terms.change(
        catalogue,
        plan=first.plan,
        base=first.plan,
        live=names,
        generation=Generation(first.plan.generation + 1),
        most_more=most_more(policy),
    )
    outlook = Outlook(per_node_s=1 / mtbf_s)
    after = (
        (loss, _outcome(loss, profile, tied=tied)) for loss in losses(asked, policy, lost, outlook)
    )
    return PlanReport(
        profile=profile,
        templates=offer.templates,
        first=first,
        losses=tuple(after) if lost else None,
        slowness=slowness(replace(asked, rates=rates), made.choice.step_s) if slow else None,
    )


def _check(profile: Profile, nodes: int, global_batch: int, lost: int) -> None:
    if nodes > MOST_NODES:
        raise ValueError(
            f"nodes is {nodes}; it must be at most {MOST_NODES}, more than any cluster has"
        )
    if not 0 <= lost < nodes:
        raise ValueError(f"lost is {lost}; it must be at least 0 and less than nodes ({nodes})")
    if global_batch < 1 or global_batch % profile.microbatch:
        raise ValueError(
            f"global_batch is {global_batch}; it must be a multiple of microbatch "
            f"({profile.microbatch})"
        )
    if global_batch > MOST_SAMPLES:
        raise ValueError(
            f"global_batch is {global_batch}; it must be at most {MOST_SAMPLES}, as in a job"
        )


def _outcome(loss: Loss, profile: Profile, *, tied: Ties) -> Outcome | None:
    """Return the new plan's outcome, if it is one of templates."""
    if loss.taken is None or loss.taken.policy != "templates":
        return None
    plan = loss.taken.found.plan
    choice = choose_schedule(plan, profile, tied=tied, wanted=plan.schedule)
    return Outcome(plan=plan, idle=_unused(plan, loss.live), choice=choice, tied=tied)


def draw(outcome: Outcome, profile: Profile, width: int = WIDTH) -> str:
    """Draw the pipelines of a plan, each kind once, and the step estimate."""
    plan, estimate = outcome.plan, outcome.estimate
    parts = [draw_pipelines(plan, estimate, memory_limit=profile.gpu_memory_bytes, width=width)]
    if outcome.idle:
        parts.append(_idle(outcome))
    strip = draw_timeline(estimate.kinds[0], plan.schedule, width=width)
    if strip is not None:
        parts.append(strip)
    if plan.shadows:
        parts.append(draw_shadows(plan))
    parts.append(
        f"schedule: {outcome.choice.reason}\n"
        f"estimated step: {estimate.step_s:.4g} s, "
        f"of which workers idle {100 * estimate.bubble:.1f}%\n"
        f"peak memory: {format_bytes(estimate.peak_bytes)} of "
        f"{format_bytes(profile.gpu_memory_bytes)} per worker\n"
        f"{_nccl(outcome.needs, profile)}"
        f"can lose: {_can_lose(plan)}"
    )
    return "\n\n".join(parts) + "\n"


def _nccl(needs: Needed, profile: Profile) -> str:
    """Describe the GPU memory needed beside the peak; empty where no two workers communicate."""
    if not needs.communicators:
        return ""
    many = count(needs.communicators, "communicator")
    if needs.communicators > MOST_COMMUNICATORS:
        return (
            f"on GPUs: one would be in {many}, and {MOST_COMMUNICATORS} work;\n"
            "  messages would go through host memory, which is slow\n"
        )
    kept = gpu_reserve_bytes(profile.gpus_per_node) - GPU_CONTEXT_BYTES
    return (
        f"NCCL on GPUs: {many}, {format_bytes(needs.device_bytes)} beside the peak; "
        f"{format_bytes(kept)} are kept\n"
    )


def _can_lose(plan: Plan) -> str:
    nodes = can_lose(plan)
    if not nodes:
        return "no node without going back to a checkpoint"
    return f"{count(nodes, 'node')} at a time, whichever {'it is' if nodes == 1 else 'they are'}"


def _idle(outcome: Outcome) -> str:
    idle, plan = outcome.idle, outcome.plan
    microbatches = plan.microbatches
    return (
        f"idle: {count(len(idle), 'node')} ({some(idle)}): no pipelines of these templates use "
        f"them, with a share of the step's micro-batches ({microbatches}) for each"
    )


def _unused(plan: Plan, live: Sequence[NodeName]) -> tuple[NodeName, ...]:
    used = frozenset(plan.nodes)
    return tuple(node for node in live if node not in used)


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


def _plan(outcome: Outcome, profile: Profile) -> dict[str, Any]:
    estimate = outcome.estimate
    return {
        "pipelines": [
            {"template_nodes": len(p.nodes), "microbatches": p.microbatches}
            for p in outcome.plan.pipelines
        ],
        "idle": list(outcome.idle),
        "step_s": estimate.step_s,
        "schedule": estimate.schedule,
        "schedule_reason": outcome.choice.reason,
        "schedules": {
            schedule: {"step_s": e.step_s, "bubble": e.bubble, "peak_bytes": e.peak_bytes}
            for schedule, e in outcome.choice.estimates.items()
        },
        "bubble": estimate.bubble,
        "can_lose": can_lose(outcome.plan),
        "shadows": [
            {"worker": str(worker), "first_layer": run[0], "last_layer": run[-1]}
            for worker, layers in outcome.plan.shadows.items()
            for run in runs(layers)
        ],
        "peak_bytes": estimate.peak_bytes,
        "gpu_memory_bytes": profile.gpu_memory_bytes,
        "nccl": {
            "communicators": outcome.needs.communicators,
            "bytes": outcome.needs.device_bytes,
            "rounds": outcome.needs.rounds,
        },
        "kinds": [_kind(kind) for kind in estimate.kinds],
    }


def _loss_plan(loss: Loss, outcome: Outcome | None, profile: Profile) -> dict[str, Any] | None:
    """Return the plan that answers the loss: one of templates in full, as the first plan, another
    one by its routes. Return None where there is no answer."""
    if outcome is not None:
        return _plan(outcome, profile)
    if loss.taken is None:
        return None
    plan = loss.taken.found.plan
    return {"routes": _routes(plan), "idle": [], "step_s": loss.taken.step_s}


def _routes(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "microbatches": route.microbatches,
            "hops": [
                {
                    "first_layer": hop.first_layer,
                    "last_layer": hop.last_layer,
                    "workers": [str(worker) for worker in hop.workers],
                }
                for hop in route.hops
            ],
        }
        for route in plan.routes
    ]


def _kind(kind: KindEstimate) -> dict[str, Any]:
    """Return a kind of alike pipelines, by their positions in `pipelines`."""
    return {
        "template_nodes": len(kind.pipeline.nodes),
        "microbatches": kind.pipeline.microbatches,
        "pipelines": list(kind.numbers),
        "stages": [
            {
                "first_layer": stage.first_layer,
                "last_layer": stage.last_layer,
                "gpus": len(stage.workers),
                "busy_s": busy_s,
                "peak_bytes": peak_bytes,
            }
            for stage, busy_s, peak_bytes in zip(
                kind.pipeline.stages, kind.busy_s, kind.peak_bytes, strict=True
            )
        ],
    }
