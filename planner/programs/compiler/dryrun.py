"""A dry run of all programs of a plan: proof that they do not deadlock.

Each worker runs its program until it must wait, and is woken by the event that it waits for. So a
run takes time proportional to the number of instructions.

The result does not depend on the order in which workers run. A worker's next instruction depends on
its own program alone, and a message or a sum that has arrived stays. Must not know times
(`oobleck.planner.cost.replay` has them), nor how programs are made.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from oobleck.core.errors import ProgramDeadlock
from oobleck.core.ids import WorkerId
from oobleck.core.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Content,
    Forward,
    Instruction,
    Message,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    SyncGradient,
    Visit,
    Vote,
)
from oobleck.core.plan import Plan
from oobleck.planner.programs.text import format_instruction

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
