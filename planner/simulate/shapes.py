"""Plans remembered by shape, so that a change of a shape seen before is not planned anew.

A shape is a plan whose nodes are named by their places. Places of alike pipelines are
interchangeable: if one of several alike pipelines is hit, it is taken to be the first of them.
Requests every plan by `oobleck.planner.recovery.course`, as the master does. Must not know time.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count as numbers
from itertools import islice
from typing import TypeVar

from msgspec import structs

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.plan import Pipeline, Plan, is_of_pipelines
from oobleck.core.schedules import Schedule
from oobleck.planner.recovery.answer import Answer, Change, copied_layers, situation
from oobleck.planner.recovery.chooser import Candidates, choose
from oobleck.planner.recovery.course import PlanWanted
from oobleck.planner.recovery.outlook import Outlook
from oobleck.planner.recovery.policies import ask
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.planner.recovery.rules import Next
from oobleck.planner.recovery.terms import Terms, after
from oobleck.planner.recovery.uneven.candidates import staying_s
from oobleck.planner.search.catalogue import Catalogue
from oobleck.planner.search.firstplan import make_first_plan
from oobleck.planner.search.racks import renamed

_Known = TypeVar("_Known")
_FIRST, _SECOND = Generation(1), Generation(2)
#: Least time of a step: a profile may say that layers take none.
_LEAST_STEP_S = 1e-6
#: Rates of nodes that are slow: those in the plan by seat, others by their number from -1 down.
Rates = tuple[tuple[int, float], ...]
#: Racks by number, likewise.
Racks = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shape:
    """Plan whose nodes are places, and the base of later plans. Equal shapes are one object."""

    plan: Plan
    base: Plan
    #: Name of each place in the plan; its number is its seat.
    nodes: tuple[NodeName, ...]
    #: Alike pipelines, as the seats of each; none where nodes of the plan are slow.
    alike: tuple[tuple[tuple[int, ...], ...], ...]
    #: Sets of seats of which each holds a layer.
    holders: tuple[frozenset[int], ...]
    can_lose: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Next plan, as a shape, and the cost of the transition into it."""

    shape: Shape
    #: For each of its seats the seat before; fresh nodes by their number from -1 down.
    seats: tuple[int, ...]
    step_s: float
    stall_s: float = 0.0
    moved_bytes: int = 0
    late_s: float = 0.0
    copied_layers: float = 0.0
    policy: str = ""
    rule: str = ""
    then: Next | None = None


