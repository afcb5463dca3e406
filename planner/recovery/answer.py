"""A change of the nodes or of their speed, and an answer to it.

Must not know any policy.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import median
from typing import Literal

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.plan import Plan, Templates
from oobleck.core.profile import Profile
from oobleck.core.routes import Shard
from oobleck.core.ties import Ties
from oobleck.planner.cost.ends import in_turn
from oobleck.planner.cost.estimate import SPLITTING_TIE, Replays
from oobleck.planner.cost.listed import last_of_step_s
from oobleck.planner.programs.compiler.schedule import splits_backward
from oobleck.planner.programs.listing.schedule import listed_routes
from oobleck.planner.recovery.rules import Next, Reconfiguration
from oobleck.planner.search.demand import Costed, Costs, Judge, by_formula

Policy = Literal["templates", "reroute", "uneven", "shadow", "normalise", "morph"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Change of the live nodes, with the plans before it and the inputs of planning."""

    #: The running plan, and the newest plan of templates or recut. They are the same unless
    #: micro-batches were re-routed since.
    plan: Plan
    base: Plan
    live: tuple[NodeName, ...]
    generation: Generation
    templates: Templates
    profile: Profile
    fault_tolerance: int
    #: Nodes to tolerate beyond these.
    more: int = 0
    #: Largest `more` for which plans are candidates.
    most_more: int = 0
    #: Groups of layers that share parameters.
    tied: Ties
    #: True if the job names the plan's schedule.
    schedule_named: bool = False
    #: True if nodes may hold layers without running them.
    shadows: bool = False
    judge: Judge = by_formula
    costs: Costs | None = None
    #: By number of nodes: other templates that may be better in some plans.
    equals: Mapping[int, Sequence[Costed]] = field(default_factory=dict)
    #: Step estimates under `profile`, kept for all changes; None: made anew.
    replays: Replays | None = None
    #: Nodes that are drained or to stand by: they train until the change, and hand over what they
    #: alone hold.
    leaving: frozenset[NodeName] = frozenset()
    #: Rates of workers slower than profiled; those of workers that are not live are ignored.
    rates: Mapping[WorkerId, float] = field(default_factory=dict)
    #: Labels of the nodes' racks, as far as they are known.
    racks: Mapping[NodeName, str] = field(default_factory=dict)
    #: Makes the first plan for these nodes, of which so many can be lost at once; None: no such
    #: plan is a candidate.
    first: Callable[[Sequence[NodeName], Generation, int], Plan] | None = None

    @property
    def tolerated(self) -> int:
        """Number of nodes whose loss at once its plans shall allow."""
        return self.fault_tolerance + self.more


#: Most multiplications for an exact share, some milliseconds.
_MOST_EXACT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """Sets of nodes that include all holders of a layer, counted by size: losing such a set at once
    loses the layer."""

    nodes: int
    sets: tuple[tuple[int, int], ...]
    #: Number of racks of two or more live nodes, and of those that have all holders of a layer.
    racks: int = 0
    fatal_racks: int = 0

    @classmethod
    def of(
        cls,
        plan: Plan,
        live: Iterable[NodeName] | None = None,
        racks: Mapping[NodeName, str] | None = None,
    ) -> "Exposure":
        """Return the exposure of what the plan's nodes hold; `live`: the nodes that are left;
        `racks`: the labels of racks."""
        left = None if live is None else frozenset(live)
        nodes = [own if left is None else own & left for own in plan.layer_nodes()]
        holders = set(map(frozenset, nodes))
        counts: dict[int, int] = {}
        for own in holders:
            counts[len(own)] = counts.get(len(own), 0) + 1
        rack = {} if racks is None else racks
        sizes = Counter(label for name, label in rack.items() if left is None or name in left)
        several = {label for label, size in sizes.items() if label and size > 1}
        alone = {rack.get(next(iter(own))) for own in holders if len({*map(rack.get, own)}) == 1}
        return cls(
            nodes=len(frozenset().union(*nodes)),
            sets=tuple(sorted(counts.items())),
            racks=len(several),
            fatal_racks=len(several & alone),
        )

    @property
    def can_lose(self) -> int:
        """Number of nodes, whichever they are, that can be lost at once."""
        return self.sets[0][0] - 1

    def is_safer(self, other: "Exposure") -> bool:
        """Return whether fewer of the smallest losses that take all holders of a layer, here or in
        `other`, do so here."""
        fewest = min(self.can_lose, other.can_lose) + 1
        return self.share([(fewest, 1.0)]) < other.share([(fewest, 1.0)])

    def share(self, sizes: Sequence[tuple[int, float]], whole_rack: float = 0.0) -> float:
        """Return the share of loss events that take the last holders of a layer. `sizes`: share of
        events by number of lost nodes; `whole_rack`: share of events that take a whole rack
        instead. Exact where it takes as many as the smallest set has, and mostly where no node
        is in two sets; else an estimate."""
        share = sum(part * (1 - _spared(self, min(taken, self.nodes))) for taken, part in sizes)
        if not self.racks:
            return share
        return (1 - whole_rack) * share + whole_rack * self.fatal_racks / self.racks


