"""Plans of routes for tests: of whole pipelines, and through whoever holds the layers."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.instructions import Instruction
from oobleck.core.plan import Plan
from oobleck.core.profile import Profile
from oobleck.core.routes import Hold, Hop, HopTicks, LayerLost, Listing, Route
from oobleck.core.schedules import SCHEDULES
from oobleck.planner.cost.listed import with_listing
from oobleck.planner.programs.compiler.compile import add_communication
from oobleck.planner.programs.listing.schedule import ListSchedule, listed_routes
from oobleck.planner.recovery.reroute import reroute
from support.plans import Cut, plan_of_cuts
from support.profiles import profile_of


def equal_pipelines(pipelines: int, stages: int, microbatches: int) -> Plan:
    return plan_of_cuts(*[([1] * stages, microbatches)] * pipelines)


def random_cuts(rng: random.Random, layers: int) -> list[Cut]:
    borders = sorted(rng.sample(range(1, layers), rng.randint(0, min(3, layers - 1))))
    return [
        (after - before, rng.choice((1, 1, 1, 2, 3)))
        for before, after in pairwise([0, *borders, layers])
    ]


def random_pipelines(rng: random.Random) -> Plan:
    """Two to four pipelines, cut alike or each in another way."""
    layers, count = rng.randint(2, 7), rng.randint(2, 4)
    cuts = random_cuts(rng, layers)
    alike = rng.random() < 0.4
    return plan_of_cuts(
        *((cuts if alike else random_cuts(rng, layers), rng.randint(1, 5)) for _ in range(count))
    )


def random_walks(rng: random.Random) -> Plan:
    """Routes that go from worker to worker as they like, in no common order."""
    layers, count = rng.randint(2, 6), rng.randint(3, 5)
    workers = [WorkerId(NodeName(f"n{number:03}"), 0) for number in range(count)]
    routes = []
    for _ in range(rng.randint(1, 5)):
        hops: list[Hop] = []
        while not hops or hops[-1].last_layer < layers - 1:
            first = hops[-1].last_layer + 1 if hops else 0
            others = [(w,) for w in workers if not hops or hops[-1].workers != (w,)]
            last = rng.randint(first, layers - 1)
            hops.append(Hop(first_layer=first, last_layer=last, workers=rng.choice(others)))
        routes.append(Route(hops=tuple(hops), microbatches=rng.randint(1, 5)))
    holds = tuple(Hold(first_layer=0, last_layer=layers - 1, workers=(w,)) for w in workers)
    return Plan(generation=Generation(1), holds=holds, routes=tuple(routes))


def random_plan(rng: random.Random) -> Plan:
    """Re-routed after losses, or of routes in no order at all."""
    if rng.random() < 0.4:
        return random_walks(rng)
    while True:
        plan = random_pipelines(rng)
        lost = rng.sample(plan.workers, min(rng.randint(1, 3), len(plan.workers)))
        try:
            return reroute(plan, lost, generation=Generation(2))
        except LayerLost:
            continue


def random_ticks(rng: random.Random) -> Callable[[Hop], HopTicks]:
    """Always the same for the same hop."""
    known: dict[Hop, HopTicks] = {}

    def ticks(hop: Hop) -> HopTicks:
        if hop not in known:
            kept_bytes = rng.randint(0, 9)
            known[hop] = HopTicks(
                forward=rng.randint(1, 9),
                backward_input=rng.randint(0, 9),
                backward_weight=rng.randint(1, 9),
                message=rng.choice((0, 0, 1, 5)),
                kept_bytes=kept_bytes,
                deferred_bytes=rng.randint(0, kept_bytes),
            )
        return known[hop]

    return ticks


def least_room(plan: Plan, ticks: Callable[[Hop], HopTicks]) -> dict[WorkerId, int]:
    """What each worker needs for one micro-batch."""
    room = dict.fromkeys(plan.workers, 0)
    for route in plan.routes:
        need = dict.fromkeys(plan.workers, 0)
        for hop in route.hops:
            for worker in hop.workers:
                need[worker] += ticks(hop).kept_bytes
        room = {worker: max(own, need[worker]) for worker, own in room.items()}
    return room


# ---- through whoever holds the layers, of workers that hold some of them


def random_routes(
    draw: random.Random,
    *,
    layers: int,
    names: Sequence[str],
    microbatches: int,
    shared: bool = True,
) -> Plan:
    """A plan on nodes of these names, with a worker or two each. Each node holds some of the
    layers, in one piece or two; routes take any hops that hold the next layers, and may meet a
    worker twice. Without a listing."""
    groups = []
    for name in names:
        slots = draw.randint(1, 2) if shared else 1
        groups.append(tuple(WorkerId(NodeName(name), slot) for slot in range(slots)))
    while True:
        holds = [hold for group in groups for hold in _random_holds(draw, layers, group)]
        held = {
            group: {la for h in holds if h.workers == group for la in h.layers} for group in groups
        }
        if all(held.values()) and set().union(*held.values()) == set(range(layers)):
            ways = [_random_way(draw, layers, held) for _ in range(draw.randint(1, 5))]
            if all(ways):
                break
    hops = [tuple(way) for way in ways if way][:microbatches]
    counts = [1] * len(hops)
    for _ in range(microbatches - len(hops)):
        counts[draw.randrange(len(hops))] += 1
    return Plan(
        generation=Generation(1),
        holds=tuple(holds),
        routes=tuple(Route(hops=h, microbatches=n) for h, n in zip(hops, counts, strict=True)),
        schedule=draw.choice(SCHEDULES),
    )


def random_listed(draw: random.Random, *, spare_bytes: int = 0) -> Plan:
    """As `random_routes`, with a listing, and so little memory that the worker that needs most for
    one micro-batch of a listed route has room for no other, or `spare_bytes` more."""
    layers = draw.randint(2, 7)
    plan = random_routes(
        draw, layers=layers, names=["a", "b", "c", "d", "e"], microbatches=draw.randint(1, 12)
    )
    profile = profile_of(
        [float(draw.randint(1, 6)) for _ in range(layers)],
        gpus=(1, 2),
        gpus_per_node=2,
        state=[4] * layers,
        activation=[draw.randint(0, 3) for _ in range(layers)],
    )
    split = draw.random() < 0.5
    tight = replace(profile, gpu_memory_bytes=_tight_bytes(plan, profile) + spare_bytes)
    return with_listing(plan, tight, split=split)


def _tight_bytes(plan: Plan, profile: Profile) -> int:
    ample = with_listing(plan, profile).listing
    assert ample is not None
    room = dict(zip(plan.workers, ample.room, strict=True))
    least = least_room(plan, ticks_by_hop(plan, ample).__getitem__)
    needs = (profile.gpu_memory_bytes - room[w] + least[w] for w in listed_workers(plan))
    return max(needs, default=profile.gpu_memory_bytes)


def listed_workers(plan: Plan) -> set[WorkerId]:
    hops = (hop for route in listed_routes(plan) for hop in plan.routes[route].hops)
    return {worker for hop in hops for worker in hop.workers}


def ticks_by_hop(plan: Plan, listing: Listing) -> dict[Hop, HopTicks]:
    return {
        hop: ticks
        for route, own in zip(plan.routes, listing.hops, strict=True)
        for hop, ticks in zip(route.hops, own, strict=True)
    }


def _random_holds(draw: random.Random, layers: int, workers: tuple[WorkerId, ...]) -> list[Hold]:
    held = sorted(draw.sample(range(layers), draw.randint(1, layers)))
    if draw.random() < 0.5:  # in one piece
        held = list(range(held[0], held[-1] + 1))
    runs: list[list[int]] = []
    for layer in held:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    resident = len(workers) > 1 and draw.random() < 0.5
    return [
        Hold(first_layer=run[0], last_layer=run[-1], workers=workers, resident=resident)
        for run in runs
    ]


def _random_way(
    draw: random.Random, layers: int, held: dict[tuple[WorkerId, ...], set[int]]
) -> list[Hop] | None:
    """Hops from the first layer to the last; None: they came to where nobody else has the next."""
    way: list[Hop] = []
    layer = 0
    while layer < layers:
        before = way[-1].workers if way else ()
        able = [group for group, own in held.items() if layer in own and group != before]
        if not able:
            return None
        group = draw.choice(able)
        last = layer
        while last + 1 in held[group] and draw.random() < 0.7:
            last += 1
        way.append(Hop(first_layer=layer, last_layer=last, workers=group))
        layer = last + 1
    return way


# ---- lowering, with receives right before their use


def with_messages(plan: Plan, schedule: ListSchedule) -> dict[WorkerId, list[Instruction]]:
    routes = {
        m: route for route, share in zip(plan.routes, plan.shares, strict=True) for m in share
    }
    return {
        worker: list(add_communication(worker, order, routes, lowest={}))
        for worker, order in schedule.orders.items()
    }