class Shapes:
    """Shapes of one job, and the changes of them that were asked for."""

    def __init__(
        self,
        terms: Terms,
        *,
        microbatches: int,
    ) -> None:
        self.terms = terms
        self.microbatches = microbatches
        self._catalogue = Catalogue(tied=terms.tied)
        self._known: dict[object, Shape] = {}
        self._first: dict[tuple[int, int, Racks], Outcome | PlanInfeasible] = {}
        self._asked: dict[object, _Asked | PlanInfeasible] = {}
        self._staying: dict[object, float] = {}
        #: Seconds of the shortest step of the plans found so far, by their number of nodes.
        self.shortest_s: dict[int, float] = {}

    def first(self, nodes: int, pipelines: int | None = None, racks: Racks = ()) -> Outcome:
        """Return the first plan for so many nodes; `pipelines`: the fewest, by default those for
        the fault tolerance; `racks`: those of fresh nodes. Raises PlanInfeasible."""
        least = self.terms.fault_tolerance + 1 if pipelines is None else pipelines
        key = nodes, least, racks
        if key not in self._first:
            try:
                self._first[key] = self._make_first(nodes, least, racks)
            except PlanInfeasible as infeasible:
                self._first[key] = infeasible
        return _found(self._first[key])

    def ask(
        self,
        shape: Shape,
        gone: Collection[int],
        fresh: int,
        wanted: PlanWanted,
        rates: Rates = (),
        outlook: Outlook | None = None,
        racks: Racks = (),
        most_more: int = 0,
    ) -> Outcome:
        """Return the best `wanted` plan by the outlook, without the `gone` seats and with so many
        fresh nodes; `most_more` as in `Change`. Raises PlanInfeasible."""
        key = id(shape), frozenset(gone), fresh, wanted, rates, racks, most_more
        if key not in self._asked:
            change, seat = self._change(shape, gone, fresh, rates, racks)
            change = replace(change, most_more=most_more)
            try:
                self._asked[key] = _Asked(change, seat, ask(change, wanted))
            except PlanInfeasible as infeasible:
                self._asked[key] = infeasible
        asked = _found(self._asked[key])
        taken = choose(asked.candidates, outlook or Outlook())
        return self._outcome(asked, taken)

    def staying_s(self, shape: Shape, rates: Rates) -> float:
        """Return the seconds of a step of the plan as it is, at these rates."""
        key = id(shape), rates
        if key not in self._staying:
            change, _ = self._change(shape, (), 0, rates)
            self._staying[key] = max(staying_s(situation(change)), _LEAST_STEP_S)
        return self._staying[key]

    def _make_first(self, nodes: int, pipelines: int, racks: Racks) -> Outcome:
        if not nodes:
            raise PlanInfeasible("no node is live")
        terms = self.terms
        names = [NodeName(f"s{number:05}") for number in range(nodes)]
        first = make_first_plan(
            self._catalogue,
            terms.sizes,
            names,
            profile=terms.profile,
            microbatches=self.microbatches,
            min_pipelines=pipelines,
            generation=_FIRST,
            wanted=terms.schedule,
            shadows=terms.shadows,
            racks={names[-1 - number]: f"r{rack}" for number, rack in racks},
        )
        plan = first.plan
        shape, before = self._shape(plan, plan)
        seat = {name: -1 - number for number, name in enumerate(names)}
        step_s = max(first.choice.step_s, _LEAST_STEP_S)
        self._note_step(len(before), step_s)
        return Outcome(
            shape=shape,
            seats=tuple(seat[name] for name in before),
            step_s=step_s,
            policy="templates",
            rule="first",
        )

    def _note_step(self, nodes: int, step_s: float) -> None:
        self.shortest_s[nodes] = min(step_s, self.shortest_s.get(nodes, step_s))

    def _outcome(self, asked: "_Asked", taken: Answer) -> Outcome:
        key = id(taken.found.plan)
        if key not in asked.outcomes:
            offer = asked.offered(taken)
            following = after(asked.change, offer)
            made, before = self._shape(following.plan, following.base)
            step_s = max(offer.step_s, _LEAST_STEP_S)
            self._note_step(len(before), step_s)
            asked.outcomes[key] = Outcome(
                shape=made,
                seats=tuple(asked.seat[name] for name in before),
                step_s=step_s,
                stall_s=offer.stall_s,
                moved_bytes=offer.moved_bytes,
                late_s=offer.late_s,
                copied_layers=copied_layers(asked.change, offer.found.plan),
                policy=offer.policy,
                rule=offer.found.rule,
            )
        return replace(asked.outcomes[key], then=taken.then)

    def _change(
        self,
        shape: Shape,
        gone: Collection[int],
        fresh: int,
        rates: Rates,
        racks: Racks = (),
    ) -> tuple[Change, Mapping[NodeName, int]]:
        """Return the change, and the seat of each live node."""
        used = {*shape.nodes, *shape.base.nodes}
        unused = (name for k in numbers() if (name := NodeName(f"t{k:05}")) not in used)
        seat = {name: number for number, name in enumerate(shape.nodes) if number not in gone}
        seat |= {name: -1 - number for number, name in enumerate(islice(unused, fresh))}
        rate, rack = dict(rates), dict(racks)
        slots = range(self.terms.profile.gpus_per_node)
        change = self.terms.change(
            self._catalogue,
            plan=shape.plan,
            base=shape.base,
            live=sorted(seat),
            generation=_SECOND,
            rates={
                WorkerId(name, slot): rate[number]
                for name, number in sorted(seat.items())
                if number in rate
                for slot in slots
            },
            racks={name: f"r{rack[number]}" for name, number in seat.items() if number in rack},
        )
        return change, seat

    def _shape(self, plan: Plan, base: Plan) -> tuple[Shape, Sequence[NodeName]]:
        """Return the shape, and the name in `plan` of each of its seats."""
        key: object
        if base is plan and plan.listing is None and not plan.rates:
            if is_of_pipelines(plan):
                pipelines = sorted(plan.pipelines, key=_kind)
                key = (plan.schedule, tuple(map(_kind, pipelines)))
                if key not in self._known:
                    self._known[key] = _of_pipelines(pipelines, plan.schedule)
                names = [name for pipeline in pipelines for name in pipeline.nodes]
                return self._known[key], names
            plan, names = _by_places(plan)
            base = plan
        else:
            same = base is plan
            plan = plan.having(generation=_FIRST)
            base = plan if same else base.having(generation=_FIRST)
            names = list(plan.nodes)
        key = plan, base
        if key not in self._known:
            self._known[key] = _shape_of(plan, base)
        return self._known[key], names


