"""How far the chosen answers to losses and returns are from the best that is known.

    python -m bench.regret [--cases 200] [--seed 0]

Each case is a random model on a random cluster: its first plan loses one or two nodes, and gets
them back. Printed are, over the cases:

- `loss`: the steps that are expected until the next loss by the choice of `auto`, less those that a
  return costs if it takes all holders of a layer, against the best of all candidates that keep as
  high a guarantee: each policy's own answer, alone or followed by templates, by the shape of a
  first plan or by a move of a stage, and that shape or that move at once; plans of templates and
  shapes of first plans also for one and two more nodes that can be lost. Drawn are the time until
  the next loss, 1 minute to 7 days, how many nodes it takes, up to three, and the age of the
  checkpoint, up to 300 steps; in half of the cases it takes one node, and nothing is undone;
- `against a first plan`: the step of the plan behind the loss, and of that after the return, over
  that of a first plan for the same nodes, where losses take one node: where they take several,
  longer steps may be worth it;
- `against staying`: the step after the return over that before it.

All steps are weighed by what splitting the backward may cost, which profiles lack.
"""

import argparse
import contextlib
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from bench.choice import random_question
from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, NodeName
from oobleck.core.plan import Plan
from oobleck.core.schedules import Schedule
from oobleck.planner.cost.estimate import estimate_step
from oobleck.planner.recovery.answer import Answer, Change, late_behind_s, splitting_weight
from oobleck.planner.recovery.chooser import choose
from oobleck.planner.recovery.course import behind_answer, most_more
from oobleck.planner.recovery.normalise import normalised
from oobleck.planner.recovery.outlook import REJOIN_S, SWITCH_S, Outlook, expecting
from oobleck.planner.recovery.policies import answer as chosen
from oobleck.planner.recovery.policies import answers, ask, at_once, copying, unforced
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.planner.recovery.terms import Terms, after
from oobleck.planner.recovery.worth import anew, by_templates
from oobleck.planner.search.catalogue import Catalogue
from oobleck.planner.search.firstplan import make_first_plan, node_specification

