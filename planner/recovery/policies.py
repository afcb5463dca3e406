"""Candidates of each policy for a change of the nodes.

- `templates` (Oobleck §5): a plan of templates for the live nodes; state moves before the next
  step.
- `reroute` (ReCycle, SOSP 2024): the micro-batches of lost workers go to live holders of their
  layers; no state moves, so training continues at once.
- `normalise` (also there): `reroute` with one stage moved, at once or at a step boundary, so that
  holes are at different layers.
- `uneven` (Malleus): where no node is lost, by the current speed of each worker.
- `shadow` (Bamboo, NSDI 2023): `reroute`, which uses copies of layers that too few nodes hold.
  After an answer, nodes get such copies again.
- `morph` (Varuna, EuroSys 2022): the best shape for the live nodes, with the state of the newest
  checkpoint.
- `wait`: no plan has fewer nodes than the running one.
- `stay`: `reroute`, and no node joins.
- `auto` has the first three as candidates, `reroute` followed by `templates` or `normalise`, the
  shape of a first plan, at once or behind another answer. Plans and shadows are candidates too by
  which more nodes can be lost than the job asks for. It never waits for a node: until one
  comes, any other plan makes steps. Nor does it load a checkpoint while the state is held: loading
  drops that, and a checkpoint may turn out to be damaged.

Owns which courses a policy may take, and the candidates for each request of a job's course.
`oobleck.planner.recovery.chooser` takes the best one. Must not know how a plan is made.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from oobleck.core.errors import PlanInfeasible
from oobleck.core.job.spec import RecoveryPolicy
from oobleck.core.plan import Plan
from oobleck.core.ties import Ties
from oobleck.core.units import count
from oobleck.planner.programs.communicators import too_many
from oobleck.planner.recovery.answer import (
    Answer,
    Change,
    Exposure,
    Policy,
    copied_layers,
    late_behind_s,
    moves,
    situation,
    splitting_weight,
)
from oobleck.planner.recovery.answer import answer as answer_of
from oobleck.planner.recovery.chooser import (
    LEAST_GAIN,
    READY_STEPS,
    Candidates,
    Copying,
    Course,
    Staying,
    choose,
    weighed_s,
)
from oobleck.planner.recovery.course import PlanWanted, routes_losses
from oobleck.planner.recovery.normalise import normalised, promising
from oobleck.planner.recovery.outlook import Outlook
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.planner.recovery.terms import after
from oobleck.planner.recovery.uneven.answer import uneven
from oobleck.planner.recovery.uneven.candidates import staying_s
from oobleck.planner.recovery.worth import (
    anew,
    by_reroute,
    by_templates,
    shadowed,
    shadowed_s,
    shadows_behind,
    visits,
    with_following,
)

#: Most live nodes for which a first plan's shape is a candidate: a loss waits for it, and with more
#: it takes too long.
_MOST_ANEW = 64
#: Most visits of a plan for which a move of a stage is a candidate of `auto`: a loss waits for its
#: schedule, which takes some 0.1 s then.
_MOST_MOVED = 2_000
_TEMPLATES_FIRST: tuple[Policy, Policy] = ("templates", "reroute")
_REROUTE_FIRST: tuple[Policy, Policy] = ("reroute", "templates")
#: Answer of each policy to a change, or its refusal.
Answers = Mapping[Policy, Answer | PlanInfeasible]
#: Answer, with the change under which it was made.
_Offer = tuple[Change, Answer]


def ask(change: Change, wanted: PlanWanted) -> Candidates:
    """Return the candidates for the `wanted` plan. Raises PlanInfeasible."""
    return without_crowded(_by_purpose(change, wanted), change.tied)


def without_crowded(candidates: Candidates, tied: Ties) -> Candidates:
    """Leave out courses by plans that have too many communicators for NCCL, if there are others."""
    few = tuple(
        course
        for course in candidates.courses
        if not too_many(course.first.found.plan, tied=tied)
        and (course.behind is None or not too_many(course.behind.found.plan, tied=tied))
    )
    return replace(candidates, courses=few) if few else candidates


def _by_purpose(change: Change, wanted: PlanWanted) -> Candidates:
    match wanted:
        case "uneven":
            return around_slow(change)
        case "copies" | "moved" as following:
            return behind(change, following)
        case "joined":
            return unforced(change)
        case "settled":
            return replace(unforced(change), by_value=True)
        case "drained":
            return drained(change)
        case "anew":
            return reshaped(change)
        case "plain":
            plain = replace(change, shadows=False)
            return only(plain, by_templates(plain))
        case policy:
            return for_change(change, policy)


def answer(change: Change, wanted: RecoveryPolicy, outlook: Outlook | None = None) -> Answer:
    """Return the answer of a policy to a change, with what is expected of it and of the best one
    not taken. Raises PlanInfeasible where there is none."""
    return choose(for_change(change, wanted), outlook or Outlook())


def for_change(change: Change, wanted: RecoveryPolicy) -> Candidates:
    """Return the candidates of a policy for a change that something forces.

    Where the job names `reroute`, a stage is moved behind it if that promises a shorter step, and
    shadows come after that; where it names `shadow` or `stay`, only shadows do. If the preferred
    policy has no answer the other one is used, and the reason says so. Fewer nodes than templates
    need may hold all layers, some as shadows. Raises PlanInfeasible where there is no answer.
    """
    lost = not frozenset(change.live).issuperset(change.plan.nodes)
    if wanted == "morph":
        try:
            return _all_morphed(change)
        except PlanInfeasible as infeasible:
            return only(change, _instead("reroute", "morph", infeasible, change))
    if wanted == "wait" and len(change.live) < len(change.plan.nodes):
        raise PlanInfeasible(
            f"policy wait: {count(len(change.plan.nodes), 'node')} are to train, as before, and "
            f"{len(change.live)} can; start more agents, or wait for lost nodes to come back"
        )
    if wanted == "normalise" and lost:
        return _all_normalised(change)
    first, other = _REROUTE_FIRST if routes_losses(wanted) and lost else _TEMPLATES_FIRST
    try:
        preferred = _MAKERS[first](change)
    except PlanInfeasible as infeasible:
        return only(change, _instead(other, first, infeasible, change))
    if first == "reroute":
        if wanted == "reroute" and promising(change, preferred.found.plan):
            preferred = replace(preferred, then="normalise")
        return only(change, preferred)
    if wanted != "auto" or not lost:
        return only(change, preferred)
    offers = _offers(change, preferred)
    courses = [each for own, offer in offers for each in _courses(own, offer)]
    # As a follow-up it has to gain as much as any voluntary change.
    courses += [
        _course(change, preferred, best)
        for own, best in offers
        if own is change and weighed_s(best) <= (1 - LEAST_GAIN) * weighed_s(preferred)
    ]
    with suppress(PlanInfeasible):
        routed = by_reroute(change)
        courses += _courses(change, routed)
        moved = _normalised(change, routed)
        courses += [_course(own, routed, offer) for own, offer in offers]
        courses += [_course(change, routed, each) for each in moved]
        courses += [
            each for one in moved for each in _courses(change, at_once(change, routed, one))
        ]
    return _forced(courses, change)


def _all_normalised(change: Change) -> Candidates:
    """Return the re-routed plan with one stage moved before the next step; in large plans behind
    it, since a loss waits for the schedules; as it is where no move is worth it. Raises
    PlanInfeasible."""
    try:
        routed = by_reroute(change)
    except PlanInfeasible as infeasible:
        return only(change, _instead("templates", "normalise", infeasible, change))
    if visits(routed.found.plan) > _MOST_MOVED:
        if promising(change, routed.found.plan):
            return only(change, replace(routed, then="normalise"))
        why = PlanInfeasible("with another stage no worker would have clearly less to do")
        return only(change, _for_want(routed, "normalise", why))
    try:
        moved = normalised(after(change, routed))
    except PlanInfeasible as infeasible:
        return only(change, _for_want(routed, "normalise", infeasible))
    return _forced([_course(change, at_once(change, routed, each)) for each in moved], change)


def unforced(change: Change) -> Candidates:
    """Return plans of templates where nothing forces a change: nodes have joined, or a re-routed
    plan trains. Raises PlanInfeasible."""
    return _candidates(change, _offers(change, by_templates(change)))


def drained(change: Change) -> Candidates:
    """Return plans of templates without nodes of the running plan, which trains until then; by
    re-routing if there are none. Raises PlanInfeasible."""
    leaving = frozenset(change.plan.nodes).difference(change.live)
    change = replace(change, leaving=leaving)
    try:
        offers = _offers(change, by_templates(change))
    except PlanInfeasible as infeasible:
        offers = [(change, _instead("reroute", "templates", infeasible, change))]
    return replace(_candidates(change, offers), forced=True)


def reshaped(change: Change) -> Candidates:
    """Return the shape of a first plan, and shadows that let more nodes be lost, behind an answer
    to a loss. Raises PlanInfeasible."""
    return _or_shadows(change, lambda change: [anew(change)])


def around_slow(change: Change) -> Candidates:
    """Return plans for the current rates of workers. Raises PlanInfeasible."""
    return _candidates(change, _alone(change, uneven(change)), to_gain=True)


def behind(change: Change, wanted: Literal["copies", "moved"]) -> Candidates:
    """Return the follow-ups of an answer at a step boundary; shadows also where no stage is worth
    moving. Raises PlanInfeasible."""
    if wanted == "copies":
        return _all_shadowed(change)
    return _or_shadows(change, normalised)


def _all_shadowed(change: Change) -> Candidates:
    """Return the running plan with shadows that let as many nodes be lost as the job asks for, and
    with more of them. Raises PlanInfeasible."""
    few = can_lose(change.plan) < change.fault_tolerance
    offers = [(change, shadowed(change))] if few else []
    for wide in _wider(change):
        with suppress(PlanInfeasible):
            offer = shadowed(wide)
            if can_lose(offer.found.plan) >= wide.tolerated:
                offers.append((wide, offer))
    if not offers:
        raise PlanInfeasible("no layer can be on one node more, or none has to be")
    return replace(_candidates(change, offers), forced=few, by_value=not few)


def _or_shadows(change: Change, make: Callable[[Change], Sequence[Answer]]) -> Candidates:
    """Return the plans of `make`, which shorten a step; further shadows are taken instead where
    none of these is worth it. Raises PlanInfeasible where there is neither."""
    instead: Answer | None = None
    if shadows_behind(change.plan, change) is not None:
        with suppress(PlanInfeasible):
            instead = shadowed(change)
    try:
        candidates = _candidates(change, _alone(change, make(change)), to_gain=True)
    except PlanInfeasible:
        if instead is None:
            raise
        return only(change, instead)
    return replace(candidates, instead=instead)


def _all_morphed(change: Change) -> Candidates:
    """Return the best shapes for the live nodes, whatever they hold: all state comes from the
    newest checkpoint. Raises PlanInfeasible."""
    loading = [
        (
            own,
            replace(offer, policy="morph", moved_bytes=0, stall_s=0.0, outrun_bytes=0, late_s=0.0),
        )
        for own, offer in _offers(change, by_templates(change))
    ]
    return _forced([each for own, offer in loading for each in _courses(own, offer)], change)


def at_once(change: Change, routed: Answer, behind: Answer) -> Answer:
    """Return the plan of `behind`, the re-routed one with a stage moved, as an answer to the
    change."""
    made = replace(
        behind.found,
        plan=behind.found.plan.having(generation=change.generation),
        reason=f"{routed.found.reason}; {behind.found.reason}",
    )
    found = answer_of("normalise", made, behind.step_s, change, then=behind.then)
    return replace(found, weight=behind.weight)


def only(change: Change, offer: Answer) -> Candidates:
    """Return a single course as all candidates, so that there is nothing to choose."""
    return _forced([_course(change, offer)], change)


def answers(change: Change) -> Answers:
    """Return every policy's own answer, or its refusal."""
    by_policy: dict[Policy, Answer | PlanInfeasible] = {}
    for policy, make in _MAKERS.items():
        try:
            by_policy[policy] = make(change)
        except PlanInfeasible as infeasible:
            by_policy[policy] = infeasible
    return by_policy


