"""Trials of communicators that are made and ended by a worker's own code: one process's, and those
of two processes.

Each function is one member's part. Must not know processes: a board carries what members say to
each other.
"""

import gc
import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, AllToAllOptions, Work

from oobleck.core.job.spec import JobSpec
from oobleck.planner.profile.memory import GROUP_CTAS, LINK_CTAS
from oobleck.worker.doctor import tokens
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.step.stage import StageRunner
from oobleck.worker.transport.nccl.group import Aborts, GroupMaker, Identifiers, ProcessGroup

Kind = Literal["send", "receive", "sum"]
#: Operations under way at once, from the first process's side.
_PENDING: tuple[Kind, ...] = ("receive", "send", "sum") * 2
#: Time-out of the abort of operations with a lost peer, whose network does not answer.
_ABORTED_S = 20.0
_DONE_S = 30.0
#: Polling as in the transport: for so long without a pause, then with this one.
_EAGER_S, _PAUSE_S = 0.0005, 0.0001
_PINGS, _RATED = 200, 8
#: Time-outs for pending operations to show that their peer is gone, and for groups to end.
_NOTICED_S, _RELEASED_S = 2.0, 10.0
RECOVERIES = 20
#: Number of groups: those of a worker in a large plan.
GROUPS = 20
STEPS = 20


class Board(Protocol):
    def tell(self, name: str, words: Mapping[str, bytes]) -> None: ...

    def hear(self, name: str) -> Mapping[str, bytes]:
        """Wait for a message."""


class Folder:
    """A board of files."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def tell(self, name: str, words: Mapping[str, bytes]) -> None:
        hidden = self._path / f".{name}"
        hidden.write_bytes(msgspec.msgpack.encode(dict(words)))
        hidden.rename(self._path / name)

    def hear(self, name: str) -> Mapping[str, bytes]:
        _until((self._path / name).exists, f"'{name}' is there")
        return msgspec.msgpack.decode((self._path / name).read_bytes(), type=dict[str, bytes])


@dataclass(frozen=True, slots=True)
class Member:
    """Member of a pair of processes."""

    rank: int
    place: torch.device
    maker: GroupMaker
    board: Board

    def connect(self, name: str, kind: Kind, most_ctas: int = 0) -> "Own":
        """Make a communicator of both. `kind`: what the process of rank 0 does with it;
        `most_ctas`: most multiprocessors of an operation, 0: as workers have it."""
        number = self.rank if kind != "receive" else 1 - self.rank
        ctas = most_ctas or (GROUP_CTAS if kind == "sum" else LINK_CTAS)
        if number == 0:
            identifiers = Identifiers()
            group = self.maker.make(identifiers, 0, 2, ctas)
            group.eager_connect_single_device(self.place)
            self.board.tell(name, identifiers.written)
        else:
            group = self.maker.make(Identifiers(self.board.hear(name)), 1, 2, ctas)
            group.eager_connect_single_device(self.place)
        part: Kind = "sum" if kind == "sum" else "send" if number == 0 else "receive"
        return Own(group, part)

    def meet(self, name: str, words: Mapping[str, bytes] | None = None) -> Mapping[str, bytes]:
        """Wait for the other member; return its words."""
        self.board.tell(f"{name}-{self.rank}", words or {})
        return self.board.hear(f"{name}-{1 - self.rank}")

    def numbers(self, size: int) -> Tensor:
        return torch.ones(size, device=self.place)

    def free(self) -> int:
        """Return the free bytes of the device."""
        if self.place.type != "cuda":
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.place)[0]


@dataclass(frozen=True, slots=True)
class Own:
    """A communicator, and this member's part in it."""

    group: ProcessGroup
    part: Kind

    def launch(self, numbers: Tensor) -> Work:
        if self.part == "sum":
            return self.group.allreduce([numbers], AllreduceOptions())
        if self.part == "send":
            return self.group.send([numbers], 1, 0)
        return self.group.recv([numbers], 0, 0)

    def run(self, numbers: Tensor) -> None:
        done(self.launch(numbers))


def done(work: Work) -> None:
    """Wait, as a worker does."""
    _until(work.is_completed, "an operation ends")
    if (error := work.exception()) is not None:
        raise error