#: Longest ends of a distribution that are shown.
_SHOWN = (0.01, 0.05, 0.10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Ratios of one case; 0 is as good as the best, and 0.1 is 10 % worse."""

    seed: int
    #: Whether losses take several nodes.
    several: bool
    loss: float
    loss_first: float
    returned: float | None
    returned_first: float
    taken: str


class Cluster:
    """Random model and cluster, with what plans are made of."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.profile, count, self.microbatches = random_question(rng)
        self.f = rng.choice([0, 1, 1, 2])
        self.names = [NodeName(f"n{number:02}") for number in range(count)]
        self.sizes = node_specification(self.profile, nodes=count, fault_tolerance=self.f)
        self.catalogue = Catalogue(tied=True)
        lost = rng.sample(self.names, rng.choice([1, 1, 2]))
        self.wait_s = 60.0 * 10 ** rng.uniform(0, 4)
        self.left = [name for name in self.names if name not in lost]
        #: Share of losses by the number of nodes, and steps that a return undoes.
        self.sizes_lost: tuple[tuple[int, float], ...] = ((1, 1.0),)
        self.undone = 0.0
        if rng.random() < 0.5:
            parts = [rng.random() for _ in range(3)]
            self.sizes_lost = tuple((k + 1, part / sum(parts)) for k, part in enumerate(parts))
            self.undone = 300 * rng.random()

    def outlook(self, nodes: int) -> Outlook:
        found = expecting(self.wait_s, nodes)
        return structs.replace(found, sizes=self.sizes_lost, behind_steps=self.undone)

    def first(self, nodes: Sequence[NodeName], generation: int) -> Plan:
        return make_first_plan(
            self.catalogue,
            self.sizes,
            nodes,
            profile=self.profile,
            microbatches=self.microbatches,
            min_pipelines=min(self.f + 1, len(nodes) // self.sizes.start),
            generation=Generation(generation),
        ).plan

    def change(
        self, plan: Plan, base: Plan, live: Sequence[NodeName], schedule: Schedule | None = None
    ) -> Change:
        terms = Terms(
            profile=self.profile,
            sizes=self.sizes,
            fault_tolerance=self.f,
            tied=True,
            schedule=schedule,
            shadows=False,
        )
        generation = Generation(plan.generation + 1)
        return terms.change(
            self.catalogue,
            plan=plan,
            base=base,
            live=live,
            generation=generation,
            most_more=most_more("auto"),
        )


def weighed_s(step_s: float, plan: Plan) -> float:
    return step_s * splitting_weight(plan)


def fatal_share(plan: Plan, live: Sequence[NodeName], sizes: Sequence[tuple[int, float]]) -> float:
    """Return the share of losses, by their sizes, that take all live holders of some layer."""
    held = {own & frozenset(live) for own in plan.layer_nodes()}
    share = 0.0
    for size, part in sizes:
        taken = [frozenset(own) for own in itertools.combinations(live, size)]
        share += part * statistics.fmean(any(own <= one for own in held) for one in taken)
    return share


def committed(
    answers_in_turn: Sequence[Answer],
    change: Change,
    wait_s: float,
    back_steps: float,
    sizes: Sequence[tuple[int, float]],
) -> float:
    """Return the steps that are expected until the next loss: each plan's standstill, then its
    steps; all but the last one have as many whole steps as preparing the next one takes. A
    loss that takes all holders of a layer costs `back_steps`."""
    at, steps = REJOIN_S + answers_in_turn[0].stall_s, 0.0
    spans = [(change.plan, 0.0)]
    for number, each in enumerate(answers_in_turn):
        step_s = weighed_s(each.step_s, each.found.plan)
        spans.append((each.found.plan, at))
        if number + 1 == len(answers_in_turn):
            steps += wait_s / step_s * math.exp(-at / wait_s)
            continue
        behind = answers_in_turn[number + 1]
        ahead = copying(change, each.found.plan, behind.found.plan)
        until = at + step_s * ahead.whole_steps(step_s)
        steps += wait_s / step_s * (math.exp(-at / wait_s) - math.exp(-until / wait_s))
        at = until + SWITCH_S + behind.late_s
    chances = [math.exp(-begin / wait_s) for _, begin in spans]
    returns = sum(
        fatal_share(plan, change.live, sizes) * (from_then - later)
        for (plan, _), from_then, later in zip(spans, chances, [*chances[1:], 0.0], strict=True)
    )
    return steps - returns * back_steps


def candidates(change: Change, best: Answer) -> Iterator[tuple[Answer, ...]]:
    own = {name: one for name, one in answers(change).items() if isinstance(one, Answer)}

    def pair(first: Answer, behind: Answer) -> tuple[Answer, Answer]:
        return first, replace(behind, late_s=late_behind_s(change, first, behind))

    yield (best,)
    yield from ((one,) for one in own.values())
    for more in (1, 2):
        wide = replace(change, more=more)
        for make in (by_templates, anew):
            with contextlib.suppress(PlanInfeasible):
                yield (make(wide),)
                if "reroute" in own:
                    yield pair(own["reroute"], make(wide))
    yield from (pair(one, best) for one in own.values())
    if {"reroute", "templates"} <= own.keys():
        routed = own["reroute"]
        yield pair(routed, own["templates"])
        with contextlib.suppress(PlanInfeasible):
            moved = normalised(after(change, routed))
            yield from ((routed, one) for one in moved)
            yield from ((at_once(change, routed, one),) for one in moved)


def follow_up(change: Change, taken: Answer, outlook: Outlook) -> tuple[Answer, ...]:
    """Return what the boundary makes of the intended follow-up; nothing where it is refused."""
    if taken.then not in ("templates", "anew", "normalise"):
        return ()
    with contextlib.suppress(PlanInfeasible):
        return (choose(ask(after(change, taken), behind_answer(taken.then)), outlook),)
    return ()


def guarantee(last: Answer, most: int) -> int:
    return min(can_lose(last.found.plan), most)


def examine(seed: int) -> Outcome:
    """Return the ratios of one case. Raise PlanInfeasible if the model needs more nodes."""
    case = Cluster(seed)
    before = case.first(case.names, 1)
    change = case.change(before, before, case.left)
    first = case.first(case.left, 2)
    first_s = estimate_step(first, case.profile, tied=True).step_s
    best = anew(change)
    outlook = case.outlook(len(case.left))
    taken = chosen(change, "auto", outlook)
    plain = chosen(change, "templates", outlook)
    course = (taken, *follow_up(change, taken, outlook))
    kept = guarantee(course[-1], case.f)
    others = [one for one in candidates(change, best) if guarantee(one[-1], case.f) >= kept]
    least_s = min(weighed_s(one[-1].step_s, one[-1].found.plan) for one in (course, *others))

    def value(answers_in_turn: Sequence[Answer]) -> float:
        back_steps = case.undone + outlook.back_s / least_s
        return committed(answers_in_turn, change, case.wait_s, back_steps, case.sizes_lost)

    most = max(map(value, others))
    back = case.change(course[-1].found.plan, plain.found.plan, case.names)
    staying_s = weighed_s(course[-1].step_s, course[-1].found.plan)
    try:
        joining = choose(unforced(back), case.outlook(len(case.names)))
        after_s: float | None = weighed_s(joining.step_s, joining.found.plan)
    except PlanInfeasible:
        after_s = None
    before_s = weighed_s(estimate_step(before, case.profile, tied=True).step_s, before)
    return Outcome(
        seed=seed,
        several=len(case.sizes_lost) > 1,
        loss=max(0.0, 1 - value(course) / most),
        loss_first=weighed_s(course[-1].step_s, course[-1].found.plan) / weighed_s(first_s, first)
        - 1,
        returned=None if after_s is None else after_s / staying_s - 1,
        returned_first=(staying_s if after_s is None else after_s) / before_s - 1,
        taken=" then ".join(one.policy for one in course),
    )


def line(name: str, values: Sequence[float]) -> str:
    over = ", ".join(f"{sum(v > most for v in values)} over {most:.0%}" for most in _SHOWN)
    return (
        f"{name:30} mean {statistics.fmean(values):7.2%}  worst {max(values):7.2%}  "
        f"of {len(values)}: {over}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found: list[Outcome] = []
    seed = options.seed
    while len(found) < options.cases:
        seed += 1
        try:
            found.append(examine(seed))
        except PlanInfeasible:
            continue
    print(line("loss: steps given away", [one.loss for one in found]))
    single = [one for one in found if not one.several]
    print(line("loss: against a first plan", [one.loss_first for one in single]))
    print(line("return: against a first plan", [one.returned_first for one in single]))
    joins = [one.returned for one in found if one.returned is not None]
    print(line("return: against staying", joins), f"{len(found) - len(joins)} refused")
    for name in ("loss", "loss_first", "returned_first"):
        worst = sorted(found if name == "loss" else single, key=lambda one: -getattr(one, name))[:3]
        print(name, *(f"seed {one.seed}: {getattr(one, name):.1%} ({one.taken})" for one in worst))


if __name__ == "__main__":
    main()
