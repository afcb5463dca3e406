"""From a plan to the fact that it was made: its processes, rendezvous, and what it answers."""

from oobleck.host.ipc.messages import Rendezvous
from oobleck.master.events.nodes import NodeYielded, WorkerLost
from oobleck.master.events.plans import Cause, PlanMade
from oobleck.master.rules import holders
from oobleck.master.rules.completion import transition
from oobleck.master.rules.decision import Context
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.evidence import carried
from oobleck.master.state.job import MOST_GENERATION, Job
from oobleck.planner.ids import Generation, Incarnation, WorkerId
from oobleck.planner.programs.plan import Plan
from oobleck.planner.recovery.reconfigure import can_lose


def next_generation(context: Context, job: Job) -> Generation:
    """Above every generation that anyone knows of."""
    told = (
        node.seen.status.generation
        for node in context.state.nodes.values()
        if node.connected and node.seen.status.job_id == job.id
        if node.seen.status.generation <= MOST_GENERATION
    )
    return Generation(max(job.newest_known, *told, 0) + 1)


def plan_made(
    context: Context,
    job: Job,
    plan: Plan,
    *,
    boundary: bool,
    cause: Cause,
    rule: str,
    reason: str,
    detect_s: float | None = None,
    restore: bool = False,
) -> PlanMade:
    """`restore`: workers shall go back to the newest checkpoint. So they shall, too, where they
    were to and have not come to a step since: who of them has is not known."""
    if detect_s is None:
        loss = job.seen.loss
        detect_s = loss.declared_at - loss.evidence_at if loss is not None else 0.0
    go_back = restore or (job.on_the_way and job.made is not None and job.made.restore)
    before = set(job.members)
    handover = not restore and _needs_handover(context.state, job, plan)
    leaving = _leaving(context.state, job, plan, boundary=boundary, handover=handover)
    return PlanMade(
        job_id=job.id,
        plan=plan,
        rendezvous=_rendezvous(context, job, plan),
        boundary=boundary,
        incarnations=tuple(_process(context.state, worker) for worker in plan.workers),
        cause=cause,
        rule=rule,
        reason=reason,
        nodes_lost=tuple(
            loss.node for loss in job.losses if not isinstance(loss, WorkerLost | NodeYielded)
        ),
        workers_lost=tuple(loss.worker for loss in job.losses if isinstance(loss, WorkerLost)),
        nodes_joined=tuple(node for node in plan.nodes if node not in before),
        can_lose=can_lose(plan),
        worker_slots=_slots(context.state, plan),
        detect_s=detect_s,
        leaving=leaving,
        leaving_incarnations=tuple(_process(context.state, worker) for worker in leaving),
        handover=handover,
        starting=tuple(worker for worker in plan.workers if not is_up(context.state, worker)),
        data=_data(context.state, job, plan),
        torch=_torch(context.state, plan),
        restore=go_back,
        anew=go_back and not job.has_checkpoint,
        overtaken=transition(context, job),
        evidence=() if boundary else carried(job, context.now),
    )


def _needs_handover(state: ClusterState, job: Job, plan: Plan) -> bool:
    """Whether layers of `plan` are with those alone that leave."""
    if holders.lost_layers(state, job, plan, handed_over=False) is None:
        return False
    return holders.lost_layers(state, job, plan) is None


def _leaving(
    state: ClusterState, job: Job, plan: Plan, *, boundary: bool, handover: bool
) -> tuple[WorkerId, ...]:
    """Workers that must hear of `plan` though they have no part in it: at a boundary all of the
    plan before, since the switch takes their votes, and those that hand over layers."""
    leaving = set(job.processes()) if boundary else set()
    if handover:
        leaving.update(holders.departing(state, job, plan))
    return tuple(sorted(leaving - set(plan.workers)))


def _slots(state: ClusterState, plan: Plan) -> int:
    return state.nodes[plan.nodes[0]].facts.worker_slots


def _data(state: ClusterState, job: Job, plan: Plan) -> str:
    before = job.made.data if job.made is not None else ""
    return before or state.data_of(state.nodes[plan.nodes[0]])


def _torch(state: ClusterState, plan: Plan) -> str:
    found = {state.nodes[node].torch for node in plan.nodes} - {""}
    return found.pop() if len(found) == 1 else ""


def is_up(state: ClusterState, worker: WorkerId) -> bool:
    """Whether the worker's process serves its store."""
    status = state.nodes[worker.node].seen.status.worker(worker.slot)
    return status is not None and status.store != ""


def _process(state: ClusterState, worker: WorkerId) -> Incarnation:
    """The process in the worker's slot; plans are made for ready nodes only."""
    process = state.nodes[worker.node].seen.status.worker(worker.slot)
    if process is None:
        raise RuntimeError(f"planned for {worker}, which has no process")
    return process.incarnation


def _rendezvous(context: Context, job: Job, plan: Plan) -> Rendezvous:
    """At a survivor's store if there is one (its address has proven itself), lowest name first.

    Where meetings have led to no step, at the next one's: it may be the store that fails.
    """
    old = job.processes()
    up = [worker for worker in plan.workers if is_up(context.state, worker)]
    proven = [worker for worker in up if old.get(worker) == _process(context.state, worker)] or up
    host = proven[job.seen.since_step.regroups % len(proven)]
    status = context.state.nodes[host.node].seen.status.worker(host.slot)
    store = status.store if status is not None else ""
    return Rendezvous(store=store, prefix=f"{job.id}/{plan.generation}/{context.nonce}")
