"""A dry run of all programs of a plan: proof that nobody waits forever, and what a step takes.

Each worker interprets its program on its own clock; messages and sums take what
`oobleck.planner.cost` says, one beside the other without getting in each other's way. Gradient
sums of one worker run one after the other, in the order of its program. Must not know how programs
came about.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from oobleck.planner.cost import all_reduce_s, message_s
from oobleck.planner.errors import ProgramDeadlock
from oobleck.planner.ids import WorkerId
from oobleck.planner.plan import Plan
from oobleck.planner.profile import Profile
from oobleck.planner.program import (
    Backward,
    Forward,
    Instruction,
    LoadTokens,
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

#: Loss, norm and flags of a vote.
_VOTE_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a step of the plan takes, as far as the profile knows."""

    step_s: float
    #: Share of all workers' time that is not spent computing.
    bubble: float
    busy_s: Mapping[WorkerId, float]
    #: State of the layers held, and the activations at their highest.
    peak_bytes: Mapping[WorkerId, int]


def simulate(
    programs: Mapping[WorkerId, Program],
    profile: Profile,
    *,
    plan: Plan,
    blocking_sends: bool = False,
) -> Simulation:
    """Run `programs` once; raises ProgramDeadlock with who waits for what.

    `blocking_sends`: a send ends when the message is received, instead of at once.
    """
    run = _Run(programs, profile, plan, blocking_sends)
    return run.finish()


@dataclass(slots=True, kw_only=True)
class _Worker:
    id: WorkerId
    program: Program
    position: int = 0
    clock_s: float = 0.0
    busy_s: float = 0.0
    in_flight_bytes: int = 0
    peak_in_flight_bytes: int = 0
    #: Sums that were started, oldest first: (bucket, when).
    started: list[tuple[int, float]] = field(default_factory=list)
    #: How many of them are over, and when the last one was.
    summed: int = 0
    summed_s: float = 0.0

    @property
    def next(self) -> Instruction | None:
        return self.program[self.position] if self.position < len(self.program) else None


#: Receiver, whether it is a gradient, pipeline, micro-batch, sender.
_Message = tuple[WorkerId, bool, int, int, WorkerId]


