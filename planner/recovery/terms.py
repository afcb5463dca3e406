"""Terms of a job's plans, the change of its nodes under them, and the change after its answer.

The master, the simulator and `oobleck plan --lost` describe a change to the planner in this one
place. Must not know which request answers which event (`oobleck.planner.recovery.course`), nor any
policy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.plan import Plan
from oobleck.core.profile import Profile
from oobleck.core.schedules import Schedule
from oobleck.core.ties import Ties
from oobleck.planner.recovery.answer import Answer, Change
from oobleck.planner.recovery.course import base_behind
from oobleck.planner.search.catalogue import Catalogue, Offer
from oobleck.planner.search.firstplan import make_first_plan
from oobleck.planner.search.racks import renamed


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Inputs of a job's plans that do not change with its nodes."""

    profile: Profile
    #: Sizes of the templates.
    sizes: range
    fault_tolerance: int
    tied: Ties
    #: The only schedule for plans; None: the best.
    schedule: Schedule | None
    #: True if nodes may hold layers without running them.
    shadows: bool

    def change(
        self,
        catalogue: Catalogue,
        *,
        plan: Plan,
        base: Plan,
        live: Iterable[NodeName],
        generation: Generation,
        rates: Mapping[WorkerId, float] | None = None,
        racks: Mapping[NodeName, str] | None = None,
        most_more: int = 0,
    ) -> Change:
        """Build the change of `plan` to the `live` nodes; `most_more`: the most nodes beyond the
        fault tolerance for whose loss plans are candidates. Raises PlanInfeasible."""
        offer: Offer = catalogue.offer(self.profile, self.sizes, base, self.schedule)
        return Change(
            plan=plan,
            base=base,
            live=tuple(live),
            generation=generation,
            templates=offer.templates,
            profile=self.profile,
            fault_tolerance=self.fault_tolerance,
            most_more=most_more,
            tied=self.tied,
            schedule_named=self.schedule is not None,
            shadows=self.shadows,
            judge=partial(offer.judge, falls_back=True),
            costs=offer.costs,
            equals=offer.equals,
            replays=offer.replays,
            rates={} if rates is None else rates,
            racks={} if racks is None else racks,
            first=partial(self._first, catalogue, plan.microbatches),
        )

    def _first(
        self,
        catalogue: Catalogue,
        microbatches: int,
        nodes: Sequence[NodeName],
        generation: Generation,
        tolerated: int,
    ) -> Plan:
        """Make the first plan for the nodes, of which so many can be lost at once. Raises
        PlanInfeasible."""
        names = sorted(nodes)
        pipelines = min(tolerated + 1, len(names) // self.sizes.start, microbatches)
        memory = self.profile.gpu_memory_bytes

        def make() -> Plan:
            return make_first_plan(
                catalogue,
                self.sizes,
                names,
                profile=self.profile,
                microbatches=microbatches,
                min_pipelines=pipelines,
                generation=generation,
                wanted=self.schedule,
            ).plan

        key = self.sizes, memory, len(names), microbatches, pipelines, self.schedule
        made = catalogue.first_plan(key, make)
        # Nodes are taken by name; some may be left over.
        return renamed(made, dict(zip(made.nodes, names, strict=False))).having(
            generation=generation
        )


def after(change: Change, taken: Answer) -> Change:
    """Return the next change, of the plan in `taken`, before the nodes change any further."""
    plan = taken.found.plan
    base = None if change.base is change.plan else change.base
    base = base_behind(change.plan, base, policy=taken.policy, rule=taken.found.rule)
    generation = Generation(plan.generation + 1)
    return replace(change, plan=plan, base=base or plan, generation=generation)