def _normalised(change: Change, routed: Answer) -> Sequence[Answer]:
    """Return the re-routed plan with one stage moved, where that is worth it; nothing for large
    plans, since a loss waits for their schedules."""
    if visits(routed.found.plan) > _MOST_MOVED:
        return []
    try:
        return normalised(after(change, routed))
    except PlanInfeasible:
        return []


def _forced(courses: Sequence[Course], change: Change) -> Candidates:
    running_s: float | None = None
    with suppress(PlanInfeasible):  # it does not fit the memory of its nodes as now known
        running_s = staying_s(situation(change)) * splitting_weight(change.plan)
    return Candidates(
        courses=tuple(courses),
        live=len(change.live),
        before=Exposure.of(change.plan, change.live, change.racks),
        running_s=running_s,
    )


def _wider(change: Change) -> Sequence[Change]:
    """Return the changes under which plans are made that let more and more nodes be lost."""
    return [replace(change, more=more) for more in range(change.more + 1, change.most_more + 1)]


def _alone(change: Change, answers: Sequence[Answer]) -> Sequence[_Offer]:
    return [(change, each) for each in answers]


def _offers(change: Change, templates: Answer) -> Sequence[_Offer]:
    """Return the plan of `templates` and the shape of a first plan, with others of which more nodes
    can be lost than the job asks for."""
    offers = [*_alone(change, [templates, *_anew_if_better(change, templates)])]
    for wide in _wider(change):
        if all(can_lose(each.found.plan) >= wide.tolerated for _, each in offers):
            continue
        known = {each.found.plan for _, each in offers}
        with suppress(PlanInfeasible):
            found = by_templates(wide)
            for each in (found, *_anew_if_better(wide, found)):
                most = can_lose(each.found.plan)
                if most >= wide.tolerated and each.found.plan not in known:
                    offers.append((wide, _with_reason(each, f"{count(most, 'node')} can be lost")))
    return offers


