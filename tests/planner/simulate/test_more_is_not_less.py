"""More memory, faster links and fewer losses never give fewer samples, but for ties of 1 %."""

import random
from dataclasses import replace

import pytest

from oobleck.core.job.spec import RecoveryPolicy
from oobleck.core.profile import Profile
from oobleck.planner.recovery.terms import Terms
from oobleck.planner.search.firstplan import node_specification
from oobleck.planner.simulate.compare import set_up
from oobleck.planner.simulate.costs import Costs
from oobleck.planner.simulate.replay import replay
from oobleck.planner.simulate.shapes import Shapes
from oobleck.planner.simulate.trace import Row, trace_of
from support.profiles import LINKS, profile_of

NODES, MICROBATCHES, UNTIL_S = 8, 16, 1200.0
TIE = 0.99


def case(seed: int) -> tuple[Profile, list[Row]]:
    """A model that two or three nodes hold, and nodes that go and mostly come back."""
    rng = random.Random(seed)
    times = [rng.choice([0.25, 0.5]) for _ in range(8)]
    links = replace(LINKS, inter_node_bytes_per_s=rng.choice([250.0, 1e3, 1e5]))
    memory = rng.choice([3500, 4500])
    profile = profile_of(times, state=1000, activation=1, memory=memory, links=links)
    rows = [Row(0.0, "add", f"n{number}") for number in range(NODES)]
    for number in rng.sample(range(NODES), 4):
        at = rng.uniform(10, UNTIL_S - 100)
        rows.append(Row(at, "remove", f"n{number}"))
        if rng.random() < 0.7:
            rows.append(Row(at + rng.uniform(30, 300), "add", f"n{number}"))
    return profile, sorted(rows, key=lambda row: row.time_s)


def shapes_of(profile: Profile) -> Shapes:
    sizes = node_specification(profile, nodes=NODES, fault_tolerance=1)
    terms = Terms(
        profile=profile, sizes=sizes, fault_tolerance=1, tied=False, schedule=None, shadows=False
    )
    return Shapes(terms, microbatches=MICROBATCHES)


def replayed(
    shapes: Shapes, rows: list[Row], policy: RecoveryPolicy, until_s: float = UNTIL_S
) -> float:
    setting = set_up(trace_of(rows), shapes, nodes=NODES, costs=Costs(), until_s=until_s)
    return replay(setting, policy).samples


@pytest.mark.parametrize("policy", ["auto", "templates"])
@pytest.mark.parametrize(
    "seed", [*range(4), 19, 34, *(pytest.param(each, marks=pytest.mark.soak) for each in (4, 5))]
)
def test_more_is_never_less(seed: int, policy: RecoveryPolicy) -> None:
    profile, rows = case(seed)
    shapes = shapes_of(profile)
    given = replayed(shapes, rows, policy)
    roomy = replace(profile, gpu_memory_bytes=2 * profile.gpu_memory_bytes)
    assert replayed(shapes_of(roomy), rows, policy) >= TIE * given
    rate = 4 * profile.links.inter_node_bytes_per_s
    quick = replace(profile, links=replace(profile.links, inter_node_bytes_per_s=rate))
    assert replayed(shapes_of(quick), rows, policy) >= TIE * given
    lost = next(row.node for row in rows if row.event == "remove")
    fewer = [row for row in rows if row.node != lost or row.time_s == 0]
    assert replayed(shapes, fewer, policy) >= TIE * given


@pytest.mark.parametrize("number", [1, 2])
def test_a_loss_that_ended_badly_was_answered_best_over_drawn_ones(number: int) -> None:
    """The next losses, within 30 s, take the last holders of what `auto` re-routes. The next one
    was expected after 4 hours."""
    profile, rows = case(13)
    at = [row.time_s for row in rows if row.event == "remove"][number]
    past = [row for row in rows if row.time_s <= at]
    newest = {row.node: row.event for row in past}
    live = sorted(node for node, event in newest.items() if event == "add")
    rng, gained, shapes = random.Random(1), 0.0, shapes_of(profile)
    for _ in range(100):
        until_s = at + rng.expovariate(1 / 14_400)
        drawn = [*past, Row(until_s, "remove", rng.choice(live))]
        gained += replayed(shapes, drawn, "auto", until_s + 0.001)
        gained -= replayed(shapes, drawn, "templates", until_s + 0.001)
    assert gained > 0
