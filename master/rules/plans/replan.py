"""Rules about later plans: after losses, doubts and joins.

A job's first plan is `oobleck.master.rules.plans.first_plan`'s. Must not know how plans are made.
"""

from collections.abc import Sequence
from dataclasses import replace

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import NodeName
from oobleck.core.plan import Plan
from oobleck.host.detection import GATHER_WORDS_S
from oobleck.master.events.nodes import NodeDrained, NodeLost, NodeReset, WorkerLost
from oobleck.master.events.plans import Cause, FollowUpDropped
from oobleck.master.planning.requests import PlanningFailed, PlanWanted
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.rules.jobs import stalls
from oobleck.master.rules.nodes import draining, isolation, node_faults, worker_losses
from oobleck.master.rules.plans import first_plan, holders
from oobleck.master.rules.plans.boundary import undisturbed
from oobleck.master.rules.plans.next_plan import (
    give_up_lost,
    is_up,
    names,
    next_generation,
    next_plan,
    plan_made,
    wait,
)
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node

#: Nodes keep a join waiting for at most so many settle times.
_MOST_SETTLES = 3


def replan(context: Context, job: Job) -> Decision | None:
    """Answer losses, or try again while waiting, with all nodes that are ready."""
    state = context.state
    again = job.astray or job.state == "waiting for nodes"
    if not (job.current.losses or again or _unanswered(job) or _forsaken(state, job)):
        return None
    members = [state.nodes[name] for name in job.current.members]
    away = [node for node in members if not node.connected]
    if away:
        # Until that is known the job gives its turn to nobody.
        reason = f"{names(away)}: back, or lost after the lease, before planning"
        return Decision(reason=reason, holds_plans=True)
    unready = [node for node in members if not state.is_ready(node, job)]
    if job.current.put_back and (start := first_plan.get_ready(context, job)) is not None:
        return start
    coming = worker_losses.coming(state, job, unready) if job.current.losses and not again else []
    missing = [node for node in unready if node not in coming]
    patience = _for_replacements(context, job, missing)
    if patience and not all(worker_losses.takes_longer(job, node) for node in missing):
        return patience
    on_the_way = job.current.on_the_way and job.state != "waiting for nodes"
    if on_the_way and (late := _wait_for_reports(context, job, 2 * GATHER_WORDS_S)) is not None:
        return late
    live = [node for node in state.candidates(job) if state.is_ready(node, job) or node in coming]
    try:
        answer = draining.plan_without_drained(context, job, live)
    except PlanningFailed as failed:
        raise RuntimeError(f"nothing answers the loss: {failed}") from failed
    except PlanInfeasible as infeasible:
        given_up_at = holders.given_up_at(context, job)
        waits = replace(wait(state, job, infeasible), wake_at=given_up_at)
        return patience or _give_up_lost(context, job) or waits
    found = answer.found
    if not any(is_up(state, worker) for worker in found.plan.workers):
        return Decision(reason=f"{names(coming)}: to be up before planning")
    if job.state == "waiting for nodes":
        # Those that come back after the same disturbance come back together.
        here = (*live, *(state.nodes[name] for name in found.plan.nodes))  # some may be drained
        due = max(node.seen.ready_at or context.now for node in here) + context.timing.join_settle_s
        if context.now < due:
            # It goes on in a moment: it gives its turn to nobody.
            return Decision(
                wake_at=due, reason="enough nodes are here; more may follow", holds_plans=True
            )
    reason = found.reason
    lost = holders.lost_layers(state, job, found.plan)
    if lost is not None and patience:
        return patience
    if lost is not None:
        reason += f"; {lost}, so that all {_way_back(job)}"
    if coming:
        reason += f"; a process is being started on {names(coming)}"
    if missing:
        reason += f"; no replacement was ready in time on {names(missing)}"
    cause = _cause(job, found.plan)
    if cause == "worker lost" and (end := stalls.met_enough(context, job, _worker_losses(job))):
        return end
    event = plan_made(
        context,
        job,
        found.plan,
        boundary=False,
        cause=cause,
        rule=found.rule,
        reason=reason,
        restore=lost is not None,
        policy=answer.policy,
        then=answer.then or "",
        passes_over=job.unentered,
        answer=answer,
    )
    return Decision(actions=(event,), reason=reason)


