"""Reconfiguration (Oobleck §5): the three rules, joins, and every loss set of small clusters."""

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction

import pytest

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.plan import PipelineTemplate, Plan, place
from oobleck.core.profile import Profile
from oobleck.planner.programs.transfer import plan_transfers
from oobleck.planner.recovery.reconfigure import can_lose, reconfigure
from oobleck.planner.recovery.rules import RULES, Reconfiguration
from oobleck.planner.search.catalogue import Catalogue
from oobleck.planner.search.firstplan import node_specification
from oobleck.planner.search.instantiate import instantiate
from oobleck.planner.search.templates import generate_templates
from support.profiles import profile_of

Templates = Mapping[int, PipelineTemplate]
MICROBATCHES = 12


def names(count: int) -> tuple[NodeName, ...]:
    return tuple(NodeName(f"n{number}") for number in range(count))


def plan_of(templates: Templates, *sizes: int) -> Plan:
    """Pipelines of these sizes on n0, n1, ... in order."""
    pipelines, first_node, share = [], 0, MICROBATCHES // len(sizes)
    for size in sizes:
        nodes = tuple(NodeName(f"n{n}") for n in range(first_node, first_node + size))
        pipelines.append(place(templates[size], nodes, microbatches=share))
        first_node += size
    return Plan.of_pipelines(pipelines, generation=Generation(1))


@pytest.fixture
def profile() -> Profile:
    return profile_of([1.0] * 6)


def after(
    plan: Plan,
    profile: Profile,
    templates: Templates,
    *,
    lose: tuple[str, ...] = (),
    join: tuple[str, ...] = (),
    fault_tolerance: int = 1,
) -> Reconfiguration:
    live = [node for node in plan.nodes if node not in lose] + [NodeName(n) for n in join]
    return reconfigure(
        plan,
        live,
        templates=templates,
        profile=profile,
        fault_tolerance=fault_tolerance,
        generation=Generation(plan.generation + 1),
    )


def begun(
    templates: Templates,
    profile: Profile,
    nodes: int,
    *,
    microbatches: int,
    min_pipelines: int,
) -> Plan:
    return instantiate(
        templates,
        names(nodes),
        profile=profile,
        microbatches=microbatches,
        min_pipelines=min_pipelines,
        generation=Generation(1),
    )


def shape(change: Reconfiguration) -> list[tuple[str, ...]]:
    return [pipeline.nodes for pipeline in change.plan.pipelines]


def test_reinstantiate_takes_a_smaller_template(profile: Profile) -> None:
    """Oobleck §5: a hit pipeline with nodes enough goes on with a smaller template."""
    templates = generate_templates(profile, range(2, 5))
    plan = plan_of(templates, 2, 3)
    change = after(plan, profile, templates, lose=("n3",))
    assert change.rule == "reinstantiate"
    assert change.reason == "pipeline 1 lost n3: template 3 -> template 2"
    assert shape(change) == [("n0", "n1"), ("n2", "n4")]
    assert change.plan.pipelines[0].stages == plan.pipelines[0].stages
    assert [p.microbatches for p in change.plan.pipelines] == [6, 6]
    assert change.plan.generation == 2


def test_borrow_takes_a_node_from_the_largest_pipeline(profile: Profile) -> None:
    """Oobleck §5: a pipeline that is left with too few nodes borrows from one that can spare."""
    templates = generate_templates(profile, range(3, 6))
    plan = plan_of(templates, 3, 4, 5)
    change = after(plan, profile, templates, lose=("n0",), fault_tolerance=2)
    assert change.rule == "borrow"
    assert change.reason == (
        "pipeline 0 lost n0: template 3 -> template 3 with nodes borrowed: "
        "1 from pipeline 2 (template 5 -> template 4)"
    )
    assert sorted(map(len, shape(change))) == [3, 4, 4]
    assert change.plan.pipelines[1].nodes == ("n3", "n4", "n5", "n6")
    assert {"n1", "n2"} < set(change.plan.pipelines[0].nodes)


