"""A dry run of all programs of a plan: proof that nobody waits forever, and what a step takes.

Each worker interprets its program on its own clock; messages and sums take what
`oobleck.planner.cost` says, messages without getting in each other's way. Gradient sums run side by
side, each from when its last owner has come to it; what a worker sums passes its link one after
the other, as it becomes ready. The workers of a stage compute in step: each waits for the last of
them. Must not know how programs came about.

Driven by events: a worker runs until it must wait, and is woken by what it waits for, so a run
takes time proportional to the number of instructions.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oobleck.planner.cost import in_turn, message_s, vote_s
from oobleck.planner.errors import ProgramDeadlock
from oobleck.planner.ids import WorkerId
from oobleck.planner.plan import Plan
from oobleck.planner.profile import Profile
from oobleck.planner.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    LoadTokens,
    Message,
    OptimizerStep,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    SyncGradient,
    Vote,
)
from oobleck.planner.programtext import format_instruction
from oobleck.planner.stepcost import StageCost, SumCost, stage_cost

#: Told of each piece of compute: who, what, and from when to when.
Observer = Callable[[WorkerId, Compute, float, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a step of the plan takes, as far as the profile knows."""

    step_s: float
    #: Share of all workers' time that is not spent computing.
    bubble: float
    busy_s: Mapping[WorkerId, float]
    #: When each worker's last forward or backward is over.
    computed_s: Mapping[WorkerId, float]
    #: State of the layers held, and the activations at their highest.
    peak_bytes: Mapping[WorkerId, int]


def simulate(
    programs: Mapping[WorkerId, Program],
    profile: Profile,
    *,
    plan: Plan,
    blocking_sends: bool = False,
    observe: Observer | None = None,
) -> Simulation:
    """Run `programs` once; raises ProgramDeadlock with who waits for what.

    `blocking_sends`: a send ends when the message is received, instead of at once; sends directly
    followed by receives are posted together, as NCCL groups are, and end together.
    """
    run = _Run(programs, profile, plan, blocking_sends, observe)
    return run.finish()


@dataclass(slots=True, kw_only=True, eq=False)
class _Worker:
    id: WorkerId
    program: Program
    position: int = 0
    clock_s: float = 0.0
    busy_s: float = 0.0
    computed_s: float = 0.0
    #: Micro-batches whose activations it keeps, and the most there were.
    kept: int = 0
    peak_kept: int = 0
    #: Sums that were started, oldest first, and when.
    started: list[tuple[SyncGradient, float]] = field(default_factory=list)
    #: How many of them are over, and when the last one was.
    summed: int = 0
    #: Of each of those: when all its owners were ready, and what it takes.
    sums: list[tuple[float, float]] = field(default_factory=list)
    #: In an exchange: the messages that have not passed yet, and when the last one did.
    pending: set["_Key"] = field(default_factory=set)
    exchanged_s: float = 0.0

    @property
    def next(self) -> Instruction | None:
        return self.program[self.position] if self.position < len(self.program) else None


#: Receiver, sender, whether it is a gradient, pipeline, micro-batch, rows; in plain words, which
#: hash faster.
_Key = tuple[str, int, str, int, bool, int, int, int, int, int]

_SENDS = (SendActivation, SendGradient)
_RECEIVES = (ReceiveActivation, ReceiveGradient)
_COMPUTE = (Forward, Backward, BackwardInput, BackwardWeight)