def _for_replacements(context: Context, job: Job, missing: list[Node]) -> Decision | None:
    """Wait while replacement processes may still come up on `missing` nodes; None: do not wait."""
    if not missing or job.seen.loss is None:
        return None
    due = job.seen.loss.declared_at + context.timing.replacement_grace_s
    if context.now >= due:
        return None
    return Decision(wake_at=due, reason=f"{names(missing)}: replacement to come", holds_plans=True)


def _wait_for_reports(context: Context, job: Job, patience_s: float) -> Decision | None:
    """Wait while agents may still report that their workers have entered the newest plan, if
    without such reports some state has no holder; None: do not wait.

    `patience_s` counts from the newest loss.
    """
    seen = job.seen
    since = [at for at, _ in seen.peers_lost.values()]
    since += [seen.loss.declared_at] if seen.loss is not None else []
    due = max(since, default=0.0) + patience_s
    if context.now >= due or not holders.may_be_untold(context.state, job):
        return None
    reason = "agents may have more to tell of the way into the plan"
    return Decision(wake_at=due, reason=reason, holds_plans=True)


def _give_up_lost(context: Context, job: Job) -> Decision | None:
    """End a job whose state is lost for good; None: it may still be found.

    The end waits as long as a lease for reports of connected agents, because it cannot be taken
    back: an agent whose report takes longer is lost itself.
    """
    if (end := give_up_lost(context, job)) is None:
        return None
    return _wait_for_reports(context, job, context.timing.lease_s) or end


def _way_back(job: Job) -> str:
    looks = job.may_have_checkpoint and job.spec.on_state_lost != "restart"
    known = job.has_checkpoint or looks
    return "go back to the newest checkpoint" if known else "begin anew at step 1"


def _unanswered(job: Job) -> bool:
    """Losses were taken back before a plan: whether all still train is not known."""
    return job.state == "reconfiguring" and not job.current.on_the_way


def _forsaken(state: ClusterState, job: Job) -> bool:
    """The workers have met and found that nobody has some layer any more, nor a checkpoint. When
    the plan was made, nobody had told yet of a step that those who are lost committed with them."""
    if (
        job.current.made is None
        or not job.current.on_the_way
        or not job.seen.peers_lost
        or job.has_checkpoint
    ):
        return False
    return holders.lost_layers(state, job, job.current.made.plan) is not None


def _worker_losses(job: Job) -> str:
    lost = (loss for loss in job.current.losses if isinstance(loss, WorkerLost))
    return "; ".join(f"{loss.worker}: {loss.reason}" for loss in lost)


def _cause(job: Job, plan: Plan) -> Cause:
    if job.current.put_back:
        return "put back"
    if any(isinstance(loss, NodeLost) for loss in job.current.losses):
        return "node lost"
    if any(isinstance(loss, NodeReset) for loss in job.current.losses):
        return "no progress"
    if any(isinstance(loss, NodeDrained) for loss in job.current.losses):
        return "node drained"
    if job.current.lost_nodes:
        return "node left out"
    if job.current.lost_workers:
        return "worker lost"
    if job.astray:
        return "journal cut"
    return "node returned" if set(job.current.members) == set(plan.nodes) else "node joined"


def meet_after_peer_loss(context: Context, job: Job) -> Decision | None:
    """Workers lost a peer, and nobody is missing: let them meet again."""
    state = context.state
    if job.current.losses or job.state == "waiting for nodes":
        return None
    if (report := stalls.first_peer_lost(job)) is None:
        return None
    if not all(state.nodes[name].connected for name in job.current.members):
        return None
    if (without := isolation.give_up_at_once(context, job)) is not None:
        return without
    first, worker, lost = report
    due = first + stalls.interval_s(job, context.timing)
    if context.now < due:
        return Decision(wake_at=due, reason=f"{worker} lost a peer and nobody is missing so far")
    if (without := isolation.give_up(context, job)) is not None:
        return without
    if job.current.newcomers and job.seen.since_step.regroups:
        why = f"the workers do not come together with it: {worker} lost a peer: {lost.detail}"
        out = tuple(
            node_faults.left_out(job, state.nodes[node], why) for node in job.current.newcomers
        )
        return Decision(actions=out, reason=why)
    reason = f"{worker} lost a peer though nobody is missing: {lost.detail}"
    if lost.left:
        reason = lost.detail
    return stalls.meet_again(
        context, job, cause="peers lost", reason=reason, detect_s=context.now - first
    )