def test_merge_when_nobody_can_lend(profile: Profile) -> None:
    """Oobleck §5: two pipelines become one where no other can spare a node."""
    templates = generate_templates(profile, range(2, 5))
    change = after(plan_of(templates, 2, 2, 2), profile, templates, lose=("n2",))
    assert change.rule == "merge"
    assert change.reason == (
        "pipeline 1 lost n2 and pipeline 0 merge: templates 2 and 2 -> template 3"
    )
    assert sorted(map(len, shape(change))) == [2, 3]
    assert ("n4", "n5") in shape(change)


def test_a_pipeline_that_is_lost_whole_leaves_its_share_to_the_others(profile: Profile) -> None:
    templates = generate_templates(profile, range(2, 5))
    plan = plan_of(templates, 2, 2, 2)
    change = after(plan, profile, templates, lose=("n2", "n3"))
    assert change.rule == "takeover"
    assert shape(change) == [("n0", "n1"), ("n4", "n5")]
    assert change.plan.microbatches == MICROBATCHES
    assert "pipeline 1 lost n2, n3: all its nodes" in change.reason


def test_redundancy_comes_back_where_nodes_allow_it(profile: Profile) -> None:
    """4 + 2 nodes, the two lost: the four are cut into two pipelines, since f = 1 wants two."""
    templates = generate_templates(profile, range(2, 5))
    change = after(plan_of(templates, 4, 2), profile, templates, lose=("n4", "n5"))
    assert change.rule == "reshape"
    assert sorted(map(len, shape(change))) == [2, 2]
    assert "n4, n5 lost: templates 4, 2 -> templates 2, 2" in change.reason


def test_fewest_bytes_move_into_the_smaller_template(profile: Profile) -> None:
    """Three stages of two layers; after the middle one is lost each end keeps its two layers."""
    templates = generate_templates(profile, range(2, 5))
    for lost, kept in (("n0", ("n1", "n2")), ("n1", ("n0", "n2")), ("n2", ("n0", "n1"))):
        change = after(plan_of(templates, 3, 2), profile, templates, lose=(lost,))
        assert change.plan.pipelines[0].nodes == kept


def test_placement_moves_the_fewest_bytes_of_all_orders(profile: Profile) -> None:
    uneven = profile_of([1.0, 3.0, 2.0, 1.0, 2.0, 1.0, 1.0], state=[900, 10, 70, 300, 5, 40, 600])
    templates = generate_templates(uneven, range(4, 6))
    state = [layer.state_bytes for layer in uneven.layers]
    plan = plan_of(templates, 5, 4)
    for lost in plan.pipelines[0].nodes:
        change = after(plan, uneven, templates, lose=(lost,))
        nodes = change.plan.pipelines[0].nodes

        def moved(order: tuple[NodeName, ...]) -> int:
            placed = place(templates[4], order, microbatches=1)
            return sum(
                state[layer]
                for stage in placed.stages
                for layer in stage.layers
                if layer not in plan.held[stage.workers[0]]
            )

        assert moved(nodes) == min(map(moved, itertools.permutations(nodes)))


def test_a_node_that_comes_back_brings_the_old_shape_back(profile: Profile) -> None:
    templates = generate_templates(profile, range(2, 4))
    plan = plan_of(templates, 3, 2)
    smaller = after(plan, profile, templates, lose=("n1",)).plan
    change = after(smaller, profile, templates, join=("n1",))
    assert change.rule == "join"
    assert change.reason == "n1 joined: templates 2, 2 -> templates 3, 2"
    assert sorted(map(len, shape(change))) == [2, 3]
    kept = [
        p.stages for p in change.plan.pipelines if p.stages in [s.stages for s in smaller.pipelines]
    ]
    assert len(kept) == 1


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("lost", [1, 2])
def test_nodes_that_come_back_let_the_job_lose_as_many_as_before(
    lost: int, one_by_one: bool
) -> None:
    """Three pipelines where f = 1 asks for two: of plans as fast, the one that can lose more."""
    profile = profile_of([1.0] * 4)
    templates = generate_templates(profile, range(1, 4))
    first = instantiate(
        templates,
        names(3),
        profile=profile,
        microbatches=8,
        min_pipelines=2,
        generation=Generation(1),
    )
    away = ("n0", "n1")[:lost]
    plan = after(first, profile, templates, lose=away).plan
    for join in [(name,) for name in away] if one_by_one else [away]:
        plan = after(plan, profile, templates, join=join).plan
    assert can_lose(plan) == can_lose(first) == 2