class _Run:
    def __init__(
        self,
        programs: Mapping[WorkerId, Program],
        profile: Profile,
        plan: Plan,
        blocking: bool,
        observe: Observer | None,
    ) -> None:
        self._profile, self._plan, self._blocking = profile, plan, blocking
        self._observe = observe
        self._workers = {w: _Worker(id=w, program=p) for w, p in sorted(programs.items())}
        self._stage_of = {
            worker: (number, position)
            for number, pipeline in enumerate(plan.pipelines)
            for position, stage in enumerate(pipeline.stages)
            for worker in stage.workers
        }
        self._sum_cost = SumCost(
            profile,
            (
                part
                for program in programs.values()
                for step in program
                if isinstance(step, SyncGradient)
                for part in step.parts
            ),
        )
        #: By bucket: the owners that have it as their oldest open sum.
        self._ready_to_sum: dict[int, list[_Worker]] = defaultdict(list)
        self._runnable = deque(self._workers.values())
        # Each runs one instruction, or says that the worker must wait before it.
        self._do: Mapping[type[Instruction], Callable[[_Worker, Any], bool]] = {
            LoadTokens: self._load,
            **dict.fromkeys(_COMPUTE, self._compute),
            **dict.fromkeys(_SENDS, self._exchange if blocking else self._send),
            **dict.fromkeys(_RECEIVES, self._exchange if blocking else self._receive),
            SyncGradient: self._start_sum,
            Vote: self._await_vote,
            OptimizerStep: self._update,
        }
        self._arrivals: dict[_Key, float] = {}
        self._waiting: dict[_Key, _Worker] = {}
        #: With blocking sends: who has posted a message first, and when.
        self._posted: dict[tuple[_Key, bool], tuple[_Worker, float]] = {}
        #: Workers of a stage that have come to a piece of compute.
        self._gathered: dict[tuple[int, int, int, type[Compute]], list[_Worker]] = defaultdict(list)
        self._costs: dict[tuple[int, int], StageCost] = {}
        self._message_times: dict[tuple[int, int, bool, int, int, int], float] = {}

    def finish(self) -> Simulation:
        while self._runnable:
            self._advance(self._runnable.popleft())
            if not self._runnable:
                self._vote()
        if stuck := [w for w in self._workers.values() if w.next is not None]:
            raise ProgramDeadlock(self._describe(worker) for worker in stuck)
        return self._result()

    def _result(self) -> Simulation:
        workers = self._workers.values()
        step_s = max(worker.clock_s for worker in workers)
        busy = sum(worker.busy_s for worker in workers)
        return Simulation(
            step_s=step_s,
            bubble=1.0 - busy / (step_s * len(self._workers)) if step_s else 0.0,
            busy_s={worker.id: worker.busy_s for worker in workers},
            computed_s={worker.id: worker.computed_s for worker in workers},
            peak_bytes={
                worker.id: self._cost(*self._stage_of[worker.id]).worker_bytes(worker.peak_kept)
                for worker in workers
            },
        )

    # ---- one worker

    def _advance(self, worker: _Worker) -> None:
        """Run the worker's program on until it must wait, or to its end."""
        program = worker.program
        while worker.position < len(program):
            step = program[worker.position]
            if not self._do[type(step)](worker, step):
                return
            worker.position += 1

    def _load(self, worker: _Worker, step: LoadTokens) -> bool:
        return True

    def _start_sum(self, worker: _Worker, step: SyncGradient) -> bool:
        worker.started.append((step, worker.clock_s))
        if worker.summed == len(worker.started) - 1:
            self._sum(worker)
        return True

    def _await_vote(self, worker: _Worker, step: Vote) -> bool:
        return False

    def _cost(self, pipeline: int, stage: int) -> StageCost:
        cost = self._costs.get((pipeline, stage))
        if cost is None:
            place = self._plan.pipelines[pipeline].stages[stage]
            cost = stage_cost(
                self._profile, place.first_layer, place.last_layer, len(place.workers)
            )
            self._costs[pipeline, stage] = cost
        return cost

    def _compute(self, worker: _Worker, step: Compute) -> bool:
        cost = self._cost(step.pipeline, step.stage)
        if cost.gpus > 1:
            gathered = self._gathered[step.pipeline, step.stage, step.microbatch, type(step)]
            gathered.append(worker)
            if len(gathered) < cost.gpus:
                return False
            begun_s = max(member.clock_s for member in gathered)
            for member in gathered:
                member.clock_s = begun_s
                if member is not worker:
                    self._occupy(member, step, cost)
                    member.position += 1
                    self._runnable.append(member)
        self._occupy(worker, step, cost)
        return True

    def _occupy(self, worker: _Worker, step: Compute, cost: StageCost) -> None:
        if isinstance(step, Forward):
            taken_s = cost.forward_s
            worker.kept += 1
            worker.peak_kept = max(worker.peak_kept, worker.kept)
        elif isinstance(step, BackwardInput):
            taken_s = cost.backward_input_s
        else:
            taken_s = cost.backward_s if isinstance(step, Backward) else cost.backward_weight_s
            worker.kept -= 1
        begun_s = worker.clock_s
        worker.clock_s += taken_s
        worker.computed_s = worker.clock_s
        worker.busy_s += taken_s
        if self._observe is not None:
            self._observe(worker.id, step, begun_s, worker.clock_s)

    def _update(self, worker: _Worker, step: OptimizerStep) -> bool:
        taken_s = self._cost(*self._stage_of[worker.id]).update_s
        worker.clock_s += taken_s
        worker.busy_s += taken_s
        return True

    # ---- messages

    def _send(self, worker: _Worker, step: Message) -> bool:
        key = _key(worker.id, step)
        self._arrivals[key] = worker.clock_s + self._message_s(worker.id, step)
        if key in self._waiting:
            self._runnable.append(self._waiting.pop(key))
        return True

    def _receive(self, worker: _Worker, step: Message) -> bool:
        key = _key(worker.id, step)
        arrived_s = self._arrivals.pop(key, None)
        if arrived_s is None:
            self._waiting[key] = worker
            return False
        worker.clock_s = max(worker.clock_s, arrived_s)
        return True

    def _exchange(self, worker: _Worker, first: Message) -> bool:
        """Post the exchange that the worker stands before, and go on once all of it has passed."""
        steps = [first]
        last, receiving = worker.position, isinstance(first, _RECEIVES)
        for position in range(worker.position + 1, len(worker.program)):
            following = worker.program[position]
            if isinstance(following, LoadTokens):
                continue
            receiving = receiving or isinstance(following, _RECEIVES)
            if not isinstance(following, _RECEIVES if receiving else _SENDS):
                break
            steps.append(following)
            last = position
        worker.position = last
        worker.exchanged_s = worker.clock_s
        worker.pending = {_key(worker.id, step) for step in steps}
        for step in steps:
            key, sends = _key(worker.id, step), isinstance(step, _SENDS)
            if (key, not sends) not in self._posted:
                self._posted[key, sends] = (worker, worker.clock_s)
                continue
            peer, posted_s = self._posted.pop((key, not sends))
            passed_s = max(posted_s, worker.clock_s) + self._message_s(worker.id, step)
            for side in (worker, peer):
                side.exchanged_s = max(side.exchanged_s, passed_s)
                side.pending.discard(key)
            if not peer.pending:
                self._runnable.append(peer)
                peer.clock_s = peer.exchanged_s
                peer.position += 1
        if worker.pending:
            return False
        worker.clock_s = worker.exchanged_s
        return True

    def _message_s(self, worker: WorkerId, step: Message) -> float:
        """Both directions carry the output of the stage before the cut (or its gradient)."""
        before = step.stage - isinstance(step, ReceiveActivation | SendGradient)
        same_node = worker.node == step.peer.node
        share = step.share
        key = (step.pipeline, before, same_node, share.start, share.stop, share.of)
        if key not in self._message_times:
            cut = self._plan.pipelines[step.pipeline].stages[before].last_layer
            self._message_times[key] = message_s(
                share.of_bytes(self._profile.layers[cut].output_bytes),
                same_node=same_node,
                links=self._profile.links,
            )
        return self._message_times[key]

    # ---- all owners of a bucket, all workers

    def _sum(self, worker: _Worker) -> None:
        """The worker's oldest open sum is now ready there; end those that are ready everywhere."""
        came_up = [worker]
        while came_up:
            worker = came_up.pop()
            sync = worker.started[worker.summed][0]
            ready = self._ready_to_sum[sync.bucket]
            ready.append(worker)
            if len(ready) < len(sync.owners) or {w.id for w in ready} != set(sync.owners):
                continue
            ready_s = max(w.started[w.summed][1] for w in ready)
            taken_s = self._sum_cost.seconds(sync)
            for owner in self._ready_to_sum.pop(sync.bucket):
                owner.sums.append((ready_s, taken_s))
                owner.summed += 1
                if owner.summed < len(owner.started):
                    came_up.append(owner)

    def _vote(self) -> None:
        """Let all workers pass the vote once all of them stand there with their sums done."""
        workers = self._workers.values()
        if not all(isinstance(w.next, Vote) and w.summed == len(w.started) for w in workers):
            return
        begun_s = max(max(worker.clock_s, in_turn(worker.sums)) for worker in workers)
        voted_s = begun_s + vote_s(len(workers), self._profile.links)
        for worker in workers:
            worker.position += 1
            worker.clock_s = voted_s
            self._runnable.append(worker)

    def _describe(self, worker: _Worker) -> str:
        step = worker.next
        if worker.pending:
            # Of an exchange, name a message that has not passed.
            step = next(
                s
                for s in reversed(worker.program[: worker.position + 1])
                if isinstance(s, Message) and _key(worker.id, s) in worker.pending
            )
        assert step is not None
        words = f"{worker.id} waits at {format_instruction(step)}"
        match step:
            case Message():
                return f"{words} for {step.peer}"
            case Forward() | Backward() | BackwardInput() | BackwardWeight():
                return f"{words} for the other workers of its stage"
            case Vote() if worker.summed < len(worker.started):
                return f"{words} for the sum of bucket {worker.started[worker.summed][0].bucket}"
            case Vote():
                absent = [str(w.id) for w in self._workers.values() if not isinstance(w.next, Vote)]
                return f"{words} for {', '.join(absent) or 'the sums of others'}"
            case _:
                return words


def _key(worker: WorkerId, step: Message) -> _Key:
    if isinstance(step, _SENDS):
        receiver, sender = step.peer, worker
    else:
        receiver, sender = worker, step.peer
    return (
        receiver.node,
        receiver.slot,
        sender.node,
        sender.slot,
        isinstance(step, SendGradient | ReceiveGradient),
        step.pipeline,
        step.microbatch,
        step.share.start,
        step.share.stop,
        step.share.of,
    )
