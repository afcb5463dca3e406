"""Decision on the planner's answer: journal the next plan with its processes, rendezvous and
causes, or say what the job waits for where no plan is possible.

A plan that would lose state for good is not made. Where the state is gone for good, waiting cannot
help: the job fails.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Literal

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, Incarnation, NodeName, WorkerId
from oobleck.core.job.spec import RecoveryPolicy
from oobleck.core.messages import Rendezvous
from oobleck.core.plan import Plan, WorkerRate
from oobleck.core.units import comma_separated, count
from oobleck.master.events.jobs import JobWaiting
from oobleck.master.events.nodes import NodeLost, NodeYielded, WorkerLost
from oobleck.master.events.plans import Cause, Expected, PlanMade
from oobleck.master.planning import client
from oobleck.master.planning.requests import VOLUNTARY, PlanWanted
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.rules.jobs.completion import fail, reconfiguration_stats
from oobleck.master.rules.plans import holders
from oobleck.master.rules.stragglers import stand_by
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.evidence import carried
from oobleck.master.state.history import GENERATIONS_PER_TERM
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node
from oobleck.planner.recovery.answer import Answer
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.planner.recovery.rules import Next

#: Less is copied in no time.
_WORTH_SAYING_BYTES = 1_000_000
_BACK = "put that right, and 'oobleck node undrain NODE' takes a node back"


def next_generation(context: Context, job: Job) -> Generation:
    """Return a generation above all that anyone knows of, and above all that the lost head of an
    adopted job may have made since.

    Generations of another term are not counted: agents that act on them follow another head, and
    this head must not make plans in that head's range.
    """
    first = context.state.history.first_generation
    if job.adopted_in is not None:
        first += (job.adopted_in // GENERATIONS_PER_TERM + 1) * GENERATIONS_PER_TERM
    own = range(first, first + GENERATIONS_PER_TERM)
    told = (
        node.seen.status.generation
        for node in context.state.nodes.values()
        if node.connected and node.held is None and node.seen.status.job_id == job.id
        if node.seen.status.generation in own
    )
    return Generation(max(job.newest_known, *told, first) + 1)


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
    policy: str = "templates",
    then: Next | Literal[""] = "",
    passes_over: bool = False,
    answer: Answer | None = None,
) -> PlanMade:
    """`restore`: workers shall go back to the newest checkpoint. So they shall where the plan
    before told them to and has committed no step: it is not known which of them have gone back.
    `passes_over`: as in `PlanMade`; `answer`: what the plan is of."""
    if detect_s is None:
        loss = job.seen.loss
        detect_s = loss.declared_at - loss.evidence_at if loss is not None else 0.0
    current = job.current
    unfinished = current.made if current.on_the_way else None
    go_back = restore or (unfinished is not None and unfinished.restore)
    before = set(current.members)
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
        reason=reason + (_outrun(answer.outrun_bytes) if answer is not None and boundary else ""),
        nodes_lost=tuple(
            loss.node
            for loss in job.current.losses
            if not isinstance(loss, WorkerLost | NodeYielded)
        ),
        workers_lost=tuple(
            loss.worker for loss in job.current.losses if isinstance(loss, WorkerLost)
        ),
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
        engine=context.state.nodes[plan.nodes[0]].build.engine,
        restore=go_back,
        anew=go_back and not job.has_checkpoint and job.spec.on_state_lost == "restart",
        policy=policy,
        then=then,
        expected=_expected(answer),
        passes_over=passes_over,
        standing_by=tuple(
            WorkerRate(worker=worker, rate=rate)
            for worker, rate in sorted(job.rates.items())
            if worker.node not in plan.nodes and worker.node not in job.current.lost_nodes
        ),
        stand_by_for=tuple(stand_by.taken_out(context, job, plan)),
        overtaken=reconfiguration_stats(context, job),
        evidence=() if boundary else carried(job, context.now),
    )


def _expected(answer: Answer | None) -> Expected | None:
    if answer is None:
        return None
    return Expected(step_s=answer.step_s, stall_s=answer.stall_s)


def _outrun(count: int) -> str:
    if count < _WORTH_SAYING_BYTES:
        return ""
    return (
        f"; of the state that moves, about {count / 1e6:.0f} MB are copied at the switch: the "
        "gradients of a step outrun the links"
    )


def _needs_handover(state: ClusterState, job: Job, plan: Plan) -> bool:
    """Return whether only leaving workers hold some layers of `plan`."""
    if holders.lost_layers(state, job, plan, handed_over=False) is None:
        return False
    return holders.lost_layers(state, job, plan) is None


def _leaving(
    state: ClusterState, job: Job, plan: Plan, *, boundary: bool, handover: bool
) -> tuple[WorkerId, ...]:
    """Workers that must hear of `plan` though they have no part in it: at a boundary all of the
    plan before, since the switch takes their votes, and those that hand over layers."""
    leaving = set(job.current.processes()) if boundary else set()
    if handover:
        leaving.update(holders.departing(state, job, plan))
    return tuple(sorted(leaving - set(plan.workers)))


def _slots(state: ClusterState, plan: Plan) -> int:
    return state.nodes[plan.nodes[0]].facts.worker_slots


def _data(state: ClusterState, job: Job, plan: Plan) -> str:
    before = job.current.made.data if job.current.made is not None else ""
    return before or state.data_of(state.nodes[plan.nodes[0]])


def _torch(state: ClusterState, plan: Plan) -> str:
    found = {state.nodes[node].build.torch for node in plan.nodes} - {""}
    return found.pop() if len(found) == 1 else ""


def is_up(state: ClusterState, worker: WorkerId) -> bool:
    """Return whether other workers can call the worker's process."""
    status = state.nodes[worker.node].seen.status.worker(worker.slot)
    return status is not None and status.card != ""