def test_the_same_nodes_keep_their_placement(profile: Profile) -> None:
    templates = generate_templates(profile, range(2, 4))
    plan = plan_of(templates, 3, 2)
    change = after(plan, profile, templates)
    assert (change.rule, change.plan.pipelines) == ("replace", plan.pipelines)
    assert change.plan.generation == 2


def test_a_node_takes_the_place_of_one_that_is_lost_at_the_same_time(profile: Profile) -> None:
    templates = generate_templates(profile, range(2, 4))
    plan = plan_of(templates, 3, 2)
    change = after(plan, profile, templates, lose=("n1",), join=("n9",))
    assert set(shape(change)) == {("n3", "n4"), ("n0", "n9", "n2")}
    assert change.reason.startswith("n1 lost and n9 joined")


def test_too_few_nodes_are_a_cause(profile: Profile) -> None:
    templates = generate_templates(profile, range(2, 4))
    with pytest.raises(PlanInfeasible, match="needs at least 2 nodes to hold the model; 1 is"):
        after(plan_of(templates, 2), profile, templates, lose=("n0",))


def test_sizes_beyond_the_specification_are_made_when_nothing_else_fits(profile: Profile) -> None:
    """n0 = 2 and 4 nodes: the specification has size 2 alone, but three nodes are left."""
    templates = generate_templates(profile, range(2, 3))
    change = after(plan_of(templates, 2, 2), profile, templates, lose=("n0",))
    assert change.rule == "merge"
    assert [sorted(nodes) for nodes in shape(change)] == [["n1", "n2", "n3"]]
    assert change.idle == ()


def test_nodes_without_use_stay_idle_and_disturb_nobody() -> None:
    profile = profile_of([1.0] * 2)
    templates = generate_templates(profile, range(1, 3))
    plan = plan_of(templates, 1)
    pipeline = place(templates[1], names(1), microbatches=1)
    plan = Plan.of_pipelines([pipeline], generation=Generation(1))
    change = after(plan, profile, templates, join=("n1", "n2", "n3"))
    assert len(change.plan.nodes) == 2
    assert len(change.idle) == 2
    assert "has a use for 2 of the nodes" in change.reason


def test_beside_an_idle_node_the_same_nodes_keep_their_placement() -> None:
    profile = profile_of([1.0] * 3)
    templates = generate_templates(profile, range(2, 4))
    nodes = names(7)
    plan = instantiate(
        templates,
        nodes[:6],
        profile=profile,
        microbatches=2,
        min_pipelines=2,
        generation=Generation(1),
    )
    change = after(plan, profile, templates, join=("n6",))
    assert change.rule == "replace"
    assert change.plan.pipelines == plan.pipelines
    assert change.idle == ("n6",)
    assert "n6 joined" not in change.reason
    # The idle node takes the place of a lost one.
    change = after(plan, profile, templates, lose=("n0",), join=("n6",))
    assert change.rule == "join"
    assert set(change.plan.nodes) == set(nodes[1:])
    assert change.idle == ()


def test_can_lose_counts_the_nodes_of_the_rarest_layer(profile: Profile) -> None:
    templates = generate_templates(profile, range(1, 4))
    assert can_lose(plan_of(templates, 3)) == 0
    assert can_lose(plan_of(templates, 3, 2)) == 1
    assert can_lose(plan_of(templates, 1, 1, 2)) == 2


def sums(sizes: Iterable[int], nodes: int, pipelines: int) -> bool:
    """Whether that many pipelines of these sizes use exactly that many nodes."""
    return any(
        sum(chosen) == nodes
        for chosen in itertools.combinations_with_replacement(sorted(sizes), pipelines)
    )


