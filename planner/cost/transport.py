"""The workers of a dry run and the messages between them: who waits for what, when it has arrived.

Owns the ways that messages pass: sends that end at once, or only when they are received. Must not
know what compute, sums and votes take.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from oobleck.planner.ids import WorkerId
from oobleck.planner.profile.links import message_s
from oobleck.planner.profile.profile import Profile
from oobleck.planner.programs.instructions import (
    Instruction,
    LoadTokens,
    Message,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    SyncGradient,
)
from oobleck.planner.programs.plan import Plan

SENDS = (SendActivation, SendGradient)
RECEIVES = (ReceiveActivation, ReceiveGradient)

#: Receiver, sender, whether it is a gradient, pipeline, micro-batch, rows; in plain words, which
#: hash faster.
Key = tuple[str, int, str, int, bool, int, int, int, int, int]


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One worker of a dry run: where it stands in its program, and on its clock."""

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
    pending: set[Key] = field(default_factory=set)
    exchanged_s: float = 0.0

    @property
    def next(self) -> Instruction | None:
        return self.program[self.position] if self.position < len(self.program) else None


class Transport:
    """Runs the worker's next message; False: it must wait, and goes to `wake` when it is over."""

    def __init__(self, profile: Profile, plan: Plan, wake: Callable[[Worker], None]) -> None:
        self._profile, self._plan, self._wake = profile, plan, wake
        self._arrivals: dict[Key, float] = {}
        self._waiting: dict[Key, Worker] = {}
        #: With blocking sends: who has posted a message first, and when.
        self._posted: dict[tuple[Key, bool], tuple[Worker, float]] = {}
        self._message_times: dict[tuple[int, int, bool, int, int, int], float] = {}

    def send(self, worker: Worker, step: Message) -> bool:
        key = message_key(worker.id, step)
        self._arrivals[key] = worker.clock_s + self._message_s(worker.id, step)
        if key in self._waiting:
            self._wake(self._waiting.pop(key))
        return True

    def receive(self, worker: Worker, step: Message) -> bool:
        key = message_key(worker.id, step)
        arrived_s = self._arrivals.pop(key, None)
        if arrived_s is None:
            self._waiting[key] = worker
            return False
        worker.clock_s = max(worker.clock_s, arrived_s)
        return True

    def exchange(self, worker: Worker, first: Message) -> bool:
        """Post the exchange that the worker stands before, and go on once all of it has passed."""
        steps = [first]
        last, receiving = worker.position, isinstance(first, RECEIVES)
        for position in range(worker.position + 1, len(worker.program)):
            following = worker.program[position]
            if isinstance(following, LoadTokens):
                continue
            receiving = receiving or isinstance(following, RECEIVES)
            if not isinstance(following, RECEIVES if receiving else SENDS):
                break
            steps.append(following)
            last = position
        worker.position = last
        worker.exchanged_s = worker.clock_s
        worker.pending = {message_key(worker.id, step) for step in steps}
        for step in steps:
            key, sends = message_key(worker.id, step), isinstance(step, SENDS)
            if (key, not sends) not in self._posted:
                self._posted[key, sends] = (worker, worker.clock_s)
                continue
            peer, posted_s = self._posted.pop((key, not sends))
            passed_s = max(posted_s, worker.clock_s) + self._message_s(worker.id, step)
            for side in (worker, peer):
                side.exchanged_s = max(side.exchanged_s, passed_s)
                side.pending.discard(key)
            if not peer.pending:
                self._wake(peer)
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


def message_key(worker: WorkerId, step: Message) -> Key:
    if isinstance(step, SENDS):
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
