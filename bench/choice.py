"""What each choice of the first plan changes and gains over the choice by formula alone.

    python -m bench.choice [--profiles 60]

For random models (half of them with equal blocks), clusters, links and batches, four plans are
made: with templates and instantiation by formula alone (T1 + T2 + T3, the first cut of least T;
slowest pipeline + sync), with templates chosen among cuts of equal T by the replay of a lone
pipeline, with the instantiation chosen by a replay under 1F1B as well, and the first plan as a job
gets it. All four are then estimated with tied weights, each under the schedule that it would run
under, which the second and third were not chosen by, so that they may be worse. The spread is that
of the cuts of equal T among themselves, as a pipeline of 4 micro-batches per stage.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.support.models import profile as model_profile
from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, NodeName
from oobleck.core.profile import Links, Profile
from oobleck.planner.cost.estimate import Replays
from oobleck.planner.cost.kinds import Kind
from oobleck.planner.cost.replay import computed_s
from oobleck.planner.cost.stages import StageTable
from oobleck.planner.search.catalogue import Catalogue, Offer
from oobleck.planner.search.choose import choose_schedule
from oobleck.planner.search.demand import Costed, by_formula
from oobleck.planner.search.firstplan import make_first_plan, node_specification
from oobleck.planner.search.instantiate import instantiate
from oobleck.planner.search.templates import least_cuts, shortlists, template_of


@dataclass(frozen=True, kw_only=True)
class Outcome:
    #: Estimated step times.
    formula_s: float
    ties_s: float
    replay_s: float
    first_s: float
    #: Worst over best of the cuts of equal T, by template with more than one.
    spreads: Sequence[float]
    changed_templates: int
    templates: int


def random_question(rng: random.Random) -> tuple[Profile, int, int]:
    """Draw a profile, and the numbers of nodes and micro-batches."""
    gpus = rng.choice([1, 1, 2, 4])
    layers = rng.randint(max(8, 2 * gpus), 48)
    links = Links(
        intra_node_bytes_per_s=10 ** rng.uniform(10, 11.5),
        inter_node_bytes_per_s=10 ** rng.uniform(9, 10.7),
        latency_s=10 ** rng.uniform(-5.3, -4),
    )
    given = model_profile(
        layers,
        gpus,
        kind=rng.choice(["gpt", "random"]),
        seed=rng.randint(0, 1 << 30),
        nodes_needed=rng.randint(2, 3),
    )
    nodes = rng.randint(6, 24)
    return replace(given, links=links), nodes, rng.choice([16, 32, 64, 128])


def examine(given: Profile, nodes: int, microbatches: int) -> Outcome:
    sizes = node_specification(given, nodes=nodes, fault_tolerance=1)
    table = StageTable(given)
    groups = [
        [Costed(template_of(table, n, cut), given) for cut in cuts]
        for n, cuts in least_cuts(table, sizes).items()
    ]
    first = [group[0] for group in groups]
    chosen = [few.quickest for few in shortlists(groups)]
    several = [group for group in groups if len(group) > 1]
    return Outcome(
        formula_s=step_s(first, given, nodes, microbatches, judged=False),
        ties_s=step_s(chosen, given, nodes, microbatches, judged=False),
        replay_s=step_s(chosen, given, nodes, microbatches, judged=True),
        first_s=first_step_s(given, sizes, nodes, microbatches),
        spreads=[spread(group) for group in several],
        changed_templates=sum(a != b for a, b in zip(first, chosen, strict=True)),
        templates=len(groups),
    )


def step_s(
    templates: Sequence[Costed],
    given: Profile,
    nodes: int,
    microbatches: int,
    *,
    judged: bool,
) -> float:
    offer = Offer(
        costed={each.template.nodes: each for each in templates},
        equals={},
        first_found={},
        replays=Replays(given, tied=True),
        profile=given,
    )
    plan = instantiate(
        offer.templates,
        names(nodes),
        profile=given,
        microbatches=microbatches,
        min_pipelines=2,
        generation=Generation(1),
        judge=offer.judge_quickly if judged else by_formula,
    )
    return choose_schedule(plan, given, tied=True).step_s


def first_step_s(given: Profile, sizes: range, nodes: int, microbatches: int) -> float:
    made = make_first_plan(
        Catalogue(tied=True),
        sizes,
        names(nodes),
        profile=given,
        microbatches=microbatches,
        min_pipelines=2,
        generation=Generation(1),
    )
    return made.choice.step_s


def names(nodes: int) -> list[NodeName]:
    return [NodeName(f"n{number}") for number in range(nodes)]


def spread(group: Sequence[Costed]) -> float:
    kinds = [Kind(4 * len(each.template.stages), each.cut) for each in group]
    times = [max(ends) for ends in computed_s(("1f1b", kind) for kind in kinds).values()]
    return max(times) / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--profiles", type=int, default=60)
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    seed = 0
    while len(outcomes) < options.profiles:
        seed += 1
        try:
            outcomes.append(examine(*random_question(random.Random(seed))))
        except PlanInfeasible:
            continue
    report(outcomes)


def report(outcomes: Sequence[Outcome]) -> None:
    count = len(outcomes)
    templates = sum(o.templates for o in outcomes)
    changed = sum(o.changed_templates for o in outcomes)
    spreads = [s - 1 for o in outcomes for s in o.spreads]
    tell(f"{count} random profiles, {templates} templates")
    tell(f"templates with several cuts of least T: {len(spreads)} ({len(spreads) / templates:.0%})")
    tell(f"  worst against best of those: {spread_text(spreads)}")
    tell(f"templates for which replay takes another cut: {changed} ({changed / templates:.0%})")
    for name, before, after in (
        ("ties by replay", "formula_s", "ties_s"),
        ("instantiation by replay", "ties_s", "replay_s"),
        ("schedule and cuts of equal T", "replay_s", "first_s"),
        ("all", "formula_s", "first_s"),
    ):
        gains = [getattr(o, before) / getattr(o, after) - 1 for o in outcomes]
        better = sum(gain > 1e-9 for gain in gains)
        worse = sum(gain < -1e-9 for gain in gains)
        tell(f"{name}: plans better {better}, worse {worse} of {count}; {spread_text(gains)}")


def spread_text(values: Sequence[float]) -> str:
    return (
        f"median {statistics.median(values):.2%}, mean {statistics.fmean(values):.2%}, "
        f"least {min(values):.2%}, most {max(values):.2%}"
    )


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
