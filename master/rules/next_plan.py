"""The plan after the newest one, unless it would lose what must not be lost. Pure."""

from collections.abc import Sequence

from oobleck.master.planning import client
from oobleck.master.rules import holders
from oobleck.master.rules.decision import Context
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node
from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.ids import Generation
from oobleck.planner.recovery.reconfigure import Reconfiguration
from oobleck.planner.units import listed


def next_plan(
    context: Context, job: Job, live: Sequence[Node], generation: Generation
) -> Reconfiguration:
    """The plan after `job`'s newest one, on `live`. Raises StillPlanning, and PlanInfeasible, also
    where a layer of a model that has been trained has no holder in the new plan, and there is no
    checkpoint, unless it is gone for good and the job wants to begin anew then."""
    found = client.next_plan(context.planner, job, live, generation)
    lost = holders.lost_layers(context.state, job, found.plan)
    if lost is None or job.has_checkpoint:
        return found
    if job.spec.on_state_lost == "restart" and holders.gone_for_good(context, job) is not None:
        return found
    away = listed(holders.may_bring_back(context, job, lost.layers))
    hope = f"only {away} with the workers of before can bring it back; or " if away else ""
    fix = "cancel the job and submit it again, since there is no checkpoint"
    if job.spec.on_state_lost == "restart":
        fix = "it begins anew once nothing can, since there is no checkpoint"
    raise PlanInfeasible(*lost.causes, hope + fix) from lost