def _until(condition: Callable[[], bool], words: str) -> None:
    began = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began
        if waited_s > _DONE_S:
            raise TimeoutError(f"waited {_DONE_S:g} s until {words}")
        if waited_s > _EAGER_S:
            time.sleep(_PAUSE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Speeds of two members' messages."""

    latency_s: float
    bytes_per_s: float


def measure(member: Member, *, size: int) -> Speeds:
    """Measure messages. `size`: numbers of a large one."""
    to, back = member.connect("to", "send"), member.connect("back", "receive")
    small, large = member.numbers(64), member.numbers(size)
    for each in (to, back):
        each.run(small)
    began = time.perf_counter()
    for _ in range(_PINGS):
        to.run(small)
        back.run(small)
    latency_s = (time.perf_counter() - began) / (2 * _PINGS)
    began = time.perf_counter()
    for work in [to.launch(large) for _ in range(_RATED)]:
        done(work)
    back.run(small)
    rate = _RATED * large.nbytes / (time.perf_counter() - began)
    end(member.place, [to.group, back.group])
    return Speeds(latency_s=latency_s, bytes_per_s=rate)


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """End of operations whose peer is gone."""

    #: Operations that show it before an abort, and seconds until the last of them does.
    noticed: int
    noticed_s: float
    abort_s: float
    #: Seconds of the groups' destructors; None: longer than they may take.
    released_s: float | None


def give_up(
    member: Member,
    leave: Callable[[], None] | None,
    gone: Callable[[], None] | None,
    *,
    size: int,
    notice_s: float = _NOTICED_S,
) -> Ended | None:
    """Launch six operations, lose the peer, abort and drop the groups; None for the second process.

    `size`: numbers of an operation; `notice_s`: longest wait for the operations to show the loss.
    `leave`: ends the second process; `gone`: returns to the first one once it has ended. None: the
    second one aborts them, too, and says so."""
    own = [member.connect(f"{kind}-{number}", kind) for number, kind in enumerate(_PENDING)]
    groups = [each.group for each in own]
    for each in own:
        each.run(member.numbers(64))
    if member.rank == 1:
        member.board.hear("pending")
        if leave is None:
            end(member.place, groups)
            member.board.tell("aborted", {})
        else:
            leave()
        return None
    works = [each.launch(member.numbers(size)) for each in own]
    member.board.tell("pending", {})
    if gone is None:
        member.board.hear("aborted")
    else:
        gone()
    shown, shown_s = noticed(works, notice_s)
    began = time.monotonic()
    end(member.place, groups)
    assert computes(member.place), "the device computes no more"
    abort_s = time.monotonic() - began
    del each, own
    return Ended(
        noticed=shown,
        noticed_s=shown_s,
        abort_s=abort_s,
        released_s=_released_s(works, groups),
    )


def noticed(works: Sequence[Work], limit_s: float) -> tuple[int, float]:
    """Return how many operations end within a time, and when the last of them does."""
    began = time.monotonic()
    found: dict[int, float] = {}
    while len(found) < len(works) and (now := time.monotonic() - began) < limit_s:
        for number, work in enumerate(works):
            if number not in found and work.is_completed():
                found[number] = now
        time.sleep(_PAUSE_S)
    return len(found), max(found.values(), default=0.0)


def _released_s(works: list[Work], groups: list[ProcessGroup]) -> float | None:
    """Drop operations and groups; return the seconds, None: more than `_RELEASED_S`. A group's
    destructor joins threads of torch's, which may sleep."""

    def release() -> None:
        works.clear()
        groups.clear()
        gc.collect()

    began = time.monotonic()
    thread = threading.Thread(target=release, name="release", daemon=True)
    thread.start()
    thread.join(_RELEASED_S)
    return None if thread.is_alive() else time.monotonic() - began


def end(place: torch.device, groups: list[ProcessGroup]) -> None:
    """Abort all at once. Raises HelperLost if an abort does not end."""
    aborts = Aborts(place, _ABORTED_S)
    aborts.begin(groups)
    aborts.settle(lambda: None)


def computes(place: torch.device) -> bool:
    return float(torch.ones(8, 8, device=place).sum()) == 64.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Memory and threads left behind many recoveries, beyond those of the first one."""

    bytes: int
    threads: int


def recover_again(member: Member, free: Callable[[], int]) -> Left:
    """Connect, lose a message, abort, again and again. `free`: bytes of the device."""
    before, threads = 0, 0
    for number in range(RECOVERIES):
        kinds: tuple[Kind, ...] = ("receive", "send", "sum")
        own = [member.connect(f"{number}-{kind}", kind) for kind in kinds]
        for each in own:
            each.run(member.numbers(64))
        if member.rank == 0:
            own[0].launch(member.numbers(64))  # which nobody sends
        end(member.place, [each.group for each in own])
        member.meet(f"{number}-ended")
        del each, own
        if not number:
            before, threads = free(), _threads()
    assert computes(member.place), "the device computes no more"
    return Left(bytes=max(0, before - free()), threads=max(0, _threads() - threads))


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """Time and memory that groups took, and what is left after their end."""

    connect_s: float
    abort_s: float
    taken_bytes: int
    left_bytes: int
    left_threads: int
    #: All results were right, before the end and after it.
    right: bool


def use(
    connect: Callable[[str], ProcessGroup],
    operate: Callable[[ProcessGroup], bool],
    place: torch.device,
    free: Callable[[], int],
) -> Used:
    """Connect many groups at once, use each, abort all at once. `operate`: uses one and returns
    whether the result is right; `free`: bytes of the device. Raises HelperLost."""
    first = connect("first")  # NCCL and torch have threads of their own from the first one on
    right = operate(first)
    end(place, [first])
    del first
    threads, before = _threads(), free()
    began = time.monotonic()
    made = [connect(f"many-{number}") for number in range(GROUPS)]
    right = right and all(operate(group) for group in made)
    connect_s, taken = time.monotonic() - began, before - free()
    began = time.monotonic()
    end(place, made)
    del made
    abort_s = time.monotonic() - began
    right = right and computes(place)
    until = time.monotonic() + 1.0
    while _threads() > threads and time.monotonic() < until:
        time.sleep(_PAUSE_S)
    return Used(
        connect_s=connect_s,
        abort_s=abort_s,
        taken_bytes=max(0, taken),
        left_bytes=max(0, before - free()),
        left_threads=max(0, _threads() - threads),
        right=right,
    )


def use_alone(maker: GroupMaker, place: torch.device, free: Callable[[], int]) -> Used:
    """Use groups of this process alone, which exchange with themselves: a sum of one launches no
    kernel."""

    def connect(name: str) -> ProcessGroup:
        group = maker.make(Identifiers(), 0, 1, GROUP_CTAS)
        group.eager_connect_single_device(place)
        return group

    def exchange(group: ProcessGroup) -> bool:
        sent, got = torch.ones(1 << 10, device=place), torch.zeros(1 << 10, device=place)
        done(group.alltoall([got], [sent], AllToAllOptions()))
        return bool((got == sent).all())

    return use(connect, exchange, place, free)


def use_together(member: Member) -> Used:
    """Use groups of both members, each for a sum."""

    def total(group: ProcessGroup) -> bool:
        numbers = member.numbers(64)
        done(group.allreduce([numbers], AllreduceOptions()))
        return bool((numbers == 2).all())

    return use(lambda name: member.connect(name, "sum").group, total, member.place, member.free)


def train_alike(member: Member, job: JobSpec) -> list[int]:
    """Train a replica on samples of its own, and sum gradients with the other one. Return the
    layers whose weights or moments differ at the end."""
    place, rank = member.place, member.rank
    state = ModelState(job, place)
    layers = range(job.model.layer_count)
    for layer in layers:
        state.initialise(layer)
    stage = StageRunner(state, layers, job, place)
    sums = member.connect("sums", "sum")
    draws = torch.Generator().manual_seed(rank)
    rows = job.training.microbatch
    positions = tuple(range(rank * rows, (rank + 1) * rows))
    for step in range(1, STEPS + 1):
        state.zero_gradients()
        x, targets = (tokens(job, draws) for _ in range(2))
        stage.forward(0, x, RowKeys(seed=0, step=step, positions=positions), targets)
        stage.backward(0)
        for layer in layers:
            sums.run(state.layers[layer].gradient)
        state.apply(step, scale=0.5)
    own = {
        str(layer): hashlib.sha256(state.snapshot(layer).numpy().data.cast("B")).digest()
        for layer in layers
    }
    other = member.meet("digests", own)
    end(place, [sums.group])
    return [layer for layer in layers if own[str(layer)] != other[str(layer)]]


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))