@lru_cache(maxsize=4096)
def _spared(exposure: Exposure, taken: int) -> float:
    """Return the share of the groups of so many nodes that include no set whole."""
    nodes, sets = exposure.nodes, [one for one in exposure.sets if one[0] <= taken]
    whole = math.comb(nodes, taken)
    if len(sets) == 1 and sets[0][0] == taken:  # a group is at most one of them
        return 1 - sets[0][1] / whole
    apart = sum(size * number for size, number in exposure.sets) <= nodes
    if apart and taken * taken * sum(number for _, number in sets) <= _MOST_EXACT:
        # groups[k]: ways to choose k nodes so far without a whole set.
        rest = nodes - sum(size * number for size, number in sets)
        groups = [math.comb(rest, size) for size in range(taken + 1)]
        for size, number in sets:
            own = [math.comb(size, part) for part in range(size)]  # not all of it
            for _ in range(number):
                groups = [
                    sum(groups[most - part] * ways for part, ways in enumerate(own[: most + 1]))
                    for most in range(taken + 1)
                ]
        return groups[taken] / whole
    # Sets that share nodes are hit about independently.
    hits = ((math.comb(nodes - size, taken - size) / whole, number) for size, number in sets)
    return math.prod((1 - hit) ** number for hit, number in hits)


def splitting_weight(plan: Plan) -> float:
    """Return the factor for splitting the backward, a cost that profiles lack. A first plan's
    schedule has to gain as much."""
    listed = listed_routes(plan) and (plan.listing is None or plan.listing.split)
    return 1 + SPLITTING_TIE if listed or splits_backward(plan.schedule) else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """Best answer that was not taken, and its value."""

    policy: str
    rule: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer of one policy to a change."""

    policy: Policy
    #: Its plan is in its final form and proven (`settled`), so workers can get it.
    found: Reconfiguration
    #: Bytes of state that move before the next step, and the time of that.
    moved_bytes: int
    stall_s: float
    step_s: float
    #: Factor on the step time for splitting backwards, whose cost profiles lack.
    weight: float
    #: Exposure of the layers held under its plan.
    exposure: Exposure
    #: Follow-up at a later step boundary.
    then: Next | None = None
    #: Moved bytes that are expected to be copied at the switch, where the plan is for a step
    #: boundary. Their gradients outrun the links.
    outrun_bytes: int = 0
    #: Time for which workers wait at that boundary, for these bytes and for the last gradients.
    late_s: float = 0.0
    #: True if its plan has the shape of a first plan on the live nodes.
    anew: bool = False
    #: True if it undoes the changes for slow workers, none of which is slow any more.
    undoes: bool = False
    #: Steps that are expected to be committed until the next event; None: nothing was chosen.
    value: float | None = None
    runner_up: RunnerUp | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Input from which candidates are made."""

    running: Plan
    base: Plan
    rates: Mapping[WorkerId, float]
    profile: Profile
    #: Groups of layers that share parameters.
    tied: Ties
    schedule_named: bool = False
    #: Number of nodes that must be able to be lost at once without losing a layer, with shadows if
    #: needed.
    shadows_for: int = 0
    #: Step estimates under `profile`, kept for all situations; None: made anew.
    replays: Replays | None = None


