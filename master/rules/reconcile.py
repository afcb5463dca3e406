"""Decisions of the master: the next thing to do, as a pure function over its state.

`reconcile` looks at the level of things, not at the event that came last: each rule compares what
is with what should be, and the first rule with something to decide wins. What it decides are
facts (`Journaled` events); the shell journals and applies them and asks again until nothing is
left. Telling the agents needs no action: their assignments follow from the state, and the shell
sends whichever has changed. Must not know the clock, I/O, or how messages travel.
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

    `planner` gives the plans; None: they are made on the way.
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
    held, awaits = False, None
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
    return Decision(wake_at=wake_at, reason="; ".join(reasons), awaits=awaits)


def _of_job(rule: JobRule) -> Rule:
    """Asked as long as a job has its turn."""

    def ask(context: Context) -> Decision | None:
        job = context.state.job
        return rule(context, job) if job is not None else None

    return ask


def _of_plan(rule: JobRule, *, made: bool = True) -> Rule:
    """Asked as long as that job has a plan, or has none yet."""
    return _of_job(
        lambda context, job: rule(context, job) if (job.current.made is not None) == made else None
    )


#: In this order; the comment of each rule says why it stands before those that follow.
_RULES: tuple[Rule, ...] = (
    # Everything else counts on nodes: who is gone must be known before anything is planned.
    losses.lose_nodes,
    # A node becomes a candidate by this, and the plans below shall have it.
    losses.clear_nodes,
    # A node that is to be drained is no candidate, so wishes come before plans too.
    draining.take_wishes,
    # A job that is trained has its turn, whatever the journal says.
    adoption.take_up,
    # Most rules below are about the active job: there must be one.
    jobs.next_job,
    # What runs already is taken over before anyone declares a part of it lost, or plans anew.
    _of_job(adoption.adopt),
    # An agent that says goodbye is no failure: its node goes before failures are counted.
    draining.farewell,
    # Failures are counted before plans are made, so that a node that is put aside is in none.
    faults.put_aside,
    # A node comes back only after the same look at its failures, and in time for the plans.
    faults.release,
    # So do sick ones; none is taken out in the same look that wants it back.
    draining.take_back,
    draining.take_out,
    # A node that nobody needs is told so before a plan could need it again.
    draining.finish,
    # How far the job is decides all that follows; checkpoints may set it back.
    jobs.note_checkpoint,
    # A step ends an incident: what is found below belongs to the next one.
    _of_plan(jobs.first_step),
    # The same of a step that only repeats known ones.
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
    # A replacement that does not get up is one more loss for the same answer.
    _of_plan(losses.give_up_late),
    # The first plan; the rules above and below are about losses of later ones.
    _of_plan(first_plan.start, made=False),
    # Declared losses are answered first: they say more than want of progress does.
    _of_plan(replan.replan),
    # Only where nobody is missing, a lost peer means that all meet again.
    _of_plan(stalls.meet_after_peer_loss),
    # Only a job that no plan was found for by now lets another one train.
    _of_job(jobs.give_way),
    # Want of progress says least about who is at fault, so it comes after all other evidence.
    _of_plan(stalls.rouse),
    # Who is slow is known before plans are made that need not be.
    _of_plan(pace.watch),
    # What can wait for a step boundary comes after what cannot; leaving nodes before new ones, so
    # that one plan does both.
    _of_plan(draining.move_off),
    _of_plan(boundary.join),
    # A join is by templates as well: no state moves twice.
    _of_plan(boundary.follow_up),
    # The plan that is followed up would be the wrong one to give slow workers less of.
    _of_plan(boundary.even_out),
)
#: Nothing above depends on what is long over: these wait for nothing, nor for a plan that is made.
_AT_LAST: tuple[Rule, ...] = (losses.forget_nodes, jobs.forget_jobs)
