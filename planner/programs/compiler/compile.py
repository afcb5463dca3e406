"""Compilation of a plan to one program per worker, by lowering passes.

Owns the places of communication in the order of compute, which
`oobleck.planner.programs.compiler.schedule` and `oobleck.planner.programs.listing.schedule` give.
Each pass takes and gives instruction lists: order of compute -> with tokens, sends and receives ->
with receives in the order of the sends -> with gradient sync, vote and optimizer step. Must not
know times, nor prove freedom from deadlock: `oobleck.planner.programs.compiler.proof` does.
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from oobleck.core.ids import WorkerId
from oobleck.core.instructions import (
    Action,
    Backward,
    BackwardInput,
    Compute,
    Content,
    Forward,
    Instruction,
    LayerPart,
    LoadTokens,
    Message,
    OptimizerStep,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    Share,
    SyncGradient,
    Visit,
    Vote,
    rows_in_common,
)
from oobleck.core.plan import Plan
from oobleck.core.routes import Hop, Route
from oobleck.core.ties import Ties
from oobleck.planner.programs.compiler.gradients import gradient_buckets, syncs_by_worker
from oobleck.planner.programs.compiler.schedule import compute_order
from oobleck.planner.programs.listing.schedule import ListSchedule, listed_routes, planned

# ---- Micro-batches of a step that is partly redone, in place of the plan's shares.
#
# After a loss, the gradients of many micro-batches survive. The others are redone, each only as
# far down as a layer lacks it. Pure data, and the spread of such micro-batches over routes.


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of a plan's routes in one step."""

    #: Micro-batches by route, in the order of compute.
    microbatches: tuple[tuple[int, ...], ...]
    #: By micro-batch: the lowest layer whose gradient still lacks it, where its backward ends. The
    #: number of layers means that only its loss is missing.
    lowest: Mapping[int, int]