def join(context: Context, job: Job) -> Decision | None:
    """Take in nodes that are ready and have no part in the plan, at a step boundary."""
    state = context.state
    if not undisturbed(state, job):  # of a drained node the place is not free yet
        return None
    ready = [node for node in state.candidates(job) if state.is_ready(node, job)]
    # Those that stand by are taken back when that is worth it
    # (`oobleck.master.rules.stragglers.uneven`).
    due = _settled_at(context, job, [n for n in ready if n.facts.node not in job.standing_by])
    if due is None:
        return None
    if context.now < due:
        return Decision(wake_at=due, reason="nodes are about to join")
    try:
        answer = next_plan(context, job, ready, next_generation(context, job), "templates")
    except PlanInfeasible as infeasible:
        return Decision(reason=f"ready nodes stay idle: {'; '.join(infeasible.causes)}")
    found = answer.found
    if not set(found.plan.nodes) > set(job.current.members):
        return Decision(reason="ready nodes stay idle: no combination of templates uses them")
    event = plan_made(
        context,
        job,
        found.plan,
        boundary=True,
        cause="worker well" if _stood_by(state, job, found.plan) else "node joined",
        rule=found.rule,
        reason=found.reason,
        detect_s=0.0,  # until it has settled, nothing waits for it
        then=answer.then or "",
        answer=answer,
    )
    return Decision(actions=(event,), reason=found.reason)


def _stood_by(state: ClusterState, job: Job, plan: Plan) -> bool:
    """Return whether all nodes that `plan` takes in stood by before, and so are well now."""
    if job.current.made is None:
        return False
    before = {slow.worker for slow in job.current.made.standing_by}
    return all(
        any(worker.node == name for worker in before) and _has_trained(state, job, name)
        for name in plan.nodes
        if not job.current.has_member(name)
    )


def _has_trained(state: ClusterState, job: Job, name: NodeName) -> bool:
    """Return whether all processes of the node have had a part in a plan."""
    workers = state.nodes[name].seen.status.workers
    return all(worker.incarnation in job.lineage.replaced for worker in workers)


def _settled_at(context: Context, job: Job, ready: Sequence[Node]) -> float | None:
    """Return when `ready` nodes outside the plan are taken in together; None: there are none."""
    members = job.current.has_member
    since = [n.seen.ready_at or context.now for n in ready if not members(n.facts.node)]
    settle = context.timing.join_settle_s
    return min(max(since) + settle, min(since) + _MOST_SETTLES * settle) if since else None


def follow_up(context: Context, job: Job) -> Decision | None:
    """Make the follow-up plan at a step boundary; None: none is due.

    A plan that moved no state, so that training went on at once, is followed by one of templates or
    one with a stage moved. A plan that leaves layers with few nodes is followed by its shadows. The
    follow-up is dropped if no stage is worth moving, no shadow can be added or planning failed: a
    new search takes seconds and would end the same. Templates are tried again, since nodes that
    come may make them possible.
    """
    state, made = context.state, job.current.made
    if made is None or not made.then or not undisturbed(state, job):
        return None
    ready = [node for node in state.candidates(job) if state.is_ready(node, job)]
    due = _settled_at(context, job, [n for n in ready if n.facts.node not in job.standing_by])
    if due is not None and context.now < due:
        return None  # they join in the same plan
    wanted: PlanWanted = made.then
    try:
        answer = next_plan(context, job, ready, next_generation(context, job), wanted)
    except PlanInfeasible as infeasible:
        why = "; ".join(infeasible.causes)
        if wanted == "templates" and not isinstance(infeasible, PlanningFailed):
            return Decision(reason=f"no {wanted} so far: {why}")
        dropped = FollowUpDropped(job_id=job.id, generation=job.current.generation, reason=why)
        return Decision(actions=(dropped,), reason=f"no {wanted}: {why}")
    found = answer.found
    event = plan_made(
        context,
        job,
        found.plan,
        boundary=True,
        cause="few holders" if answer.policy == "shadow" else "re-routed",
        rule=found.rule,
        reason=found.reason,
        detect_s=0.0,  # nothing waits for it
        policy=answer.policy,
        then=answer.then or "",
        answer=answer,
    )
    return Decision(actions=(event,), reason=found.reason)