class _Asked:
    """Candidates for a change of a shape, and the outcomes of those that were taken."""

    def __init__(
        self, change: Change, seat: Mapping[NodeName, int], candidates: Candidates
    ) -> None:
        self.change, self.seat, self.candidates = change, seat, candidates
        #: By the identity of the plan, which `candidates` keeps.
        self.outcomes: dict[int, Outcome] = {}

    def offered(self, taken: Answer) -> Answer:
        """Return the answer as it was offered: in the one `taken` transfers take as long as the
        outlook of that moment says."""
        offers = [course.first for course in self.candidates.courses]
        if self.candidates.instead is not None:
            offers.append(self.candidates.instead)
        return next(each for each in offers if each.found.plan is taken.found.plan)


def _found(known: _Known | PlanInfeasible) -> _Known:
    if isinstance(known, PlanInfeasible):
        raise known.with_traceback(None)
    return known


def _shape_of(plan: Plan, base: Plan, pipelines: Sequence[Pipeline] = ()) -> Shape:
    """Return the shape of a plan; `pipelines`: those that it is made of, if it is."""
    seat = {name: number for number, name in enumerate(plan.nodes)}
    alike: dict[object, list[tuple[int, ...]]] = defaultdict(list)
    for pipeline in pipelines:
        alike[_kind(pipeline)].append(tuple(seat[name] for name in pipeline.nodes))
    return Shape(
        plan=plan,
        base=base,
        nodes=plan.nodes,
        alike=tuple(tuple(own) for own in alike.values() if len(own) > 1),
        holders=tuple({frozenset(seat[name] for name in own): 0 for own in plan.layer_nodes()}),
        can_lose=can_lose(plan),
    )


def _of_pipelines(pipelines: Sequence[Pipeline], schedule: Schedule) -> Shape:
    """Return the shape of a plan that is made of these pipelines, with nodes named by places."""
    place = _places(name for pipeline in pipelines for name in pipeline.nodes)
    renamed = [
        replace(
            each,
            nodes=tuple(place[name] for name in each.nodes),
            stages=tuple(
                structs.replace(one, workers=_moved(one.workers, place)) for one in each.stages
            ),
        )
        for each in pipelines
    ]
    plan = Plan.of_pipelines(renamed, generation=_FIRST, schedule=schedule)
    return _shape_of(plan, plan, renamed)


def _places(names: Iterable[NodeName]) -> dict[NodeName, NodeName]:
    """Return the name of the place that each of these nodes has."""
    return {name: NodeName(f"s{number:05}") for number, name in enumerate(names)}


def _moved(workers: Iterable[WorkerId], place: Mapping[NodeName, NodeName]) -> tuple[WorkerId, ...]:
    return tuple(WorkerId(place[worker.node], worker.slot) for worker in workers)


def _kind(pipeline: Pipeline) -> tuple[object, ...]:
    """Return a key that alike pipelines share; it sorts bigger pipelines first."""
    places = {name: number for number, name in enumerate(pipeline.nodes)}
    return (
        -len(pipeline.nodes),
        -pipeline.microbatches,
        tuple(
            (
                hold.first_layer,
                hold.resident,
                tuple((places[worker.node], worker.slot) for worker in hold.workers),
            )
            for hold in pipeline.stages
        ),
    )


def _by_places(plan: Plan) -> tuple[Plan, list[NodeName]]:
    """Return the plan with its nodes named by their places, and the name before of each."""
    before = list(dict.fromkeys(hold.workers[0].node for hold in plan.holds))
    place = _places(before)
    return renamed(plan, place).having(generation=_FIRST), before


def swapped(shape: Shape, gone: Collection[int]) -> Sequence[int] | None:
    """Return an order of the seats that puts hit ones of alike pipelines first: for each seat the
    one that takes its place. None: the seats as they are."""
    if not gone or not shape.alike:
        return None
    order = list(range(len(shape.nodes)))
    for own in shape.alike:
        hits = [tuple(seat in gone for seat in seats) for seats in own]
        ranked = sorted(range(len(own)), key=lambda number: hits[number], reverse=True)
        for number, other in enumerate(ranked):
            for to, seat in zip(own[number], own[other], strict=True):
                order[to] = seat
    return order
