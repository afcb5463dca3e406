"""The rule about plans that the journal does not have, because its end was lost.

Agents tell with every registration which plan their workers run. Where that is newer than all that
the journal knows, nothing else is decided about the job until all nodes of that plan are back: then
it is the job's plan, and nobody has to stop for it. Where some do not come back in the time that
agents have for that, only what the workers hold is learnt from it (`PlanFound`), and a new plan is
made with those who are there, as after a loss.
"""

from collections.abc import Iterable, Mapping

import msgspec

from oobleck.host.ipc.messages import Assign
from oobleck.master.events.plans import PlanFound, PlanMade
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import ENDED, Job
from oobleck.master.state.node import Node
from oobleck.planner.ids import Incarnation, NodeName, WorkerId
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.proto.types import Assignment


def runs_unknown(state: ClusterState, running: Assignment | None) -> bool:
    """Whether `running` is of a job that goes on and has a plan that is newer than those known."""
    if running is None or running.assign is None or running.job_id not in state.jobs:
        return False
    job = state.jobs[running.job_id]
    fits = running.assign.plan.layer_count == job.spec.model.layer_count
    return fits and job.state not in ENDED and running.generation > job.newest_known


def adopt(context: Context) -> Decision | None:
    state, job = context.state, context.state.job
    if job is None or job.cancel_requested or job.state == "profiling":
        return None
    told = {
        name: node.seen.running
        for name, node in sorted(state.nodes.items())
        if node.connected
        and node.seen.running is not None
        and node.seen.running.job_id == job.id
        and runs_unknown(state, node.seen.running)
    }
    if not told:
        return None
    newest = max(told.values(), key=lambda running: running.generation).assign
    assert newest is not None, "only assignments with a plan are told"
    plan = newest.plan
    leaving = {worker.node for worker in newest.leaving}
    missing = [name for name in sorted({*plan.nodes, *leaving}) if told.get(name) is None]
    missing += [name for name, of in told.items() if not _is_same_meeting(of.assign, newest)]
    what = f"the workers run generation {plan.generation}, which the journal does not have"
    if not missing:
        return Decision(actions=(_adopted(context, job, newest, told, what),), reason=what)
    due = job.seen.since + context.timing.return_s
    if context.now < due:
        reason = f"{what}; {', '.join(missing)} may still come back"
        return Decision(wake_at=due, reason=reason, holds_plans=True)
    return Decision(actions=(PlanFound(job_id=job.id, plan=plan),), reason=what)


def _is_same_meeting(told: Assign | None, newest: Assign) -> bool:
    return told is not None and told.rendezvous == newest.rendezvous


def _adopted(
    context: Context, job: Job, newest: Assign, told: Mapping[NodeName, Assignment], reason: str
) -> PlanMade:
    plan = newest.plan
    first: Node = context.state.nodes[plan.nodes[0]]
    before = set(job.members)
    return PlanMade(
        **msgspec.structs.asdict(newest),
        job_id=job.id,
        incarnations=tuple(_processes(plan.workers, told)),
        cause="journal cut",
        rule="adopt",
        reason=reason,
        nodes_lost=tuple(sorted(before - set(plan.nodes))),
        workers_lost=(),
        nodes_joined=tuple(node for node in plan.nodes if node not in before),
        can_lose=can_lose(plan),
        worker_slots=first.facts.worker_slots,
        detect_s=0.0,
        leaving_incarnations=tuple(_processes(newest.leaving, told)),
    )


def _processes(
    workers: Iterable[WorkerId], told: Mapping[NodeName, Assignment]
) -> Iterable[Incarnation]:
    """The plan counts on them; one that its node does not name is gone."""
    for worker in workers:
        named = told[worker.node].worker_incarnations
        yield named[worker.slot] if worker.slot < len(named) else Incarnation("")
