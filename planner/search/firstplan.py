"""The first plan of a job: sizes, cuts and schedule, by the estimated step of all together.

The formula finds a few instantiations near the best (`oobleck.planner.search.instantiate`), with
the templates of best replay and with those that the search for least T found. A replay under 1F1B
selects those worth an estimate under their own schedule, which decides. Then other cuts of the same
T are tried in the winner. There is time for that only before a job's first step. Must not know
schedules or costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from oobleck.core.errors import ModelTooLarge, PlanInfeasible
from oobleck.core.ids import Generation, NodeName
from oobleck.core.plan import Plan
from oobleck.core.profile import MOST_BYTES, Profile
from oobleck.core.schedules import SCHEDULES, Schedule
from oobleck.core.ties import Ties
from oobleck.core.units import are, count, enough_bytes, format_bytes
from oobleck.planner.cost.estimate import Replays
from oobleck.planner.programs.communicators import too_many
from oobleck.planner.search.catalogue import Catalogue, Offer
from oobleck.planner.search.choose import ScheduleChoice, choose_among, settled
from oobleck.planner.search.demand import share_batch
from oobleck.planner.search.instantiate import instantiate
from oobleck.planner.search.racks import over_racks
from oobleck.planner.search.shadows import with_shadows
from oobleck.planner.search.templates import feasible_sizes

# ---- Node specification: the template sizes that a cluster needs (Oobleck §4.1.1).


#: Resolution of the missing memory in error messages, as a part of the memory.
_MEMORY_STEPS = 1000


def node_specification(
    profile: Profile,
    *,
    nodes: int,
    fault_tolerance: int,
    min_nodes: int = 1,
    shadows: bool = False,
) -> range:
    """Return the template sizes: n0 and the following sizes, as far as `nodes` nodes can use them.

    n0 is the fewest nodes, at least `min_nodes`, that hold the model. The largest is what the other
    `fault_tolerance` pipelines leave, nodes - fault_tolerance * n0 (§4.1.1), but at least 2 n0 - 1.
    Only n0 .. 2 n0 - 1 make up every number of nodes from n0 on; a cluster with exactly the nodes
    it needs would miss a size after its first loss. No size exceeds the number of layers or of
    nodes, or leaves a gap.

    With `shadows` n0 nodes, if more than `fault_tolerance`, are accepted here; the plan decides
    (`make_first_plan`). Raises PlanInfeasible with the missing bytes or nodes.
    """
    for name, value, least in (
        ("nodes", nodes, 1),
        ("fault_tolerance", fault_tolerance, 0),
        ("min_nodes", min_nodes, 1),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    layers = len(profile.layers)
    sizes = feasible_sizes(profile, min(nodes, layers))
    if not any(size >= min_nodes for size in sizes):
        sizes = feasible_sizes(profile, layers)
    if not sizes:
        raise ModelTooLarge(_memory_cause(profile))
    usable = [size for size in sizes if size >= min_nodes]
    if not usable:
        raise ModelTooLarge(
            f"a pipeline cannot have {min_nodes} nodes: the model of {layers} layers "
            f"on {profile.gpus_per_node} workers per node fits {sizes[-1]} at most; lower "
            "min_nodes_per_pipeline"
        )
    smallest = usable[0]
    needed = (fault_tolerance + 1) * smallest
    least = max(smallest, fault_tolerance + 1) if shadows else needed
    if nodes < least:
        cause = _nodes_cause(profile, nodes, fault_tolerance, smallest, min_nodes, least)
        raise PlanInfeasible(cause)
    others = min(fault_tolerance, nodes // smallest - 1)
    largest = min(nodes, max(nodes - others * smallest, 2 * smallest - 1))
    stop = smallest
    while stop in sizes and stop <= largest:
        stop += 1
    return range(smallest, stop)


def on_usable_gpus(profile: Profile, *, gpus: int, min_nodes: int = 1) -> Profile:
    """Return `profile` for training on nodes of `gpus` GPUs, or of as many of these as can be used.

    A stage has no more GPUs than the profile has times for, and a pipeline no more stages than
    layers. So a node may have more GPUs than it can use. `gpus_per_node` of the result is the most
    that fits some pipeline of at least `min_nodes` nodes.
    """
    layers = len(profile.layers)
    most = max(1, min(gpus, sum(max(la.forward_s) for la in profile.layers) // min_nodes))
    profiles = [replace(profile, gpus_per_node=used) for used in range(most, 0, -1)]
    fitting = (
        candidate
        for candidate in profiles
        if max(feasible_sizes(candidate, layers), default=0) >= min_nodes
    )
    return next(fitting, profiles[0])


def _nodes_cause(
    profile: Profile, nodes: int, fault_tolerance: int, smallest: int, min_nodes: int, least: int
) -> str:
    """Describe how many nodes are missing, and the alternatives."""
    needed = (fault_tolerance + 1) * smallest
    fewer = f", or {least} with memory for shadows" if least < needed else ""
    fixes = [f"add {count(needed - nodes, 'node')}"]
    possible = nodes // smallest - 1
    if possible >= 0:
        more = f" ({nodes - 1} with memory for shadows)" if least < needed else ""
        fixes.append(f"lower fault_tolerance to {possible}{more}")
    memory = _least_memory(profile, min_nodes, nodes // (fault_tolerance + 1))
    if memory is not None and memory > profile.gpu_memory_bytes:
        fixes.append(f"use workers with {_more_memory(profile, memory)}")
    return (
        f"needs {count(needed, 'node')}{fewer}: fault_tolerance {fault_tolerance} and pipelines of "
        f"at least {count(smallest, 'node')}; {are(nodes)} live; {', '.join(fixes[:-1])}"
        f"{' or ' if len(fixes) > 1 else ''}{fixes[-1]}"
    )


def _memory_cause(profile: Profile) -> str:
    """Describe how much memory per GPU is enough, and for how many nodes."""
    layers = profile.layers
    if any(min(layer.forward_s) > profile.gpus_per_node for layer in layers):
        return (
            f"some layer has no time for {profile.gpus_per_node} workers or fewer: profile it for "
            "those that a node has"
        )
    memory = _least_memory(profile, 1, len(layers))
    if memory is None:
        return (
            f"no cut of {len(layers)} layers uses all {profile.gpus_per_node} workers of a node; "
            "lower --workers-per-node"
        )
    fewest = _sizes_with(profile, memory, len(layers))[0]
    return (
        f"the model does not fit on any number of nodes: a worker needs "
        f"{_more_memory(profile, memory)}, for pipelines of {count(fewest, 'node')}; use workers "
        "with more memory, a smaller microbatch or a smaller model"
    )


def _more_memory(profile: Profile, memory: int) -> str:
    have = profile.gpu_memory_bytes
    return (
        f"at least {enough_bytes(memory)}, {enough_bytes(memory - have)} more than training may "
        f"use of one ({format_bytes(have)})"
    )


@lru_cache(maxsize=16)  # a waiting job calls it repeatedly
def _least_memory(profile: Profile, min_nodes: int, most_nodes: int) -> int | None:
    """Return about the least bytes per GPU with which pipelines of `min_nodes` to `most_nodes`
    nodes fit; None: no memory is enough."""
    layers, most = profile.layers, min(most_nodes, len(profile.layers))

    def fit(memory: int) -> bool:
        sizes = _sizes_with(profile, memory, most) if most > 0 else ()
        return max(sizes, default=0) >= min_nodes

    everything = sum(
        layer.state_bytes
        + layer.sum_bytes
        + layer.working_bytes
        + layer.mapped_bytes
        + len(layers) * layer.activation_bytes
        for layer in layers
    )
    low = profile.gpu_memory_bytes
    # Enough for one GPU to hold the whole model.
    high = min(max(low, everything), MOST_BYTES)
    if not fit(high):
        return None
    while high - low > max(1, high // _MEMORY_STEPS):
        middle = (low + high) // 2
        if fit(middle):
            high = middle
        else:
            low = middle
    return high


def _sizes_with(profile: Profile, memory_bytes: int, most_nodes: int) -> tuple[int, ...]:
    return feasible_sizes(replace(profile, gpu_memory_bytes=memory_bytes), most_nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPlan:
    """Plan under its chosen schedule, and the templates for changing it."""

    plan: Plan
    choice: ScheduleChoice
    offer: Offer


def make_first_plan(
    catalogue: Catalogue,
    sizes: range,
    nodes: Sequence[NodeName],
    *,
    profile: Profile,
    microbatches: int,
    min_pipelines: int,
    generation: Generation,
    wanted: Schedule | None = None,
    shadows: bool = False,
    racks: Mapping[NodeName, str] | None = None,
) -> FirstPlan:
    """Return the plan of least step time for `nodes`, of templates of `sizes`.

    `wanted`: the schedule; None: the best. With `shadows`, if there are too few nodes for so many
    pipelines, make as many as possible and give nodes further layers instead. No state has to move
    for them before the first step. `racks`: labels of the nodes' racks, over which the holders of
    each layer are spread. Raises PlanInfeasible.
    """
    if racks:  # put each pipeline in few racks, and the next one in others
        nodes = sorted(nodes, key=lambda name: racks.get(name, ""))
    pipelines = min(min_pipelines, len(nodes) // sizes.start) if shadows else min_pipelines
    replays = catalogue.replays(profile)
    maker = _Maker(replays=replays, profile=profile, wanted=wanted, tied=catalogue.tied)
    offer = catalogue.offer(profile, sizes, wanted=wanted)
    offers = [offer]
    # The last of the equals has the fewest gradients on the worker that has most.
    for others in (offer.first_found, {size: own[-1] for size, own in offer.equals.items()}):
        other = offer.using(others.values())
        if all(other.costed != each.costed for each in offers):
            offers.append(other)
    made = []
    for each in offers:
        plan = instantiate(
            each.templates,
            nodes,
            profile=profile,
            microbatches=microbatches,
            min_pipelines=pipelines,
            generation=generation,
            judge=each.judge,
            costs=each.costs,
        )
        made.append((maker.ranks([plan])[0], each, plan))
    plan = maker.recut(*min(made, key=lambda one: one[0]))
    if racks:
        plan = over_racks(plan, racks, [nodes])
    choice = maker.choice(plan)
    plan = plan.having(schedule=choice.schedule)
    if shadows:
        plan = with_shadows(plan, profile, fault_tolerance=min_pipelines - 1)
        if plan.shadows:
            (estimates,) = maker.replays.estimates([plan], SCHEDULES)
            choice = replace(choice, estimates=estimates)
        _check_safe(plan, min_pipelines, sizes.start)
    return FirstPlan(
        plan=settled(plan, profile),
        choice=choice,
        offer=catalogue.offer(profile, sizes, plan, wanted),
    )


def _check_safe(plan: Plan, least_nodes: int, smallest: int) -> None:
    """Raise PlanInfeasible where fewer than `least_nodes` nodes hold some layer."""
    fewest = min(map(len, plan.layer_nodes()))
    if fewest < least_nodes:
        missing = least_nodes * smallest - len(plan.nodes)
        raise PlanInfeasible(
            f"needs {count(least_nodes * smallest, 'node')}: fault_tolerance {least_nodes - 1} and "
            f"pipelines of at least {count(smallest, 'node')}; {are(len(plan.nodes))} live, "
            f"without the memory to hold each layer {count(least_nodes, 'time')} as shadows; add "
            f"{count(missing, 'node')} or lower fault_tolerance to {fewest - 1}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    replays: Replays
    profile: Profile
    wanted: Schedule | None
    tied: Ties

    def choice(self, plan: Plan) -> ScheduleChoice:
        """Choose the schedule; raises PlanInfeasible where the wanted one does not fit."""
        (estimates,) = self.replays.estimates([plan], SCHEDULES)
        return choose_among(estimates, self.profile, self.wanted)

    def ranks(self, plans: Sequence[Plan]) -> list[tuple[bool, float]]:
        """Return whether each plan has too many communicators for NCCL, and its step time under its
        own schedule. The time is infinite where the wanted one does not fit; if none fits, the
        final choice raises the error."""
        ranks = []
        for plan, estimates in zip(plans, self.replays.estimates(plans, SCHEDULES), strict=True):
            try:
                step_s = choose_among(estimates, self.profile, self.wanted).step_s
            except PlanInfeasible:
                step_s = float("inf")
            ranks.append((too_many(plan, tied=self.tied), step_s))
        return ranks

    def recut(self, best: tuple[bool, float], offer: Offer, plan: Plan) -> Plan:
        """Recut the plan, size by size, where other cuts make the step shorter."""
        sizes = [len(pipeline.nodes) for pipeline in plan.pipelines]
        for size in sorted(set(sizes)):
            for costed in offer.equals[size]:
                if costed is offer.costed[size]:
                    continue
                swapped = offer.using([costed])
                costs = swapped.costs
                shares = share_batch([costs[each] for each in sizes], plan.microbatches)
                recut = swapped.put([p.nodes for p in plan.pipelines], shares, plan.generation)
                (rank,) = self.ranks([recut])
                if rank < best:
                    offer, plan, best = swapped, recut, rank
        return plan