def _courses(change: Change, offer: Answer) -> Sequence[Course]:
    """Return the course of the offer, and those in which more shadows follow it."""
    courses = [_course(change, offer)]
    for wide in _wider(change):
        if not change.shadows or courses[-1].exposure.can_lose >= wide.tolerated:
            continue
        course = _course(wide, offer)
        if course.exposure.can_lose < wide.tolerated:
            break
        courses.append(replace(course, then=offer.then or "shadow"))
    return courses


def _candidates(
    change: Change,
    offers: Sequence[_Offer],
    *,
    to_gain: bool = False,
) -> Candidates:
    """Return the candidates of a change at a step boundary. Where a node of the running plan is
    missing, the change is forced and immediate."""
    courses = [each for own, offer in offers for each in _courses(own, offer)]
    live = change.leaving.union(change.live)
    if not live.issuperset(change.plan.nodes) and not to_gain:
        return _forced(courses, change)
    try:
        now_s = staying_s(situation(change))
    except PlanInfeasible:  # the running plan does not fit the memory of its nodes as now known
        return _forced(courses, change)
    kept = with_following(change.plan, change)
    running_s = now_s * splitting_weight(change.plan)
    return Candidates(
        courses=tuple(courses),
        live=len(change.live),
        staying=Staying(
            step_s=now_s,
            weight=splitting_weight(change.plan),
            guarantee=min(can_lose(kept), change.fault_tolerance),
            exposure=Exposure.of(kept, racks=change.racks),
            shadowing=None if kept is change.plan else copying(change, change.plan, kept),
            shadowed_s=None if kept is change.plan else max(running_s, shadowed_s(kept, change)),
        ),
        to_gain=to_gain,
        before=Exposure.of(change.plan, live, change.racks),
        running_s=running_s,
    )