def _process(state: ClusterState, worker: WorkerId) -> Incarnation:
    """The process in the worker's slot; plans are made for ready nodes only."""
    process = state.nodes[worker.node].seen.status.worker(worker.slot)
    if process is None:
        raise RuntimeError(f"planned for {worker}, which has no process")
    return process.incarnation


def _rendezvous(context: Context, job: Job, plan: Plan) -> Rendezvous:
    """Return the rendezvous of `plan`. Its host is a survivor if there is one (its address is
    proven), lowest name first. After a rendezvous that led to no step, the next candidate hosts it,
    since the host may be at fault.
    """
    old = job.current.processes()
    up = [worker for worker in plan.workers if is_up(context.state, worker)]
    proven = [worker for worker in up if old.get(worker) == _process(context.state, worker)] or up
    host = proven[job.seen.since_step.regroups % len(proven)]
    prefix = f"{job.id}/{plan.generation}/{context.nonce}"
    cards = tuple(_card(context.state, worker) for worker in plan.workers)
    return Rendezvous(host=_card(context.state, host), prefix=prefix, cards=cards)


def _card(state: ClusterState, worker: WorkerId) -> str:
    status = state.nodes[worker.node].seen.status.worker(worker.slot)
    return status.card if status is not None else ""


def next_plan(
    context: Context,
    job: Job,
    live: Sequence[Node],
    generation: Generation,
    wanted: PlanWanted | None = None,
) -> Answer:
    """Return the plan that replaces `job`'s newest one on `live`, by the `wanted` policy; None: the
    policy after a loss.

    Nodes that stand by get a part only if without them no plan is possible, or only plans that can
    lose fewer nodes than the job wants.

    Raises StillPlanning and PlanInfeasible. A plan is also infeasible if it leaves a layer of a
    trained model without a holder and there is no checkpoint. The exception is a layer that is gone
    for good, in a job that wants to begin anew then.
    """
    wanted = wanted or _for_losses(job)
    at_work = [node for node in live if node.facts.node not in job.standing_by]
    if wanted == "uneven" or len(at_work) == len(live):
        return _next_plan(context, job, live, generation, wanted)
    try:
        found = _next_plan(context, job, at_work, generation, wanted)
    except PlanInfeasible:
        return _next_plan(context, job, live, generation, wanted)
    if can_lose(found.found.plan) >= job.spec.fault_tolerance:
        return found
    with suppress(PlanInfeasible):
        with_all = _next_plan(context, job, live, generation, wanted)
        if can_lose(with_all.found.plan) > can_lose(found.found.plan):
            return with_all
    return found