def situation(change: Change) -> Situation:
    return Situation(
        running=change.plan,
        base=change.base,
        rates={worker: rate for worker, rate in sorted(change.rates.items()) if rate != 1},
        profile=change.profile,
        tied=change.tied,
        schedule_named=change.schedule_named,
        shadows_for=change.fault_tolerance if change.shadows else 0,
        replays=change.replays,
    )


def answer(
    policy: Policy,
    made: Reconfiguration,
    step_s: float,
    change: Change,
    *,
    then: Next | None = None,
) -> Answer:
    """Build the answer, with the bytes that move for it."""
    moved_bytes, busiest_bytes = moves(change, made.plan)
    rate, outrun = (
        change.profile.links.inter_node_bytes_per_s,
        outrun_bytes(change, made.plan, step_s),
    )
    return Answer(
        policy=policy,
        found=made,
        moved_bytes=moved_bytes,
        stall_s=busiest_bytes / rate,
        step_s=step_s,
        weight=splitting_weight(made.plan),
        exposure=Exposure.of(made.plan, racks=change.racks),
        then=then,
        outrun_bytes=outrun,
        late_s=outrun / rate + _gradients_late_s(change, made.plan),
    )


def late_behind_s(change: Change, first: Answer, behind: Answer) -> float:
    """Return the `late_s` of `behind`, an answer to the change, at a step boundary of `first`."""
    if not behind.moved_bytes:
        return behind.late_s
    outrun_s = behind.outrun_bytes / change.profile.links.inter_node_bytes_per_s
    running = replace(change, plan=first.found.plan)
    return outrun_s + _gradients_late_s(running, behind.found.plan)


def idle(change: Change, plan: Plan) -> tuple[NodeName, ...]:
    """Return the live nodes that `plan` leaves out."""
    return tuple(sorted(set(change.live).difference(plan.nodes)))


def moves(change: Change, plan: Plan) -> tuple[int, int]:
    """Return the bytes of state that workers lack before `plan` can begin, and those of the node
    that receives or sends most."""
    sizes = [layer.travelling_bytes for layer in change.profile.layers]
    received, sent = map(_by_node, _moves(change, plan, sizes))
    return received.total(), max((*received.values(), *sent.values()), default=0)


def outrun_bytes(change: Change, plan: Plan, step_s: float) -> int:
    """Return how many of the moved bytes cannot be kept up to date ahead of the plan.

    A copy is followed by the gradients of each step, and a node's link carries only as many of
    these as fit into one step.
    """
    layers = change.profile.layers
    room = change.profile.links.inter_node_bytes_per_s * step_s
    gradients = _moves(change, plan, [layer.parameter_bytes for layer in layers])
    of_a_step = [_by_node(way) for way in gradients]
    if all(size <= room for way in of_a_step for size in way.values()):
        return 0
    state = _moves(change, plan, [layer.travelling_bytes for layer in layers])
    return max(
        sum(round(moved[node] * (1 - room / size)) for node, size in way.items() if size > room)
        for moved, way in zip(map(_by_node, state), of_a_step, strict=True)
    )


def _gradients_late_s(change: Change, plan: Plan) -> float:
    """Return how long after the end of a step of the running plan its gradients have reached the
    copies of moving state, at most a step; 0 where nothing moves, a loss ends that plan, or the
    profile has no times of its stages.

    A worker sends them once its own sums of gradients are over.
    """
    profile = change.profile
    lost = not change.leaving.union(change.live).issuperset(change.plan.nodes)
    if lost:
        return 0.0
    received, sent = _moves(change, plan, [layer.parameter_bytes for layer in profile.layers])
    if not received:
        return 0.0
    try:
        summed_s, step_s = last_of_step_s(
            change.plan, profile, tied=change.tied, replays=change.replays
        )
    except PlanInfeasible:  # the running plan does not fit its nodes as now known
        return 0.0
    ready_s: dict[NodeName, float] = {}
    for worker, end_s in summed_s.items():
        ready_s[worker.node] = max(end_s, ready_s.get(worker.node, 0.0))
    whole_s: dict[int, float] = {}
    messages = defaultdict[tuple[str, NodeName], list[tuple[float, float]]](list)
    rate = profile.links.inter_node_bytes_per_s
    for (node, layer), size in sent.items():
        whole_s[layer] = max(ready_s[node], whole_s.get(layer, 0.0))
        messages["sends", node].append((ready_s[node], size / rate))
    for (node, layer), size in received.items():
        messages["receives", node].append((whole_s.get(layer, 0.0), size / rate))
    late_s = max((in_turn(own) - step_s for own in messages.values()), default=0.0)
    return min(max(0.0, late_s), step_s)


