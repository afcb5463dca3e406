"""Reconfiguration: from a plan and the nodes that live now to the next plan (Oobleck §5).

All ways into the next plan are candidates: what the paper's rules make of the hit pipelines, in
any combination (`oobleck.planner.rules`), newcomers in pipelines of their own or in those that are
there, and sizes chosen anew for all live nodes (`oobleck.planner.instantiate`). What counts, in
this order:

1. lost guarantees: as many pipelines as f asks for, as far as the nodes allow it, and no idle node;
2. step time, with the time that state takes to move spread over the steps until the next loss;
   candidates within a band of the best are equal;
3. bytes of state that move (`oobleck.planner.placement`);
4. the paper's order of rules: reinstantiate, borrow, merge, then sizes chosen anew.

Owns the choice. Must not know who holds what in truth: `oobleck.planner.transfer` finds out
whether all layers are still there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby

from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.ids import Generation, NodeName
from oobleck.planner.instantiate import (
    BAND,
    Instantiation,
    Judge,
    by_formula,
    choose,
    most_used,
    step_of,
    template_costs,
)
from oobleck.planner.placement import Seats, Slot, keep_fitting, put_in_place, seat
from oobleck.planner.plan import Plan
from oobleck.planner.profile import Profile
from oobleck.planner.rules import Group, Groups, Rule, enlarge, found_pipelines, mend, refill
from oobleck.planner.shares import share_batch
from oobleck.planner.sizesearch import Costs
from oobleck.planner.template import PipelineTemplate
from oobleck.planner.templates import feasible_sizes, generate_templates
from oobleck.planner.units import are, count

Templates = Mapping[int, PipelineTemplate]

#: A plan is used for so long, seconds: the paper's worst case is a loss every ten minutes.
HORIZON_S = 600.0
#: Costs this close, as parts of the best step time, are equal: the estimate is not that exact.
TIE = Fraction(1, 100)
#: Ways to put the hit pipelines right; all of them for up to three.
_MOST_WAYS = 32
#: Kinds of plans whose step time is judged.
_MOST_JUDGED = 6
#: Of them, those with sizes chosen anew.
_MOST_ANEW = 2
#: What the search for them may take (`oobleck.planner.instantiate.choose`): some ten milliseconds.
_EFFORT = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconfiguration:
    """The next plan, the strongest rule that led to it, and what happened in words."""

    plan: Plan
    rule: Rule
    reason: str
    #: Live nodes that no combination of templates has a use for: the plan is without them.
    idle: tuple[NodeName, ...] = ()


def can_lose(plan: Plan) -> int:
    """How many nodes, whichever they are, can be lost at a time without losing a layer."""
    holders = [0] * plan.layer_count
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:  # of one node, so a pipeline has every layer on one
            for layer in stage.layers:
                holders[layer] += 1
    return min(holders) - 1


def reconfigure(
    plan: Plan,
    live: Sequence[NodeName],
    *,
    templates: Templates,
    profile: Profile,
    fault_tolerance: int,
    generation: Generation,
    judge: Judge = by_formula,
    costs: Costs | None = None,
) -> Reconfiguration:
    """The plan for the `live` nodes; raises PlanInfeasible when they cannot hold the model.

    `judge` says what a step takes; `costs` are those of the templates, where they are at hand.
    """
    alive, before = frozenset(live), frozenset(plan.nodes)
    smallest = min(templates)
    if len(alive) < smallest:
        raise PlanInfeasible(
            f"needs at least {count(smallest, 'node')} to hold the model; {are(len(alive))} live"
        )
    chooser = _Chooser.of(plan, alive, templates, profile, fault_tolerance, judge, costs)
    if before <= alive and chooser.used <= len(before):
        # Those that are not in the plan are of no use to any other one.
        return Reconfiguration(
            plan=replace(plan, generation=generation),
            rule="replace",
            reason="the nodes are the same: the placement stays",
            idle=tuple(sorted(alive - before)),
        )
    best, next_plan = chooser.choose(generation)
    return Reconfiguration(
        plan=next_plan,
        rule=best.rule,
        reason=best.reason,
        idle=tuple(sorted(alive - set(next_plan.nodes))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    slots: tuple[Slot, ...]
    rule: Rule
    reason: str

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted((slot.size for slot in self.slots), reverse=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chooser:
    plan: Plan
    alive: frozenset[NodeName]
    templates: Templates
    profile: Profile
    judge: Judge
    costs: Costs
    #: Pipelines that there must be, and nodes that they can use.
    wanted: int
    used: int
    _steps: dict[tuple[int, ...], int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        plan: Plan,
        alive: frozenset[NodeName],
        templates: Templates,
        profile: Profile,
        fault_tolerance: int,
        judge: Judge,
        costs: Costs | None,
    ) -> "_Chooser":
        nodes, batch = len(alive), plan.microbatches
        wanted = min(fault_tolerance + 1, nodes // min(templates), batch)
        costs = template_costs(templates, profile) if costs is None else costs
        used = most_used(costs, nodes, least=wanted, most=batch)
        if used < nodes:
            # The table is for the nodes that there were, and may lack sizes for the ones left.
            feasible = [n for n in feasible_sizes(profile, nodes) if n > min(templates)]
            if most_used((min(templates), *feasible), nodes, least=wanted, most=batch) > used:
                more = [
                    generate_templates(profile, range(size, size + 1))
                    for size in feasible
                    if size not in templates
                ]
                templates = {n: t for part in (templates, *more) for n, t in part.items()}
                costs = template_costs(templates, profile)
                used = most_used(costs, nodes, least=wanted, most=batch)
        return cls(
            plan=plan,
            alive=alive,
            templates=templates,
            profile=profile,
            judge=judge,
            costs=costs,
            wanted=wanted,
            used=used,
        )

    def choose(self, generation: Generation) -> tuple[_Candidate, Plan]:
        """The best candidate and its plan."""
        close = self._close(self._candidates())
        fastest = min(time for _, time in close)
        state_bytes = [layer.state_bytes for layer in self.profile.layers]
        rate = self.profile.links.inter_node_bytes_per_s
        ways: list[tuple[float, _Candidate, Seats]] = []
        for candidate, time in close:
            seats = seat(
                candidate.slots,
                self.plan,
                self.alive,
                templates=self.templates,
                state_bytes=state_bytes,
            )
            cost = (time / fastest if fastest else 1.0) + seats.busiest_bytes / rate / HORIZON_S
            ways.append((cost, candidate, seats))
        least = min(cost for cost, _, _ in ways)
        tied = [(candidate, seats) for cost, candidate, seats in ways if cost <= least + TIE]
        best, seats = min(tied, key=lambda way: way[1].moved_bytes)
        shares = share_batch([self.costs[s.size] for s in best.slots], self.plan.microbatches)
        plan = put_in_place(
            best.slots, seats, shares, self.plan, templates=self.templates, generation=generation
        )
        return best, plan

    def _close(self, candidates: Sequence[_Candidate]) -> list[tuple[_Candidate, float]]:
        """Those within a band of the fastest, in order, with their step times by the judge; one
        for each set of sizes and of pipelines that stay."""
        quick = min(self._step(candidate.sizes) for candidate in candidates)
        sizes = dict.fromkeys(candidate.sizes for candidate in candidates)
        close = [s for s in sizes if self._step(s) <= quick * (1 + BAND)]
        close = sorted(close, key=self._step)[:_MOST_JUDGED]
        times = self.judge([self._shared(s) for s in close]) if len(close) > 1 else [1.0]
        judged = dict(zip(close, times, strict=True))
        kept: dict[object, tuple[_Candidate, float]] = {}
        for candidate in candidates:
            if candidate.sizes in judged:
                stay = tuple(slot.kept.nodes for slot in candidate.slots if slot.kept)
                kept.setdefault((candidate.sizes, stay), (candidate, judged[candidate.sizes]))
        return list(kept.values())

    def _step(self, sizes: tuple[int, ...]) -> int:
        """Ticks by the formula."""
        if sizes not in self._steps:
            batch, links = self.plan.microbatches, self.profile.links
            self._steps[sizes] = step_of(self.costs, sizes, batch, links)
        return self._steps[sizes]

    def _shared(self, sizes: tuple[int, ...]) -> Instantiation:
        shares = share_batch([self.costs[size] for size in sizes], self.plan.microbatches)
        return Instantiation(sizes=sizes, shares=shares, step=self._step(sizes), bound=0)

    # ---- candidates

    def _candidates(self) -> list[_Candidate]:
        """All that lose no guarantee, in the order of rules."""
        candidates = [
            candidate
            for candidate in self._by_rules()
            if len(candidate.slots) >= self.wanted
            and len(candidate.slots) <= self.plan.microbatches
            and sum(candidate.sizes) == self.used
        ]
        quick = min((self._step(c.sizes) for c in candidates), default=None)
        anew = choose(
            self.costs,
            self.used,
            links=self.profile.links,
            microbatches=self.plan.microbatches,
            min_pipelines=self.wanted,
            most=_MOST_ANEW,
            # What gains less is not worth a move.
            limit=None if quick is None else quick - int(quick * TIE),
            slack=TIE,
            effort=_EFFORT,
        )
        return [*candidates, *(self._anew(found.sizes) for found in anew)]

    def _by_rules(self) -> Iterator[_Candidate]:
        groups, gone = _hit_groups(self.plan, self.alive)
        stop = min(self.templates)  # the rules use the sizes without a gap
        while stop in self.templates:
            stop += 1
        sizes = range(min(self.templates), stop)
        newcomers = len(self.alive - set(self.plan.nodes))
        if not newcomers:
            for way in mend(groups, sizes, most=_MOST_WAYS):
                reason = "; ".join((*gone, *way.stories))
                yield _Candidate(slots=_slots(way.groups), rule=way.rule, reason=reason)
            return
        for filled, left in dict.fromkeys((refill(groups, newcomers), (groups, newcomers))):
            for way in mend(filled, sizes, most=_MOST_WAYS):
                for function in (found_pipelines, enlarge):
                    joined = function(way.groups, left, sizes) if left else way.groups
                    if joined is not None:
                        yield self._told(_slots(joined))

    def _anew(self, sizes: tuple[int, ...]) -> _Candidate:
        return self._told(keep_fitting(sizes, self.plan, self.alive))

    def _told(self, slots: tuple[Slot, ...]) -> _Candidate:
        """Slots that no rule has told the story of."""
        rule: Rule = "join" if self.alive - set(self.plan.nodes) else "reshape"
        return _Candidate(slots=slots, rule=rule, reason=self._change(slots))

    def _change(self, slots: Sequence[Slot]) -> str:
        before = frozenset(self.plan.nodes)
        changes = [
            f"{', '.join(sorted(nodes))} {verb}"
            for nodes, verb in ((before - self.alive, "lost"), (self.alive - before, "joined"))
            if nodes
        ]
        old = _listed([len(pipeline.nodes) for pipeline in self.plan.pipelines])
        new = _listed(sorted((slot.size for slot in slots), reverse=True))
        idle = len(self.alive) - self.used
        spare = f"; no combination of templates has a use for {idle} of the nodes" if idle else ""
        return f"{' and '.join(changes)}: templates {old} -> templates {new}{spare}"


def _listed(sizes: Sequence[int]) -> str:
    """`3, 2, 2`, and many equal ones in a row as `3, 2 (x12)`."""
    runs = [(size, len(list(run))) for size, run in groupby(sizes)]
    return ", ".join(
        f"{size} (x{number})" if number > 4 else ", ".join([str(size)] * number)
        for size, number in runs
    )


def _slots(groups: Groups) -> tuple[Slot, ...]:
    return tuple(Slot(size=g.size, kept=g.kept, origin=g.origin) for g in groups)


def _hit_groups(plan: Plan, alive: frozenset[NodeName]) -> tuple[Groups, tuple[str, ...]]:
    groups, gone = [], []
    for number, pipeline in enumerate(plan.pipelines):
        lost = ", ".join(node for node in pipeline.nodes if node not in alive)
        left = sum(node in alive for node in pipeline.nodes)
        name = f"pipeline {number} lost {lost}" if lost else f"pipeline {number}"
        if not left:
            gone.append(f"{name}: all its nodes; the others take over its share")
            continue
        groups.append(
            Group(
                name=name,
                template=len(pipeline.nodes),
                size=left,
                kept=None if lost else pipeline,
                origin=pipeline,
                hit=bool(lost),
            )
        )
    return tuple(groups), tuple(gone)
