"""Proof that a plan's programs cannot deadlock on messages, before any worker gets them.

Routes that are list-scheduled are proven by a dry run of their messages, for fewer micro-batches
where there are many: all hops and links are in it, and more micro-batches only make the order of
compute longer, which cannot cause a deadlock (`receives_hoisted`). Routes with closed forms are
proven by dry runs of small pieces of programs that represent them. Proven pieces are
remembered, so that a plan costs only its new ones. A message names a stage's worker by its place in
the piece (p0s1/0: the second stage). Pieces are enough:

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

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, takewhile

from oobleck.core.errors import ProgramDeadlock
from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.instructions import (
    WHOLE,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Content,
    Forward,
    Instruction,
    LayerPart,
    LoadTokens,
    Message,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    Share,
    SyncGradient,
    Visit,
    Vote,
)
from oobleck.core.plan import Pipeline, Plan
from oobleck.core.routes import Hold
from oobleck.core.schedules import Schedule
from oobleck.planner.programs.compiler.compile import add_communication, compile_bodies
from oobleck.planner.programs.compiler.schedule import Work, compute_order
from oobleck.planner.programs.listing.schedule import example, listed_routes

# ---- Instructions as text, one word each, for people and messages.
#
# A word names the layers, the kind with the micro-batch, and the peer: `2-3:RECV_F3<n0/0`.
#
# LOAD3 F3 B3 tokens, forward, backward of micro-batch 3 BI3 BW3 the backward in two: gradient of
# the input, then of the weights RECV_F3<peer SEND_F3>peer activation from / to RECV_B3<peer
# SEND_B3>peer gradient from / to SYNC2[3,4,tied:4]@n0/0,n1/0 bucket 2: own parts of layers 3 and
# 4, the tied one of layer 4 VOTE[0,1,tied:0] STEP parts that this worker's norm counts; optimizer
# step
#
# Where hops have several workers, a share follows what it is of: `SEND_F3(1:2/4)>peer` sends the
# second quarter of the rows, `SYNC2[3(0:1/2)]@...` sums the first half of layer 3.


NAMES: Mapping[type[Action], str] = {
    LoadTokens: "LOAD",
    Forward: "F",
    Backward: "B",
    BackwardInput: "BI",
    BackwardWeight: "BW",
    ReceiveActivation: "RECV_F",
    SendActivation: "SEND_F",
    ReceiveGradient: "RECV_B",
    SendGradient: "SEND_B",
}


def format_instruction(instruction: Instruction) -> str:
    """Return the word for an instruction."""
    match instruction:
        case Message():
            arrow = "<" if isinstance(instruction, ReceiveActivation | ReceiveGradient) else ">"
            share = _format_share(instruction.share)
            return f"{_action(instruction)}{share}{arrow}{instruction.peer}"
        case Action():
            return _action(instruction)
        case SyncGradient():
            owners = ",".join(map(str, instruction.owners))
            return f"SYNC{instruction.bucket}[{_format_parts(instruction.parts)}]@{owners}"
        case Vote():
            return f"VOTE[{_format_parts(instruction.norm_parts)}]"
        case _:
            return "STEP"


def _action(action: Action) -> str:
    layers = f"{action.first_layer}-{action.last_layer}"
    return f"{layers}:{NAMES[type(action)]}{action.microbatch}"


def _format_share(share: Share) -> str:
    return "" if share == WHOLE else f"({share.start}:{share.stop}/{share.of})"


def _format_parts(parts: Iterable[LayerPart]) -> str:
    return ",".join(
        f"{'tied:' if p.part == 'tied' else ''}{p.layer}{_format_share(p.share)}" for p in parts
    )


# ---- A dry run of all programs of a plan: proof that they do not deadlock.
#
# Each worker runs its program until it must wait, and is woken by the event that it waits for. So
# a run takes time proportional to the number of instructions.
#
# The result does not depend on the order in which workers run. A worker's next instruction
# depends on its own program alone, and a message or a sum that has arrived
# stays.planner.cost.replay` has them), nor how programs are made.


#: Sender and receiver.
_Link = tuple[WorkerId, WorkerId]


def dry_run(programs: Mapping[WorkerId, Program], plan: Plan) -> None:
    """Run `programs` once. Raises ProgramDeadlock with each waiter and its instruction.

    Sends end at once. Links are first-in-first-out: a worker that receives messages in another
    order than they were sent waits for ever. If `programs` are those of some workers only, messages
    with others pass at once.
    """
    _Run(programs, plan).finish()


@dataclass(slots=True, eq=False)
class _Runner:
    """Worker with its position in its program."""

    id: WorkerId
    program: Program
    position: int = 0
    #: Gradient sums that it has reached, and how many of them are over, oldest first.
    started: list[SyncGradient] = field(default_factory=list)
    summed: int = 0

    @property
    def next(self) -> Instruction | None:
        return self.program[self.position] if self.position < len(self.program) else None


class _Run:
    def __init__(self, programs: Mapping[WorkerId, Program], plan: Plan) -> None:
        self._runners = {w: _Runner(w, program) for w, program in sorted(programs.items())}
        #: Number of workers that hold a layer together, where there are several.
        self._width = {
            (worker, layer): len(hold.workers)
            for hold in plan.holds
            if len(hold.workers) > 1
            for worker in hold.workers
            for layer in hold.layers
        }
        self._runnable = deque(self._runners.values())
        #: Messages on their way, and the worker that waits for the next one.
        self._sent: dict[_Link, deque[Content]] = defaultdict(deque)
        self._receiver: dict[_Link, _Runner] = {}
        #: Workers of a hop that have reached a piece of compute.
        self._gathered: dict[tuple[Visit, type[Compute]], list[_Runner]] = {}
        #: By bucket: workers for which it is the oldest open sum.
        self._ready_to_sum: dict[int, set[WorkerId]] = defaultdict(set)

    def finish(self) -> None:
        while self._runnable:
            runner = self._runnable.popleft()
            while (step := runner.next) is not None and self._passes(runner, step):
                runner.position += 1
            if not self._runnable:
                self._vote()
        if stuck := [r for r in self._runners.values() if r.next is not None]:
            raise ProgramDeadlock(self._describe(runner) for runner in stuck)

    def _passes(self, runner: _Runner, step: Instruction) -> bool:
        """Run the worker's next instruction; False: it must wait there, and continues when it is
        put among the runnable ones."""
        match step:
            case Message() if step.peer not in self._runners:
                return True
            case SendActivation() | SendGradient():
                return self._send(runner, step)
            case ReceiveActivation() | ReceiveGradient():
                return self._receive(runner, step)
            case Forward() | Backward() | BackwardInput() | BackwardWeight():
                return self._compute(runner, step)
            case SyncGradient():
                runner.started.append(step)
                if runner.summed == len(runner.started) - 1:
                    self._sum(runner)
                return True
            case Vote():
                return False
            case _:
                return True

    # ---- messages

    def _send(self, runner: _Runner, step: Message) -> bool:
        link, content = _message(runner.id, step)
        self._sent[link].append(content)
        if link in self._receiver:
            self._runnable.append(self._receiver.pop(link))
        return True

    def _receive(self, runner: _Runner, step: Message) -> bool:
        link, content = _message(runner.id, step)
        sent = self._sent[link]
        if sent and sent[0] == content:
            sent.popleft()
            return True
        self._receiver[link] = runner
        return False

    # ---- what several workers do together

    def _compute(self, runner: _Runner, step: Compute) -> bool:
        """Run compute; the workers of a hop compute in step."""
        width = self._width.get((runner.id, step.first_layer), 1)
        if width == 1:
            return True
        key = step.visit, type(step)
        others = self._gathered.setdefault(key, [])
        if len(others) + 1 < width:
            others.append(runner)
            return False
        for other in others:
            other.position += 1
            self._runnable.append(other)
        return True

    def _sum(self, runner: _Runner) -> None:
        """Mark the worker's oldest open sum as ready there; end the sums that are ready
        everywhere.
        """
        came_up = [runner]
        while came_up:
            runner = came_up.pop()
            sync = runner.started[runner.summed]
            ready = self._ready_to_sum[sync.bucket]
            ready.add(runner.id)
            if ready != set(sync.owners):
                continue
            del self._ready_to_sum[sync.bucket]
            for owner in map(self._runners.__getitem__, sync.owners):
                owner.summed += 1
                if owner.summed < len(owner.started):
                    came_up.append(owner)

    def _vote(self) -> None:
        """Let all workers pass the vote once all have reached it with their sums over."""
        runners = self._runners.values()
        if all(isinstance(r.next, Vote) and r.summed == len(r.started) for r in runners):
            for runner in runners:
                runner.position += 1
                self._runnable.append(runner)

    # ---- description of waiting workers

    def _describe(self, runner: _Runner) -> str:
        step = runner.next
        assert step is not None
        words = f"{runner.id} waits at {format_instruction(step)}"
        match step:
            case Message():
                sent = self._sent.get((step.peer, runner.id))
                other = " in order: another message is before it" if sent else ""
                return f"{words} for {step.peer}{other}"
            case Forward() | Backward() | BackwardInput() | BackwardWeight():
                return f"{words} for the other workers of its hop"
            case Vote() if runner.summed < len(runner.started):
                return f"{words} for the sum of bucket {runner.started[runner.summed].bucket}"
            case Vote():
                absent = [str(r.id) for r in self._runners.values() if not isinstance(r.next, Vote)]
                return f"{words} for {', '.join(absent) or 'the sums of others'}"
            case _:
                return words


def _message(worker: WorkerId, step: Message) -> tuple[_Link, Content]:
    """Return the link and the content of an instruction of `worker`, the same on both sides."""
    sends = isinstance(step, SendActivation | SendGradient)
    return (worker, step.peer) if sends else (step.peer, worker), step.content


#: Visits of a run of list-scheduled routes, about, where two micro-batches of each are fewer.
_MOST_PROVEN_VISITS = 200
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
        few, schedule = example(plan, _MOST_PROVEN_VISITS)
        bodies = compile_bodies(few, workers=schedule.orders.keys(), listed=schedule)
        dry_run({worker: tuple(body) for worker, body in bodies.items()}, few)
    closed = [route for number, route in enumerate(plan.routes) if number not in listed]
    kinds = {(tuple(len(hop.workers) for hop in r.hops), r.microbatches) for r in closed}
    for widths, microbatches in sorted(kinds):
        _prove_pipeline(plan.schedule, widths, min(microbatches, len(widths) + _ROUNDS))


@lru_cache(maxsize=4096)
def _prove_pipeline(schedule: Schedule, widths: tuple[int, ...], microbatches: int) -> None:
    """Prove the messages of each two neighbours of stages with these numbers of workers."""
    stages = len(widths)
    for first in range(stages - 1):
        count = min(microbatches, stages - first + _ROUNDS)
        before, after = (
            _talking(compute_order(schedule, stages=stages, stage=s, microbatches=count))
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
    """Return both orders without most of their common begin and end. Micro-batches are renumbered,
    forwards and backwards separately, since their messages never mix."""
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
    """Count the steps of the kind at the begin of both orders, as far as these are equal."""
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
    _prove_pipeline.cache_clear()
