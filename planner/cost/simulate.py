"""A dry run of all programs of a plan: proof that nobody waits forever, and what a step takes.

Each worker interprets its program on its own clock; messages and sums take what
`oobleck.planner.cost.formula` says, messages without getting in each other's way. Gradient sums run
side by side, each from when its last owner has come to it; what a worker sums passes its link one
after the other, as it becomes ready. The workers of a stage compute in step: each waits for the
last of them. Must not know how programs came about.

Driven by events: a worker runs until it must wait, and is woken by what it waits for, so a run
takes time proportional to the number of instructions.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from oobleck.planner.cost.formula import in_turn, vote_s
from oobleck.planner.cost.stepcost import StageCost, SumCost, stage_cost
from oobleck.planner.cost.transport import RECEIVES, SENDS, Transport, Worker, message_key
from oobleck.planner.errors import ProgramDeadlock
from oobleck.planner.ids import WorkerId
from oobleck.planner.profile.profile import Profile
from oobleck.planner.programs.instructions import (
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
    SyncGradient,
    Vote,
)
from oobleck.planner.programs.plan import Plan
from oobleck.planner.programs.text import format_instruction

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
        self._profile, self._plan = profile, plan
        self._observe = observe
        self._workers = {w: Worker(id=w, program=p) for w, p in sorted(programs.items())}
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
        self._ready_to_sum: dict[int, list[Worker]] = defaultdict(list)
        self._runnable = deque(self._workers.values())
        transport = Transport(profile, plan, self._runnable.append)
        # Each runs one instruction, or says that the worker must wait before it.
        self._do: Mapping[type[Instruction], Callable[[Worker, Any], bool]] = {
            LoadTokens: self._load,
            **dict.fromkeys(_COMPUTE, self._compute),
            **dict.fromkeys(SENDS, transport.exchange if blocking else transport.send),
            **dict.fromkeys(RECEIVES, transport.exchange if blocking else transport.receive),
            SyncGradient: self._start_sum,
            Vote: self._await_vote,
            OptimizerStep: self._update,
        }
        #: Workers of a stage that have come to a piece of compute.
        self._gathered: dict[tuple[int, int, int, type[Compute]], list[Worker]] = defaultdict(list)
        self._costs: dict[tuple[int, int], StageCost] = {}

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
                worker.id: self._cost(*self._stage_of[worker.id]).worker_bytes(
                    worker.peak_kept, replicas=len(self._plan.pipelines)
                )
                for worker in workers
            },
        )

    # ---- one worker

    def _advance(self, worker: Worker) -> None:
        """Run the worker's program on until it must wait, or to its end."""
        program = worker.program
        while worker.position < len(program):
            step = program[worker.position]
            if not self._do[type(step)](worker, step):
                return
            worker.position += 1

    def _load(self, worker: Worker, step: LoadTokens) -> bool:
        return True

    def _start_sum(self, worker: Worker, step: SyncGradient) -> bool:
        worker.started.append((step, worker.clock_s))
        if worker.summed == len(worker.started) - 1:
            self._sum(worker)
        return True

    def _await_vote(self, worker: Worker, step: Vote) -> bool:
        return False

    def _cost(self, pipeline: int, stage: int) -> StageCost:
        cost = self._costs.get((pipeline, stage))
        if cost is None:
            place = self._plan.pipelines[pipeline].stages[stage]
            cost = stage_cost(
                self._profile,
                place.first_layer,
                place.last_layer,
                len(place.workers),
                resident=place.resident,
            )
            self._costs[pipeline, stage] = cost
        return cost

    def _compute(self, worker: Worker, step: Compute) -> bool:
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

    def _occupy(self, worker: Worker, step: Compute, cost: StageCost) -> None:
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

    def _update(self, worker: Worker, step: OptimizerStep) -> bool:
        taken_s = self._cost(*self._stage_of[worker.id]).update_s
        worker.clock_s += taken_s
        worker.busy_s += taken_s
        return True

    # ---- all owners of a bucket, all workers

    def _sum(self, worker: Worker) -> None:
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

    def _describe(self, worker: Worker) -> str:
        step = worker.next
        if worker.pending:
            # Of an exchange, name a message that has not passed.
            step = next(
                s
                for s in reversed(worker.program[: worker.position + 1])
                if isinstance(s, Message) and message_key(worker.id, s) in worker.pending
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