def _next_plan(
    context: Context, job: Job, live: Sequence[Node], generation: Generation, wanted: PlanWanted
) -> Answer:
    answer = client.next_plan(context.planner, job, live, generation, wanted)
    lost = holders.lost_layers(context.state, job, answer.found.plan)
    if lost is not None and wanted in VOLUNTARY:
        raise PlanInfeasible(*lost.causes)  # nobody is forced to make a change
    if lost is not None and answer.policy != "templates" and wanted != "templates":
        # State must move all the same, so it may as well go where it is best.
        return _next_plan(context, job, live, generation, "templates")
    if lost is None or job.has_checkpoint:
        return answer
    looks = job.spec.on_state_lost == "restart" or job.may_have_checkpoint
    if looks and holders.gone_for_good(context, job) is not None:
        return answer
    away = comma_separated(holders.may_bring_back(context, job, lost.layers))
    hope = f"only {away} with the workers of before can bring it back; or " if away else ""
    fix = "cancel the job and submit it again, since there is no checkpoint"
    if job.spec.on_state_lost == "restart":
        fix = "it begins anew once nothing can, since there is no checkpoint"
    raise PlanInfeasible(*lost.causes, hope + fix) from lost


def _for_losses(job: Job) -> RecoveryPolicy:
    """The policy that the job wants, where workers hold what the plan to change says: not between
    one that moves state is entered and has committed a step, nor after another job had the turn.
    `uneven` is none for losses."""
    made = job.current.made
    moving = made is not None and made.policy != "reroute" and job.current.on_the_way
    moving = moving and not job.unentered
    wanted = job.spec.recovery.policy
    if moving or job.current.put_back or wanted == "uneven":
        return "templates"
    return wanted


def names(nodes: Iterable[Node]) -> str:
    return comma_separated(node.facts.node for node in nodes)


def wait(state: ClusterState, job: Job, infeasible: PlanInfeasible, *more: str) -> Decision:
    out = _left_out(sorted(job.left_out.items()))
    odd = _left_out((node.facts.node, why) for node, why in state.alike(job)[1])
    slots = state.worker_slots(job) or 0
    connected = [node for node in state.nodes.values() if node.connected]
    others = [node for node in connected if node.facts.worker_slots != slots]
    drained = [
        n for n in connected if n.drain is not None and n.drain.by == "operator" and n.drain.done
    ]
    undrain = f"drained: {names(drained)} ('oobleck node undrain NODE' takes one back)"
    idle = f"kept idle: {names(others)}, because the job uses nodes with {count(slots, 'worker')}"
    causes = (
        *infeasible.causes,
        *more,
        *([idle] if others else []),
        *([undrain] if drained else []),
        *odd,
        *out,
        *([_BACK] if out else []),
    )
    reason = "; ".join(causes)
    if job.state == "waiting for nodes" and job.reason == reason:
        return Decision(reason=reason)
    return Decision(actions=(JobWaiting(job_id=job.id, causes=causes),), reason=reason)


def _left_out(nodes: Iterable[tuple[NodeName, str]]) -> list[str]:
    """Each reason once, with all that it keeps out."""
    by_reason: dict[str, list[NodeName]] = {}
    for node, why in nodes:
        by_reason.setdefault(why, []).append(node)
    return [
        f"{comma_separated(found)} {'is' if len(found) == 1 else 'are'} left out: {why}"
        for why, found in by_reason.items()
    ]


def give_up_lost(context: Context, job: Job) -> Decision | None:
    """The end of a job whose state nobody has, nor can bring back, where there is no checkpoint and
    it does not want to begin anew."""
    if job.has_checkpoint or job.may_have_checkpoint or job.spec.on_state_lost == "restart":
        return None
    if (lost := holders.gone_for_good(context, job)) is None:
        return None
    why = [
        f"{loss.node}: {loss.reason}" for loss in job.current.losses if isinstance(loss, NodeLost)
    ]
    reason = "; ".join(
        (
            f"{lost}, nor can any node that is away bring it back, and there is no checkpoint",
            *_left_out(sorted(job.left_out.items())),
            *why,
            "submit the job again, with checkpoint.path to go on from one after such a loss, or "
            "with on_state_lost: restart to begin anew by itself",
        )
    )
    return fail(context, job, reason)