def check(
    change: Reconfiguration,
    before: Plan,
    live: tuple[NodeName, ...],
    templates: Templates,
    fault_tolerance: int,
) -> None:
    """What holds after every reconfiguration, whatever was lost or joined."""
    plan, smallest = change.plan, min(templates)
    assert plan.nodes == tuple(sorted(live)), "every live node is used"
    assert change.idle == ()
    assert plan.microbatches == before.microbatches
    assert plan.schedule == before.schedule
    assert all(len(pipeline.nodes) in templates for pipeline in plan.pipelines)
    assert len(plan.pipelines) >= min(fault_tolerance + 1, len(live) // smallest)
    assert change.reason
    joined = set(live) - set(before.nodes)
    if joined:
        assert change.rule == "join"
        return
    kept = [p for p in before.pipelines if set(live).issuperset(p.nodes)]
    hit = len([p for p in before.pipelines if set(live).intersection(p.nodes)]) - len(kept)
    same = [p.stages for p in plan.pipelines].count
    if change.rule == "takeover":
        assert hit == 0
        assert all(same(p.stages) for p in kept)
        assert len(plan.pipelines) == len(kept)
    elif change.rule == "reinstantiate":
        assert hit > 0
        assert all(same(p.stages) for p in kept)
        assert len(plan.pipelines) == len(kept) + hit
    else:
        assert change.rule in {"reshape", *(name for name, _ in RULES)}
        assert change.rule == "reshape" or hit > 0


def check_sources(before: Plan, now: Plan, live: tuple[NodeName, ...], profile: Profile) -> None:
    """Each transfer comes from one who held the layer before."""
    held = {
        worker: frozenset(layers) for worker, layers in before.held.items() if worker.node in live
    }
    state_bytes = [layer.state_bytes for layer in profile.layers]
    for transfer in plan_transfers(held, now, state_bytes=state_bytes):
        assert transfer.layer in held[transfer.source]


def kinds_of_loss(plan: Plan, most: int) -> Iterator[tuple[NodeName, ...]]:
    """Sets of up to `most` nodes, one of all that differ in the names of like pipelines alone."""
    place_of = {
        node: (number, position)
        for number, pipeline in enumerate(plan.pipelines)
        for position, node in enumerate(pipeline.nodes)
    }
    seen = set()
    for count in range(1, min(most, len(plan.nodes)) + 1):
        for lost in itertools.combinations(plan.nodes, count):
            by_pipeline: dict[int, list[int]] = {}
            for node in lost:
                by_pipeline.setdefault(place_of[node][0], []).append(place_of[node][1])
            kind = sorted(
                (len(plan.pipelines[number].nodes), plan.pipelines[number].microbatches, positions)
                for number, positions in by_pipeline.items()
            )
            if str(kind) not in seen:
                seen.add(str(kind))
                yield lost


@pytest.mark.parametrize("fault_tolerance", [0, 1, 2])
@pytest.mark.parametrize("smallest", [1, 2, 3])
def test_every_loss_and_every_further_one_until_nothing_fits(
    smallest: int, fault_tolerance: int
) -> None:
    """Clusters of up to 10 nodes: every set of up to max(f, 1) losses, in whatever plan such
    losses lead to, down to fewer than n0 nodes."""
    profile = profile_of([1.0, 2.0, 1.0, 3.0, 1.0, 2.0, 1.0, 2.0, 1.0, 1.0])
    for nodes in range((fault_tolerance + 1) * smallest, 11):
        sizes = node_specification(
            profile, nodes=nodes, fault_tolerance=fault_tolerance, min_nodes=smallest
        )
        templates = generate_templates(profile, sizes)
        start = begun(
            templates, profile, nodes, microbatches=MICROBATCHES, min_pipelines=fault_tolerance + 1
        )
        open_plans, known = [start], set()
        while open_plans:
            plan = open_plans.pop()
            kind = str(sorted((len(p.nodes), p.microbatches) for p in plan.pipelines))
            if kind in known:
                continue
            known.add(kind)
            for lost in kinds_of_loss(plan, max(1, fault_tolerance)):
                live = tuple(node for node in plan.nodes if node not in lost)
                if len(live) < smallest:
                    with pytest.raises(PlanInfeasible) as caught:
                        after(plan, profile, templates, lose=lost, fault_tolerance=fault_tolerance)
                    assert f"needs at least {smallest} node" in caught.value.causes[0]
                    assert f"{len(live)} " in caught.value.causes[0]
                    continue
                change = after(plan, profile, templates, lose=lost, fault_tolerance=fault_tolerance)
                check(change, plan, live, templates, fault_tolerance)
                if len(lost) <= can_lose(plan):
                    check_sources(plan, change.plan, live, profile)
                open_plans.append(change.plan)


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(each, marks=pytest.mark.soak) for each in range(6, 12))]
)
def test_losses_and_joins_at_random_up_to_64_nodes(seed: int) -> None:
    rng = random.Random(seed)
    smallest, fault_tolerance = rng.randint(1, 4), rng.randint(0, 3)
    nodes = rng.randint((fault_tolerance + 1) * smallest, 64)
    profile = profile_of([rng.uniform(1, 2) for _ in range(rng.randint(12, 24))], state=10**9)
    sizes = node_specification(
        profile, nodes=nodes, fault_tolerance=fault_tolerance, min_nodes=smallest
    )
    templates = generate_templates(profile, sizes)
    plan = begun(templates, profile, nodes, microbatches=128, min_pipelines=fault_tolerance + 1)
    away: list[str] = []
    for _ in range(25):
        lose: tuple[str, ...] = ()
        join: tuple[str, ...] = ()
        if away and rng.random() < 0.3:
            join = tuple(rng.sample(away, rng.randint(1, len(away))))
        if not join or rng.random() < 0.2:
            lose = tuple(rng.sample(plan.nodes, min(rng.randint(1, 4), len(plan.nodes))))
        live = tuple(NodeName(n) for n in (*sorted(set(plan.nodes) - set(lose)), *join))
        if len(live) < smallest:
            with pytest.raises(PlanInfeasible):
                after(
                    plan,
                    profile,
                    templates,
                    lose=lose,
                    join=join,
                    fault_tolerance=fault_tolerance,
                )
            return
        change = after(
            plan, profile, templates, lose=lose, join=join, fault_tolerance=fault_tolerance
        )
        check(change, plan, live, templates, fault_tolerance)
        if len(lose) <= can_lose(plan):
            check_sources(plan, change.plan, live, profile)
        away = [name for name in sorted({*away, *lose}) if name not in change.plan.nodes]
        plan = change.plan


