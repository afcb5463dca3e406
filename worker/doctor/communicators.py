"""Trials of two workers' communicators, made and ended by a worker's own code: how fast messages
are, what a receive that waits costs, how six operations are given up when the peer goes, and what
is left behind after many recoveries.

Each function is one member's part. Must not know processes: a board carries what members tell each
other.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, Work

from oobleck.planner.profile.memory import GROUP_CTAS, LINK_CTAS
from oobleck.worker.transport.nccl.aborts import Aborts
from oobleck.worker.transport.nccl.group import GroupMaker, Identifiers, ProcessGroup

Kind = Literal["send", "receive", "sum"]
#: From the first process's side; two of each are pending at once.
_PENDING: tuple[Kind, ...] = ("receive", "send", "sum") * 2
#: Of a lost peer, as of a network that does not answer.
_ABORTED_S = 20.0
_DONE_S = 30.0
#: As the transport waits.
_EAGER_S, _PAUSE_S = 0.0005, 0.0001
_PINGS, _RATED = 200, 8
RECOVERIES = 20


class Board(Protocol):
    def tell(self, name: str, words: Mapping[str, bytes]) -> None: ...

    def hear(self, name: str) -> Mapping[str, bytes]:
        """Once it is told."""


class Folder:
    """A board of files."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def tell(self, name: str, words: Mapping[str, bytes]) -> None:
        hidden = self._path / f".{name}"
        hidden.write_bytes(msgspec.msgpack.encode(dict(words)))
        hidden.rename(self._path / name)

    def hear(self, name: str) -> Mapping[str, bytes]:
        _until((self._path / name).exists, f"'{name}' is told")
        return msgspec.msgpack.decode((self._path / name).read_bytes(), type=dict[str, bytes])


@dataclass(frozen=True, slots=True)
class Member:
    """Member of a pair of processes."""

    rank: int
    place: torch.device
    maker: GroupMaker
    board: Board

    def connect(self, name: str, kind: Kind) -> "Own":
        """`kind`: what the process of rank 0 does with it."""
        number = self.rank if kind != "receive" else 1 - self.rank
        ctas = GROUP_CTAS if kind == "sum" else LINK_CTAS
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

    def numbers(self, size: int) -> Tensor:
        return torch.ones(size, device=self.place)

    def check_computes(self) -> None:
        assert float(self.numbers(64).sum()) == 64.0, "the device computes no more"


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


def _until(what: Callable[[], bool], words: str) -> None:
    began = time.monotonic()
    while not what():
        waited_s = time.monotonic() - began
        if waited_s > _DONE_S:
            raise TimeoutError(f"waited {_DONE_S:g} s until {words}")
        if waited_s > _EAGER_S:
            time.sleep(_PAUSE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    latency_s: float
    bytes_per_s: float
    #: By which a product takes longer while a receive waits for its message.
    slowdown: float


def measure(member: Member, *, size: int, width: int) -> Speeds:
    """`size`: numbers of a large message; `width`: of the product."""
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
    slowdown = 1.0
    if member.rank == 0:
        alone_s = _product_s(member.place, width)
        pending = back.launch(small)
        slowdown = _product_s(member.place, width) / alone_s
        member.board.tell("computed", {})
        done(pending)
    else:
        member.board.hear("computed")
        back.run(small)
    _end(member, [to, back])
    return Speeds(latency_s=latency_s, bytes_per_s=rate, slowdown=slowdown)


def _product_s(place: torch.device, width: int) -> float:
    """Return the seconds of the fastest of some products: others may compute too."""
    one = torch.ones(width, width, device=place, dtype=torch.bfloat16)
    taken = []
    for _ in range(6):
        began = time.perf_counter()
        other = one @ one
        float(other[0, 0])  # waits for this stream alone
        taken.append(time.perf_counter() - began)
    return min(taken)


def give_up(
    member: Member,
    leave: Callable[[], None] | None,
    gone: Callable[[], None] | None,
    *,
    size: int,
) -> float:
    """The first process has six operations of `size` numbers under way when the second one goes:
    seconds until all are aborted. `leave`: what the second one does; `gone`: returns to the first
    one once it has. None: the second one aborts them, too, and says so."""
    own = [member.connect(f"{kind}-{number}", kind) for number, kind in enumerate(_PENDING)]
    for each in own:
        each.run(member.numbers(64))
    if member.rank == 1:
        member.board.hear("pending")
        if leave is None:
            _end(member, own)
            member.board.tell("aborted", {})
        else:
            leave()
        return 0.0
    for each in own:
        each.launch(member.numbers(size))
    member.board.tell("pending", {})
    if gone is None:
        member.board.hear("aborted")
    else:
        gone()
    began = time.monotonic()
    _end(member, own)
    member.check_computes()
    return time.monotonic() - began


def _end(member: Member, own: list[Own]) -> None:
    """Raises HelperLost where one does not end."""
    aborts = Aborts(member.place, _ABORTED_S)
    aborts.begin([each.group for each in own])
    aborts.settle(lambda: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Memory and threads left behind many recoveries, beyond what the first one has left."""

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
        _end(member, own)
        member.board.tell(f"{number}-ended-{member.rank}", {})
        member.board.hear(f"{number}-ended-{1 - member.rank}")
        del each, own
        if not number:
            before, threads = free(), _threads()
    member.check_computes()
    return Left(bytes=max(0, before - free()), threads=max(0, _threads() - threads))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))
