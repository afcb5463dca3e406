"""Decisions of the master: the next thing to do, as a pure function over its state.

`reconcile` looks at the state, not at the last event. Each rule compares the observed with the
desired state, and the first rule with a decision wins. Decisions are facts (`Journaled` events);
the shell journals and applies them and asks again until nothing is left. Informing the agents needs
no action: their assignments follow from the state, and the shell sends those that have changed.
Must not know the clock, I/O, or how messages travel.
"""

from oobleck.host.detection import Detection
from oobleck.master.config import GIVES_WAY_S, Retention
from oobleck.master.planning.requests import Planner, StillPlanning
from oobleck.master.planning.solve import AtOnce
from oobleck.master.rules import (
    adoption,
    boundary,
    draining,
    faults,
    first_plan,
    jobs,
    losses,
    pace,
    replan,
    stalls,
)
from oobleck.master.rules.decision import Context, Decision, JobRule, Rule
from oobleck.master.state.cluster import ClusterState

_RETENTION = Retention()


def reconcile(
    state: ClusterState,
    now: float,
    config: Detection,
    *,
    nonce: str,
    planner: Planner | None = None,
    retain: Retention = _RETENTION,
    gives_way_s: float = GIVES_WAY_S,
) -> Decision:
    """Return what to do next, when to look again, and why. Pure: no clock, no I/O, no randomness.

    `planner` makes the plans; None: they are computed synchronously.
    """
    context = Context(
        state=state,
        now=now,
        timing=config,
        nonce=nonce,
        planner=planner or AtOnce(),
        retention=retain,
        gives_way_s=gives_way_s,
    )
    wake_at: float | None = None
    reasons: list[str] = []
    held, awaits, why_idle = False, None, ""
    for rule in (*_RULES, *_AT_LAST):
        if held and rule in _RULES:
            continue
        try:
            decision = rule(context)
        except StillPlanning as still:
            decision = Decision(reason=str(still), awaits=still.request, holds_plans=True)
        if decision is None:
            continue
        if decision.actions:
            return decision
        if decision.wake_at is not None:
            wake_at = decision.wake_at if wake_at is None else min(wake_at, decision.wake_at)
        if decision.reason:
            reasons.append(decision.reason)
        held, awaits = held or decision.holds_plans, awaits or decision.awaits
        why_idle = why_idle or decision.why_idle
    reason = "; ".join(reasons)
    return Decision(wake_at=wake_at, reason=reason, awaits=awaits, why_idle=why_idle)


def _of_job(rule: JobRule) -> Rule:
    """Return a rule that applies while a job is active."""

    def ask(context: Context) -> Decision | None:
        job = context.state.job
        return rule(context, job) if job is not None else None

    return ask


def _of_plan(rule: JobRule, *, made: bool = True) -> Rule:
    """Return a rule that applies while the active job has a plan, or (`made` false) has none
    yet."""
    return _of_job(
        lambda context, job: rule(context, job) if (job.current.made is not None) == made else None
    )


#: In this order; the comment of each rule says why it precedes the following ones.
_RULES: tuple[Rule, ...] = (
    # Everything else counts on nodes: losses must be known before anything is planned.
    losses.lose_nodes,
    # This makes a node a candidate, and the plans below shall have it.
    losses.clear_nodes,
    # A node that is to be drained is no candidate, so drains precede plans too.
    draining.take_wishes,
    # A job that is trained is active, whatever the journal says.
    adoption.take_up,
    # Most rules below are about the active job: there must be one.
    jobs.next_job,
    # A running plan is adopted before a part of it is declared lost, or a new one is made.
    _of_job(adoption.adopt),
    # An agent that says goodbye is no failure: its node goes before failures are counted.
    draining.farewell,
    # Failures are counted before plans are made, so that a node that is put aside is in none.
    faults.put_aside,
    # A node is released only after this count of its failures, and in time for the plans.
    faults.release,
    # Sick nodes are taken back here too, before others are taken out.
    draining.take_back,
    draining.take_out,
    # A drained node is released before a plan could need it again.
    draining.finish,
    # The job's progress decides everything below; checkpoints may set it back.
    jobs.note_checkpoint,
    # A step ends an incident: evidence found below belongs to the next one.
    _of_plan(jobs.first_step),
    # The same holds for a step that repeats known ones.
    _of_job(jobs.caught_up),
    # A job that has failed by its own fault blames no node, and is not planned again.
    _of_job(faults.fail_job),
    # A job that is over, or cancelled, gets no more losses nor plans.
    jobs.end_jobs,
    # A node at fault is left out as a whole before its workers are declared lost one by one.
    _of_job(faults.leave_out),
    # So is one that cannot take part; both before a first plan or the next has it.
    _of_job(faults.leave_out_unfit),
    # Losses of workers are declared before they are answered, all of one moment together.
    _of_plan(losses.lose_workers),
    # A replacement that does not start is one more loss for the same answer.
    _of_plan(losses.give_up_late),
    # The first plan; the rules above and below are about losses of later ones.
    _of_plan(first_plan.start, made=False),
    # Declared losses are answered before lack of progress, which says less.
    _of_plan(replan.replan),
    # A lost peer leads to a new rendezvous only if no node or worker is missing.
    _of_plan(stalls.meet_after_peer_loss),
    # A job lets another one train only if no plan was found for it by then.
    _of_job(jobs.give_way),
    # Lack of progress says least about the fault, so it is last of all evidence.
    _of_plan(stalls.rouse),
    _of_plan(jobs.save_in_time),
    # Slow workers are known before voluntary plans are made.
    _of_plan(pace.watch),
    # Changes at a step boundary follow urgent ones. Leaving nodes precede new ones, so that one
    # plan does both.
    _of_plan(draining.move_off),
    _of_plan(boundary.join),
    # A join also makes a plan of templates, so a follow-up after it would move state twice.
    _of_plan(boundary.follow_up),
    # Uneven shares are last: a plan with a follow-up due will be replaced anyway.
    _of_plan(boundary.even_out),
)
#: Clean-up that no other rule depends on; it runs even while other rules wait.
_AT_LAST: tuple[Rule, ...] = (losses.forget_nodes, jobs.forget_jobs)
