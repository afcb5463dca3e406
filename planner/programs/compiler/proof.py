"""Proof that nobody waits for ever for a message in a plan's programs, before any worker sees it.

Routes that are list-scheduled are proven by a dry run (`oobleck.planner.programs.compiler.dryrun`)
of all their messages. Routes with closed forms are proven by dry runs of small pieces of programs
that stand for them. They are remembered, so that a plan costs only what is new in it. A message
names a stage's worker by its place in the piece (p0s1/0: the second stage). Why pieces are enough:

1. Pipelines meet in gradient sums and in the vote alone, and a program does not stop for a sum
   before the vote. So messages are proven pipeline by pipeline.
2. Until the vote a stage waits for the stage before it or after it. So if some waited for ever, two
   neighbours would wait for each other, whatever the others do. It is enough to run each two
   neighbours, each in its order of compute, as if nobody stood before and after them.
3. The stages after a pair say how many forwards it is ahead. After those each further micro-batch
   is one more round of the same instructions, which leaves the links as it found them: what passes
   once passes always. So a pair is run with a few rounds.
4. Messages stand beside their compute, the same for each micro-batch. Where both begin with the
   same forwards, the first never waits and the second takes what comes in its order, so the links
   are empty after these; where both end with the same backwards, it is the other way round. A few
   of each are run, so that every kind of message is seen to find its receiver; the rest is left
   out.

Each link of a pair, forward and backward, is first-in-first-out in these runs.

Not proven here: sums of gradients, of which every worker has its part of one list in one order
(`oobleck.planner.programs.compiler.gradients`), though it starts those of other owners as they
become ready; and what workers compile themselves. A step that is done again in part after a loss
has the order of a step, less what is left out on both ends of a link; an evaluation only goes
forward. Tests run all of these.
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
#: How many are run of the forwards that both begin with, and of the backwards that both end with:
#: two can stand in a wrong order.
_ALIKE = 2

#: The forwards and backwards of a stage, one after the other.
_Order = tuple[Work, ...]


def prove(plan: Plan) -> None:
    """Raises ProgramDeadlock with who waits for what."""
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
    """Without the weight gradients, which nobody sends or waits for."""
    return tuple(
        (Forward if kind is Forward else Backward, microbatch)
        for kind, microbatch in order
        if kind is not BackwardWeight
    )


def _shortest(first: _Order, second: _Order) -> tuple[_Order, _Order]:
    """Without most of what both begin and end with; micro-batches are counted anew, forward and
    backward each, since a message of one never meets one of the other."""
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
    """Build a plan of one pipeline, each stage a layer on a node of its own."""
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
    """Prove everything anew."""
    _prove_messages.cache_clear()