def copied_layers(change: Change, plan: Plan) -> float:
    """Return the most layers that one node copies to another ahead of the plan; small ones count
    less."""
    sizes = [layer.travelling_bytes for layer in change.profile.layers]
    received, sent = _moves(change, plan, sizes)
    holders = defaultdict[int, set[NodeName]](set)
    for node, layer in sent:
        holders[layer].add(node)
    usual = median(sizes) or 1  # layers may have no parameters
    copied = defaultdict[tuple[NodeName, frozenset[NodeName]], list[float]](list)
    for node, layer in received:
        if own := frozenset(holders[layer]):
            copied[node, own].append(min(1.0, sizes[layer] / usual))
    # Its holders share the layers, but not each of them.
    return max((max(max(w), sum(w) / len(own)) for (_, own), w in copied.items()), default=0.0)


#: Bytes by node and layer.
_Bytes = Counter[tuple[NodeName, int]]
_NOTHING: frozenset[Shard] = frozenset()


def _by_node(moved: _Bytes) -> Counter[NodeName]:
    found = Counter[NodeName]()
    for (node, _), size in moved.items():
        found[node] = found.get(node, 0) + size
    return found


def _moves(change: Change, plan: Plan, sizes: Sequence[int]) -> tuple[_Bytes, _Bytes]:
    """Return the bytes that each node receives and sends, of layers of these `sizes`.

    Each layer is sent by all its holders evenly. The real assignment of senders
    (`oobleck.planner.programs.transfer`) takes seconds to compute for a thousand workers.
    """
    before, senders = change.plan.shards, frozenset(change.live)
    if change.leaving:
        kinds = {shards for worker, shards in before.items() if worker.node in senders}
        layers = {shard.layer for shards in kinds for shard in shards}
        if len(layers) < plan.layer_count:  # layers that only leaving nodes hold are handed over
            senders |= change.leaving
    held = {worker: shards for worker, shards in before.items() if worker.node in senders}
    lacking = [
        (worker, shard)
        for worker, shards in plan.shards.items()
        if (own := held.get(worker, _NOTHING)) is not shards
        for shard in shards - own
    ]
    if not lacking:
        return _Bytes(), _Bytes()
    layers = {shard.layer for _, shard in lacking}
    # Most workers share a few sets of shards: each set is filtered once.
    of_kind: dict[frozenset[Shard], list[Shard]] = {}
    having = defaultdict[int, dict[NodeName, int]](dict)
    for worker, shards in held.items():
        if shards not in of_kind:
            of_kind[shards] = [shard for shard in shards if shard.layer in layers]
        for shard in of_kind[shards]:
            of_layer, size = having[shard.layer], -(-sizes[shard.layer] // shard.parts)
            of_layer[worker.node] = of_layer.get(worker.node, 0) + size
    received, wanted = _Bytes(), Counter[int]()
    for worker, shard in lacking:
        size = -(-sizes[shard.layer] // shard.parts)
        received[worker.node, shard.layer] += size
        # A copy on the same node takes no link.
        if having[shard.layer].get(worker.node, 0) < size:
            wanted[shard.layer] += size
    sent = _Bytes()
    for layer, size in wanted.items():
        whole = sum(having[layer].values())
        for node, share in having[layer].items():
            sent[node, layer] = -(-size * share // whole)
    return received, sent