class _Run:
    def __init__(
        self,
        programs: Mapping[WorkerId, Program],
        profile: Profile,
        plan: Plan,
        blocking_sends: bool,
    ) -> None:
        self._profile, self._plan, self._blocking = profile, plan, blocking_sends
        self._workers = {w: _Worker(id=w, program=p) for w, p in sorted(programs.items())}
        self._arrivals: dict[_Message, float] = {}
        #: With blocking sends: who waits with what for its receiver, since when.
        self._offers: dict[_Message, float] = {}
        self._taken: dict[_Message, float] = {}

    def finish(self) -> Simulation:
        progress = True
        while progress:
            progress = False
            for worker in self._workers.values():
                while self._advance(worker):
                    progress = True
            progress = self._sum() or progress
            progress = self._vote() or progress
        if stuck := [w for w in self._workers.values() if w.next is not None]:
            raise ProgramDeadlock(self._describe(worker) for worker in stuck)
        return self._result()

    def _result(self) -> Simulation:
        workers = self._workers.values()
        step_s = max(worker.clock_s for worker in workers)
        busy = sum(worker.busy_s for worker in workers)
        held = self._plan.holdings()
        layers = self._profile.layers
        return Simulation(
            step_s=step_s,
            bubble=1.0 - busy / (step_s * len(self._workers)) if step_s else 0.0,
            busy_s={worker.id: worker.busy_s for worker in workers},
            peak_bytes={
                worker.id: sum(layers[layer].state_bytes for layer in held[worker.id])
                + worker.peak_in_flight_bytes
                for worker in workers
            },
        )

    # ---- one worker

    def _advance(self, worker: _Worker) -> bool:
        """Run the worker's next instruction if it need not wait."""
        match worker.next:
            case LoadTokens() | OptimizerStep():
                pass
            case Forward() | Backward() as step:
                self._compute(worker, step)
            case SendActivation() | SendGradient() as step:
                if not self._send(worker, step):
                    return False
            case ReceiveActivation() | ReceiveGradient() as step:
                if not self._receive(worker, step):
                    return False
            case SyncGradient() as step:
                worker.started.append((step.bucket, worker.clock_s))
            case Vote() | None:
                return False
        worker.position += 1
        return True

    def _compute(self, worker: _Worker, step: Forward | Backward) -> None:
        stage = self._plan.pipelines[step.pipeline].stages[step.stage]
        gpus = len(stage.workers)
        layers = [self._profile.layers[layer] for layer in stage.layers]
        kept_bytes = sum(layer.activation_bytes for layer in layers) // gpus
        if isinstance(step, Forward):
            taken_s = sum(layer.forward_s[gpus] for layer in layers)
            worker.in_flight_bytes += kept_bytes
        else:
            taken_s = sum(layer.backward_s[gpus] for layer in layers)
            worker.in_flight_bytes -= kept_bytes
        worker.peak_in_flight_bytes = max(worker.peak_in_flight_bytes, worker.in_flight_bytes)
        worker.clock_s += taken_s
        worker.busy_s += taken_s

    def _send(self, worker: _Worker, step: SendActivation | SendGradient) -> bool:
        gradient = isinstance(step, SendGradient)
        message = (step.peer, gradient, step.pipeline, step.microbatch, worker.id)
        if self._blocking:
            if message in self._taken:
                worker.clock_s = self._taken.pop(message)
                return True
            self._offers.setdefault(message, worker.clock_s)
            return False
        self._arrivals[message] = worker.clock_s + self._message_s(worker.id, step)
        return True

    def _receive(self, worker: _Worker, step: ReceiveActivation | ReceiveGradient) -> bool:
        gradient = isinstance(step, ReceiveGradient)
        message = (worker.id, gradient, step.pipeline, step.microbatch, step.peer)
        if self._blocking and message in self._offers:
            begun_s = max(self._offers.pop(message), worker.clock_s)
            self._arrivals[message] = begun_s + self._message_s(worker.id, step)
            self._taken[message] = self._arrivals[message]
        if message not in self._arrivals:
            return False
        worker.clock_s = max(worker.clock_s, self._arrivals.pop(message))
        return True

    def _message_s(
        self,
        worker: WorkerId,
        step: SendActivation | SendGradient | ReceiveActivation | ReceiveGradient,
    ) -> float:
        """Both directions carry the output of the stage before the cut (or its gradient)."""
        before = isinstance(step, ReceiveActivation | SendGradient)
        stages = self._plan.pipelines[step.pipeline].stages
        cut = stages[step.stage - before].last_layer
        return message_s(
            self._profile.layers[cut].output_bytes,
            same_node=worker.node == step.peer.node,
            links=self._profile.links,
        )

    # ---- all owners of a bucket, all workers

    def _sum(self) -> bool:
        """End every gradient sum that is next for all its owners."""
        progress = False
        for worker in self._workers.values():
            if worker.summed == len(worker.started):
                continue
            bucket = worker.started[worker.summed][0]
            step = next(
                s for s in worker.program if isinstance(s, SyncGradient) and s.bucket == bucket
            )
            owners = [self._workers[owner] for owner in step.owners if owner in self._workers]
            if len(owners) < len(step.owners) or any(
                owner.summed == len(owner.started) or owner.started[owner.summed][0] != bucket
                for owner in owners
            ):
                continue
            begun_s = max(max(o.summed_s, o.started[o.summed][1]) for o in owners)
            for owner in owners:
                owner.summed += 1
                owner.summed_s = begun_s + self._sum_s(step)
            progress = True
        return progress

    def _sum_s(self, step: SyncGradient) -> float:
        # A tied part is booked with its layer's own one: the profile does not tell them apart.
        layers = {part.layer for part in step.parts if part.part == "own"}
        return all_reduce_s(
            sum(self._profile.layers[layer].parameter_bytes for layer in layers),
            workers=len(step.owners),
            same_node=len({owner.node for owner in step.owners}) == 1,
            links=self._profile.links,
        )

    def _vote(self) -> bool:
        """Let all workers pass the vote once all of them stand there with their sums done."""
        workers = self._workers.values()
        if not all(isinstance(w.next, Vote) and w.summed == len(w.started) for w in workers):
            return False
        begun_s = max(max(worker.clock_s, worker.summed_s) for worker in workers)
        for worker in workers:
            worker.position += 1
            worker.clock_s = begun_s + all_reduce_s(
                _VOTE_BYTES, workers=len(workers), same_node=False, links=self._profile.links
            )
        return True

    def _describe(self, worker: _Worker) -> str:
        step = worker.next
        assert step is not None
        words = f"{worker.id} waits at {format_instruction(step)}"
        match step:
            case SendActivation() | SendGradient() | ReceiveActivation() | ReceiveGradient():
                return f"{words} for {step.peer}"
            case Vote() if worker.summed < len(worker.started):
                bucket = worker.started[worker.summed][0]
                return f"{words} for the sum of bucket {bucket}"
            case Vote():
                absent = [str(w.id) for w in self._workers.values() if not isinstance(w.next, Vote)]
                return f"{words} for {', '.join(absent) or 'the sums of others'}"
            case _:
                return words