def spread(microbatches: Sequence[int], plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Spread `microbatches` over the routes in proportion to their shares of a whole step.

    Each in turn goes to the route that would finish it first, where the shares measure the routes'
    speeds; ties go by the order of routes. A route's micro-batches are contiguous.
    """
    counts = [0] * len(plan.routes)
    heap = [(1 / route.microbatches, number) for number, route in enumerate(plan.routes)]
    heapq.heapify(heap)
    for _ in microbatches:
        _, number = heap[0]
        counts[number] += 1
        share = plan.routes[number].microbatches
        heapq.heapreplace(heap, ((counts[number] + 1) / share, number))
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    return tuple(
        tuple(microbatches[end - count : end]) for count, end in zip(counts, ends, strict=True)
    )


# ---- A lowering pass: every link becomes first-in-first-out, as NCCL needs it.
#
# A link is all messages from one worker to another, activations and gradients alike. Where routes
# share workers, a receiver may need a message before others that were sent earlier. It then
# receives the earlier ones first, although nothing needs them yet.
#
# This causes no deadlock. Let all compute be in an order that each worker follows and in which
# each piece comes after its inputs, such as by the begins of a schedule. A message is sent right
# after its compute. A receive that is moved is before a piece C of compute which needs a later
# message of the link. The piece that sends this later one is before C, and the sender computes
# the piece of the moved one before that. So each message awaited before C was sent by a piece
# before C in the order, and by induction that piece has run.


#: Receiver and sender.
_Link = tuple[WorkerId, WorkerId]


def receives_hoisted(
    programs: Mapping[WorkerId, Sequence[Instruction]],
) -> dict[WorkerId, list[Instruction]]:
    """Return the programs with receives in the order of the sends of each link. Each receive is as
    late as possible: before the first instruction that needs it or a message sent after it.

    Receives must be right before the instruction that needs them, and sends right after their
    compute. All else stays as it is, including a receive without a send (the dry run reports it).
    """
    #: By receiver and sender: position of each message among those sent.
    places: dict[_Link, dict[Content, int]] = defaultdict(dict)
    for worker, program in programs.items():
        for step in program:
            if isinstance(step, SendActivation | SendGradient):
                link = places[step.peer, worker]
                link[step.content] = len(link)
    return {worker: _hoisted(worker, program, places) for worker, program in programs.items()}


def _hoisted(
    worker: WorkerId, program: Sequence[Instruction], places: Mapping[_Link, Mapping[Content, int]]
) -> list[Instruction]:
    #: By sender: receives that are not in the result yet.
    ordered: dict[WorkerId, list[tuple[int, Instruction]]] = defaultdict(list)
    steps: list[tuple[Instruction, int | None]] = []
    for step in program:
        place = None
        if isinstance(step, ReceiveActivation | ReceiveGradient):
            place = places.get((worker, step.peer), {}).get(step.content)
            if place is not None:
                ordered[step.peer].append((place, step))
        steps.append((step, place))
    for own in ordered.values():
        # A stack: the next message to receive is last.
        own.sort(key=lambda receive: receive[0], reverse=True)
    hoisted: list[Instruction] = []
    for step, place in steps:
        if place is None:
            hoisted.append(step)
            continue
        assert isinstance(step, Message)
        left = ordered[step.peer]
        while left and left[-1][0] <= place:
            hoisted.append(left.pop()[1])
    return hoisted


A = TypeVar("A", bound=Action)
M = TypeVar("M", ReceiveActivation, SendActivation, ReceiveGradient, SendGradient)
#: Micro-batches of a route in one round of an evaluation.
EVALUATION_ROUND = 8


def compile_programs(
    plan: Plan,
    *,
    tied: Ties,
    layer_bytes: Sequence[int] | None = None,
    work: Work | None = None,
) -> Mapping[WorkerId, Program]:
    """Compile the program of every worker of `plan`, in rank order, for the plan's shares or for
    `work`.

    `tied`: groups of layers that share parameters. `layer_bytes`: gradient of each layer, to have
    sums of large ones split.
    """
    bodies = compile_bodies(plan, work)
    syncs = syncs_by_worker(gradient_buckets(plan, tied=tied, layer_bytes=layer_bytes), plan)
    return {worker: add_sync(worker, body, syncs[worker]) for worker, body in bodies.items()}


def compile_bodies(
    plan: Plan,
    work: Work | None = None,
    *,
    workers: Collection[WorkerId] | None = None,
    listed: ListSchedule | None = None,
) -> Mapping[WorkerId, list[Instruction]]:
    """Compile the programs of `workers`, by default of all, up to their gradient sums.

    On list-scheduled routes, receives have the order of the sends if both ends are among `workers`.
    `listed` replaces the plan's list schedule. Raises ValueError.
    """
    shares = plan.shares if work is None else work.microbatches
    lowest = {} if work is None else work.lowest
    through = _through(plan, workers)
    routes = {m: plan.routes[number] for number in through for m in shares[number]}
    if listed is None and not set(through).isdisjoint(listed_routes(plan)):
        listed = planned(plan)
    bodies = {
        worker: list(add_communication(worker, order, routes, lowest))
        for worker, order in _compute_orders(plan, shares, lowest, through, workers, listed).items()
    }
    if listed is None:
        return bodies
    # On links of closed forms, receives are in the order of the sends already.
    return bodies | receives_hoisted({w: bodies[w] for w in listed.orders if w in bodies})


def _through(plan: Plan, workers: Collection[WorkerId] | None) -> Sequence[int]:
    """Return the routes (positions in the plan) that pass any of `workers`."""
    if workers is None:
        return range(len(plan.routes))
    return [
        number
        for number, route in enumerate(plan.routes)
        if any(worker in workers for hop in route.hops for worker in hop.workers)
    ]


def compile_evaluation(
    plan: Plan, microbatches: int, *, workers: Collection[WorkerId] | None = None
) -> Mapping[WorkerId, tuple[Program, ...]]:
    """Compile the forwards with which `workers`, by default all of `plan`, evaluate micro-batches 0
    to `microbatches` - 1.

    Each route takes a share like that of the batch. The work is cut into rounds. At the end of each
    a worker waits until its sends have arrived, so that no hop runs far ahead of the next one. In a
    round all workers go by micro-batch and layer, so there is no deadlock.
    """
    whole = plan.microbatches
    routes: dict[int, Route] = {}
    wanted = plan.workers if workers is None else workers
    rounds: dict[WorkerId, list[list[Compute]]] = {worker: [] for worker in wanted}
    for position in _through(plan, workers):
        route, own = plan.routes[position], plan.shares[position]
        share = range(microbatches * own.start // whole, microbatches * own.stop // whole)
        routes.update(dict.fromkeys(share, route))
        for number, start in enumerate(range(0, len(share), EVALUATION_ROUND)):
            for hop in route.hops:
                forwards = [_at(Forward, hop, m) for m in share[start : start + EVALUATION_ROUND]]
                for own_rounds in (rounds[w] for w in hop.workers if w in rounds):
                    own_rounds += [[] for _ in range(number + 1 - len(own_rounds))]
                    own_rounds[number] += forwards
    return {
        worker: tuple(
            tuple(add_communication(worker, sorted(order, key=_visit), routes, lowest={}))
            for order in own_rounds
        )
        for worker, own_rounds in rounds.items()
    }


def _visit(step: Action) -> Visit:
    return step.visit


# ---- pass 1: compute


def _compute_orders(
    plan: Plan,
    shares: Sequence[Sequence[int]],
    lowest: Mapping[int, int],
    through: Iterable[int],
    workers: Collection[WorkerId] | None,
    listed: ListSchedule | None,
) -> dict[WorkerId, list[Compute]]:
    """Return the compute of each of `workers`, by default of all, in its order.

    The routes have the micro-batches `shares`; `through` are the positions of the routes that pass
    the workers, and `listed` is the list schedule, None if it has none of them. A micro-batch's
    backwards go no further than to the hop of layer `lowest`, by default 0. An order stays free of
    deadlock when some micro-batches, or backwards to the end of a route, are omitted. Raises
    ValueError.
    """
    wanted = plan.workers if workers is None else workers
    orders: dict[WorkerId, list[Compute]] = {worker: [] for worker in wanted}
    if listed is not None:
        number: dict[int, int] = {}
        for position in through:
            number.update(zip(plan.shares[position], shares[position], strict=False))
        for worker, whole_order in listed.orders.items():
            if worker not in orders:
                continue
            orders[worker] = [
                _at(type(step), step, number[step.microbatch])
                for step in whole_order
                if step.microbatch in number
                if isinstance(step, Forward)
                or lowest.get(number[step.microbatch], 0) <= step.last_layer
            ]
    for position in through:
        route, share = plan.routes[position], shares[position]
        if listed is not None and route.hops[0].workers[0] in listed.orders:
            continue
        for stage, hop in enumerate(route.hops):
            members = [worker for worker in hop.workers if worker in orders]
            if not members:
                continue
            works = compute_order(
                plan.schedule, stages=len(route.hops), stage=stage, microbatches=len(share)
            )
            order = [
                _at(kind, hop, share[index])
                for kind, index in works
                if kind is Forward or lowest.get(share[index], 0) <= hop.last_layer
            ]
            orders.update(dict.fromkeys(members, order))
    return orders


def _at(kind: type[A], where: Hop | Action, microbatch: int) -> A:
    return kind(microbatch=microbatch, first_layer=where.first_layer, last_layer=where.last_layer)


# ---- pass 2: tokens, sends and receives


def add_communication(
    worker: WorkerId,
    compute: Iterable[Compute],
    routes: Mapping[int, Route],
    lowest: Mapping[int, int],
) -> Iterator[Instruction]:
    """Yield the compute with messages: receives right before their use, sends right after their
    compute.

    `routes` are by micro-batch. Between hops of different numbers of workers each talks to those
    that have the same rows. Gradients go no further than to the hop of layer `lowest` of their
    micro-batch, by default layer 0.
    """
    neighbours: dict[tuple[int, int], _Neighbours] = {}
    for step in compute:
        route = routes[step.microbatch]
        key = id(route), step.first_layer
        if key not in neighbours:
            neighbours[key] = _Neighbours.of(worker, step.first_layer, route)
        near = neighbours[key]
        if isinstance(step, Forward):
            if not near.before or not near.after:
                yield _at(LoadTokens, near.hop, step.microbatch)
            yield from _messages(ReceiveActivation, step, near.before)
            yield step
            yield from _messages(SendActivation, step, near.after)
        elif isinstance(step, Backward | BackwardInput):
            yield from _messages(ReceiveGradient, step, near.after)
            yield step
            if step.first_layer > lowest.get(step.microbatch, 0):
                yield from _messages(SendGradient, step, near.before)
        else:
            yield step


#: Workers of the hop before or after, each with the rows of a micro-batch that both have.
_Peers = tuple[tuple[WorkerId, Share], ...]


@dataclass(frozen=True, slots=True)
class _Neighbours:
    """Neighbours of one worker at one hop of a route; none before the first and after the
    last hop."""

    hop: Hop
    before: _Peers
    after: _Peers

    @classmethod
    def of(cls, worker: WorkerId, first_layer: int, route: Route) -> "_Neighbours":
        position = next(n for n, h in enumerate(route.hops) if h.first_layer == first_layer)
        hop = route.hops[position]
        around = (None, *route.hops, None)  # `hop` is at position + 1
        member = hop.workers.index(worker)
        before, after = (
            () if other is None else tuple(rows_in_common(hop, other, member))
            for other in (around[position], around[position + 2])
        )
        return cls(hop, before, after)


def _messages(kind: type[M], step: Compute, peers: _Peers) -> Iterator[M]:
    for peer, share in peers:
        yield kind(
            microbatch=step.microbatch,
            first_layer=step.first_layer,
            last_layer=step.last_layer,
            peer=peer,
            share=share,
        )


# ---- pass 4: gradient sync, vote, optimizer step


def add_sync(
    worker: WorkerId, body: Iterable[Instruction], syncs: Iterable[SyncGradient]
) -> Program:
    """Append the gradient sums, the vote and the optimizer step to a worker's program.

    The sums are placed after the worker's last weight gradient, when all its layers are ready. The
    executor starts each as soon as its own layers are ready.
    """
    syncs = tuple(syncs)
    norm: list[LayerPart] = []
    for sync in syncs:
        # The owners share the work of the norm in turns, since all wait for the slowest. Own parts
        # are the same on all owners; all places of tied parameters are one part.
        own = [part for part in sync.parts if part.part == "own"]
        norm += own[sync.owners.index(worker) :: len(sync.owners)]
        if worker == sync.owners[0]:
            norm += [part for part in sync.parts if part.part == "tied"][:1]
    return (*body, *syncs, Vote(norm_parts=tuple(sorted(norm))), OptimizerStep())