def _course(change: Change, first: Answer, behind: Answer | None = None) -> Course:
    plan = (behind or first).found.plan
    last = with_following(plan, change)
    least_s = weighed_s(behind or first)
    return Course(
        first=first,
        behind=behind,
        behind_late_s=0.0 if behind is None else late_behind_s(change, first, behind),
        copying=None if behind is None else copying(change, first.found.plan, plan),
        shadowing=None if last is plan else copying(change, plan, last),
        shadowed_s=None if last is plan else max(least_s, shadowed_s(last, change)),
        guarantee=min(can_lose(last), change.fault_tolerance),
        exposure=Exposure.of(last, racks=change.racks),
        beyond=change.more > 0,
    )


def copying(change: Change, running: Plan, following: Plan) -> Copying:
    """Return what is copied beside the steps of the `running` plan before the `following` one."""
    change = replace(change, plan=running)
    moved_bytes, busiest_bytes = moves(change, following)
    return Copying(
        steps=READY_STEPS + copied_layers(change, following),
        seconds=busiest_bytes / change.profile.links.inter_node_bytes_per_s,
        moved_bytes=moved_bytes,
    )


def _anew_if_better(change: Change, offer: Answer) -> Sequence[Answer]:
    """Return the shape of a first plan if its step is shorter than that of `offer`, or if losses
    take all holders of a layer less often; else nothing."""
    if len(change.live) > _MOST_ANEW:
        return []
    try:
        best = anew(change)
    except PlanInfeasible:
        return []
    faster = weighed_s(best) < weighed_s(offer)
    return [best] if faster or best.exposure.is_safer(offer.exposure) else []


def _instead(other: Policy, first: Policy, why: PlanInfeasible, change: Change) -> Answer:
    """Answer by the other policy, with the first one's refusal in the reason. Where both refuse,
    the error of `templates` is raised, since an operator can act on that."""
    try:
        taken = _MAKERS[other](change)
    except PlanInfeasible as infeasible:
        raise (infeasible if other == "templates" else why) from None
    return _for_want(taken, first, why)


def _for_want(taken: Answer, wanted: Policy, why: PlanInfeasible) -> Answer:
    """Return the answer, whose reason says why it is not that of the `wanted` policy."""
    return _with_reason(taken, f"not by {wanted}: {why}")


def _with_reason(offer: Answer, more: str) -> Answer:
    found = replace(offer.found, reason=f"{offer.found.reason}; {more}")
    return replace(offer, found=found)


_MAKERS: Mapping[Policy, Callable[[Change], Answer]] = {
    "templates": by_templates,
    "reroute": by_reroute,
}