def check_shards(before: Plan, now: Plan, live: tuple[NodeName, ...], profile: Profile) -> None:
    """Pieces come from who held them before, and afterwards all have what their stage needs."""
    held = {w: shards for w, shards in before.shards.items() if w.node in live}
    spans = {
        worker: {(shard.layer, shard.start, shard.stop) for shard in shards}
        for worker, shards in held.items()
    }
    state_bytes = [layer.state_bytes for layer in profile.layers]
    received: dict[WorkerId, set[tuple[int, Fraction, Fraction]]] = {}
    for piece in plan_transfers(held, now, state_bytes=state_bytes):
        assert any(
            layer == piece.layer and start <= piece.start and piece.stop <= stop
            for layer, start, stop in spans[piece.source]
        )
        got = received.setdefault(piece.destination, set())
        got.add((piece.layer, piece.start, piece.stop))
    for worker, shards in now.shards.items():
        mine = sorted(spans.get(worker, set()) | received.get(worker, set()))
        for shard in shards:
            reached = shard.start
            for layer, start, stop in mine:
                if layer == shard.layer and start <= reached:
                    reached = max(reached, stop)
            assert reached >= shard.stop, (worker, shard)


@pytest.mark.parametrize("gpus_per_node", [2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_losses_and_joins_of_nodes_with_several_gpus(gpus_per_node: int, seed: int) -> None:
    """As the master plans: with templates, costs and replay from a catalogue."""
    rng = random.Random(f"{gpus_per_node} {seed}")
    smallest, fault_tolerance = rng.randint(1, 2), rng.randint(0, 2)
    nodes = rng.randint((fault_tolerance + 1) * smallest, 9)
    profile = profile_of(
        [rng.uniform(1, 2) for _ in range(rng.randint(2 * smallest * gpus_per_node, 20))],
        gpus=range(1, gpus_per_node + 1),
        gpus_per_node=gpus_per_node,
        state=[rng.randint(1, 10**9) for _ in range(20)],
    )
    sizes = node_specification(
        profile, nodes=nodes, fault_tolerance=fault_tolerance, min_nodes=smallest
    )
    offer = Catalogue(tied=False).offer(profile, sizes)
    plan = instantiate(
        offer.templates,
        names(nodes),
        profile=profile,
        microbatches=24,
        min_pipelines=fault_tolerance + 1,
        generation=Generation(1),
        judge=offer.judge,
        costs=offer.costs,
    )
    away: list[NodeName] = []
    for _ in range(12):
        lose, join = [], []
        most = min(can_lose(plan), len(plan.nodes) - smallest)
        if away and (most == 0 or rng.random() < 0.4):
            join = rng.sample(away, rng.randint(1, len(away)))
        elif most:
            lose = rng.sample(plan.nodes, rng.randint(1, most))
        if not lose and not join:
            break
        live = (*sorted(set(plan.nodes) - set(lose)), *join)
        change = reconfigure(
            plan,
            live,
            templates=offer.templates,
            profile=profile,
            fault_tolerance=fault_tolerance,
            generation=Generation(plan.generation + 1),
            judge=offer.judge,
            costs=offer.costs,
        )
        check(change, plan, live, offer.templates, fault_tolerance)
        check_shards(plan, change.plan, live, profile)
        away = sorted({*away, *lose} - set(change.plan.nodes))
        plan = change.plan


@pytest.mark.parametrize("sizes", [(2,), (3, 5), (2, 6), (4, 5)])
def test_idle_nodes_only_where_no_combination_uses_them(sizes: tuple[int, ...]) -> None:
    """Sizes with gaps, of which no more can be made; guarantees come before idle nodes."""
    layers = max(sizes)
    profile = profile_of([1.0] * layers)
    known = {size: generate_templates(profile, range(size, size + 1))[size] for size in sizes}
    full = replace(profile, gpu_memory_bytes=1)  # no other size fits
    start = plan_of(known, *[sizes[0]] * 3)
    for lost in range(1, 2 * sizes[0] + 1):
        for fault_tolerance in (0, 1):
            live = len(start.nodes) - lost
            change = after(
                start,
                full,
                known,
                lose=tuple(start.nodes[:lost]),
                fault_tolerance=fault_tolerance,
            )
            wanted = min(fault_tolerance + 1, live // sizes[0])
            most = max(
                n
                for n in range(1, live + 1)
                for pipelines in range(wanted, live + 1)
                if sums(sizes, n, pipelines)
            )
            assert len(change.plan.nodes) == most
            assert len(change.idle) == live - most
            assert len(change.plan.pipelines) >= wanted


def test_heavy_state_is_moved_less_than_light_state() -> None:
    """8 + 8 nodes less one: more and smaller pipelines are faster, and are worth a move of
    kilobytes, not one that keeps the network busy for hours."""
    kept = []
    for state in (1000, 10**13):
        profile = profile_of([1.0] * 12, state=state, memory=1 << 50)
        templates = generate_templates(profile, range(2, 9))
        plan = plan_of(templates, 8, 8)
        change = after(plan, profile, templates, lose=("n0",))
        kept.append(sum(p.stages == plan.pipelines[1].stages for p in change.plan.pipelines))
    assert kept == [0, 1]


@pytest.mark.parametrize("nodes", range(2, 9))
def test_joins_use_every_node_at_once_or_one_by_one(nodes: int) -> None:
    profile = profile_of([1.0, 2.0, 1.0, 3.0, 1.0, 2.0, 1.0])
    for joining in range(1, 4):
        sizes = node_specification(profile, nodes=nodes + joining, fault_tolerance=0, min_nodes=2)
        templates = generate_templates(profile, sizes)
        start = begun(templates, profile, nodes, microbatches=MICROBATCHES, min_pipelines=1)
        fresh = tuple(f"x{number}" for number in range(joining))
        assert after(start, profile, templates, join=fresh).idle == ()
        plan = start
        for name in fresh:
            change = after(plan, profile, templates, join=(name,))
            assert change.rule == "join"
            plan = change.plan
        assert len(plan.nodes) == nodes + joining
