"""Proof that a plan's programs cannot deadlock on messages, before any worker gets them.

Routes that are list-scheduled are proven by a dry run (`oobleck.planner.programs.compiler.dryrun`)
of all their messages. Routes with closed forms are proven by dry runs of small pieces of programs
that represent them. Proven pieces are remembered, so that a plan costs only its new ones. A message
names a stage's worker by its place in the piece (p0s1/0: the second stage). Pieces are enough:

1. Pipelines meet only in gradient sums and in the vote, and a program does not stop for a sum
   before the vote. So messages are proven pipeline by pipeline.
2. Until the vote a stage waits for the stage before it or after it. So if some waited for ever, two
   neighbours would wait for each other, whatever the others do. It is enough to run each two
   neighbours, each in its order of compute, as if they were alone.
3. The number of stages after a pair decides how many forwards it is ahead. After those, each
   further micro-batch is one more round of the same instructions, which leaves the links as it
   found them. A round that passes once passes always. So a pair is run with a few rounds.
4. Messages are beside their compute, the same for each micro-batch. Where both stages begin with
   the same forwards, the first never waits and the second takes each message in its order. So the
   links are empty after these. Where both end with the same backwards, it is the other way round. A
   few of each are run to see that every kind of message finds its receiver; the rest is skipped.

Each link of a pair, forward and backward, is first-in-first-out in these runs.

Two things are not proven here, but tests run them. Sums of gradients: every worker has its part of
one list in one order (`oobleck.planner.programs.compiler.gradients`), though it starts those of
other owners as they become ready. And programs that workers compile themselves. A step that is
partly redone after a loss has the order of a step, with omissions equal on both ends of a link. An
evaluation has only forwards.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, takewhile

from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.instructions import Backward, BackwardWeight, Compute, Forward
from oobleck.core.plan import Pipeline, Plan
from oobleck.core.routes import Hold
from oobleck.planner.programs.compiler.compile import add_communication, compile_bodies
from oobleck.planner.programs.compiler.dryrun import dry_run
from oobleck.planner.programs.compiler.schedule import Work, compute_order
from oobleck.planner.programs.listing.schedule import listed_routes

#: Micro-batches of a run beyond those that fill the stages.
_ROUNDS = 4
#: Common forwards at the begin, and backwards at the end, that are run: two can be in a wrong
#: order.
_ALIKE = 2

#: Forwards and backwards of a stage in order.
_Order = tuple[Work, ...]


def prove(plan: Plan) -> None:
    """Prove the plan's messages; raises ProgramDeadlock with each waiter and its instruction."""
    listed = set(listed_routes(plan))
    if listed:
        workers = {w for number in listed for hop in plan.routes[number].hops for w in hop.workers}
        bodies = compile_bodies(plan, workers=workers)
        dry_run({worker: tuple(body) for worker, body in bodies.items()}, plan)
    closed = [route for number, route in enumerate(plan.routes) if number not in listed]
    kinds = {(tuple(len(hop.workers) for hop in r.hops), r.microbatches) for r in closed}
    for widths, microbatches in sorted(kinds):
        stages = len(widths)
        for first in range(stages - 1):
            count = min(microbatches, stages - first + _ROUNDS)
            before, after = (
                _talking(compute_order(plan.schedule, stages=stages, stage=s, microbatches=count))
                for s in (first, first + 1)
            )
            _prove_messages(_shortest(before, after), widths[first : first + 2])


def _talking(order: Iterable[Work]) -> _Order:
    """Return the order without weight gradients, which involve no messages."""
    return tuple(
        (Forward if kind is Forward else Backward, microbatch)
        for kind, microbatch in order
        if kind is not BackwardWeight
    )


def _shortest(first: _Order, second: _Order) -> tuple[_Order, _Order]:
    """Return both orders without most of their common begin and end. Micro-batches are counted
    anew, forward and backward each, since a message of one never meets one of the other."""
    begin = max(0, _alike(first, second, Forward) - _ALIKE)
    end = max(0, _alike(first[::-1], second[::-1], Backward) - _ALIKE)
    orders = first[begin : len(first) - end], second[begin : len(second) - end]
    lowest: dict[type[Compute], int] = {}
    for kind, microbatch in chain(*orders):
        lowest[kind] = min(lowest.get(kind, microbatch), microbatch)
    before, after = (
        tuple((kind, microbatch - lowest[kind]) for kind, microbatch in order) for order in orders
    )
    return before, after


def _alike(first: _Order, second: _Order, kind: type[Compute]) -> int:
    """Count the steps of the kind that both begin with, in the same order."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1] and pair[0][0] is kind, pairs))


@lru_cache(maxsize=4096)
def _prove_messages(orders: tuple[_Order, _Order], widths: tuple[int, ...]) -> None:
    """Run two neighbour stages of these numbers of workers that compute in these orders."""
    plan = _pair(widths)
    (route,) = plan.routes
    routes = {m: route for order in orders for _, m in order}
    programs = {}
    for hop, order in zip(route.hops, orders, strict=True):
        compute = [
            kind(microbatch=m, first_layer=hop.first_layer, last_layer=hop.last_layer)
            for kind, m in order
        ]
        for worker in hop.workers:
            programs[worker] = tuple(add_communication(worker, compute, routes, lowest={}))
    dry_run(programs, plan)


def _pair(widths: Sequence[int]) -> Plan:
    """Build a plan of one pipeline whose stages are a layer each, on nodes of their own."""
    nodes = tuple(NodeName(f"p0s{number}") for number in range(len(widths)))
    stages = tuple(
        Hold(
            first_layer=number,
            last_layer=number,
            workers=tuple(WorkerId(node, slot) for slot in range(width)),
        )
        for number, (node, width) in enumerate(zip(nodes, widths, strict=True))
    )
    pipeline = Pipeline(nodes=nodes, stages=stages, microbatches=1)
    return Plan.of_pipelines([pipeline], generation=Generation(0))


def forget() -> None:
    """Forget all proofs."""
    _prove_messages.cache_clear()
