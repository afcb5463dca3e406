"""Trials of launches: their time, alone and beside another thread's polls; an abort before they
begin; a receive's cost to computation; groups that NCCL refuses.

Each function is one member's part, as in `communicators`.
"""

import statistics
import threading
import time
from collections.abc import Callable, Mapping

import msgspec
import torch
from torch._C._distributed_c10d import AllToAllOptions

from bench.gpu.communicators import Member, Own, computes, done, end
from oobleck.planner.profile.memory import GROUP_CTAS
from oobleck.worker.transport.nccl.group import GroupMaker, Identifiers, judged

#: Most multiprocessors of a receive.
CTAS = (1, 2, 4, 8)
LAUNCHES = 200
#: Time in which a launched kernel begins for sure; no call reports it.
_BEGIN_S = 0.05
#: Pause of a thread between two polls.
_PAUSE_S = 0.0001


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """Launches of this process alone."""

    #: Host time of one launch.
    launch_s: float
    #: Duration of the abort of a group whose operation has not begun.
    abort_s: float


def launch_alone(maker: GroupMaker, place: torch.device, occupy: Callable[[], None]) -> Launched:
    """Launch exchanges of this process with itself, and abort one that has not begun. `occupy`:
    queues work that lasts longer than an abort may."""
    group = maker.make(Identifiers(), 0, 1, GROUP_CTAS)
    group.eager_connect_single_device(place)
    sent, got = (torch.ones(1, device=place) for _ in range(2))
    taken = []
    for _ in range(LAUNCHES):
        began = time.perf_counter()
        work = group.alltoall([got], [sent], AllToAllOptions())
        taken.append(time.perf_counter() - began)
        done(work)
    occupy()
    work = group.alltoall([got], [sent], AllToAllOptions())
    began = time.monotonic()
    end(place, [group])
    abort_s = time.monotonic() - began
    assert computes(place), "the device computes no more"
    return Launched(launch_s=statistics.median(taken), abort_s=abort_s)


class Polled(msgspec.Struct, frozen=True, kw_only=True):
    """Launches of one thread while another polls an operation of the same communicator."""

    launch_s: float
    polls: int


def launch_beside_polls(member: Member) -> Polled:
    """Launch receives while another thread polls the first one, both under one lock."""
    own, small = member.connect("polled", "receive"), member.numbers(64)
    own.run(small)
    polled = Polled(launch_s=0.0, polls=0)
    if member.rank == 0:
        polled = _launch_beside_polls(member, own)
    else:
        member.board.hear("launched")
        for _ in range(LAUNCHES):
            own.run(small)
    member.meet("received")
    end(member.place, [own.group])
    return polled


def _launch_beside_polls(member: Member, own: Own) -> Polled:
    lock, stop, polls = threading.Lock(), threading.Event(), 0
    small = member.numbers(64)
    works = [own.launch(small)]

    def poll() -> None:
        nonlocal polls
        while not stop.is_set():
            with lock:
                works[0].is_completed()
            polls += 1
            stop.wait(_PAUSE_S)

    thread = threading.Thread(target=poll, name="polls")
    thread.start()
    try:
        began = time.perf_counter()
        for _ in range(LAUNCHES - 1):
            with lock:
                works.append(own.launch(small))
        launch_s = (time.perf_counter() - began) / (LAUNCHES - 1)
    finally:
        stop.set()
        thread.join()
    member.board.tell("launched", {})
    for work in works:
        done(work)
    return Polled(launch_s=launch_s, polls=polls)


def slow_down(member: Member, width: int) -> Mapping[int, float]:
    """Return the time of a product while a receive waits, in parts of its time alone, by the most
    multiprocessors of the receive. Only the first member computes."""
    small, found = member.numbers(64), {}
    for most in CTAS:
        own = member.connect(f"ctas-{most}", "receive", most)
        own.run(small)
        found[most] = slowdown(member, own, width, f"computed-{most}")
        end(member.place, [own.group])
    return found


def slowdown(member: Member, own: Own, width: int, name: str) -> float:
    """Return the time of a product while a receive waits, in parts of its time alone; 1 for the
    second member, which sends once the first one has told it by `name`."""
    small = member.numbers(64)
    if member.rank == 1:
        member.board.hear(name)
        own.run(small)
        return 1.0
    alone_s = _product_s(member.place, width)
    pending = own.launch(small)
    time.sleep(_BEGIN_S)
    found = _product_s(member.place, width) / alone_s
    member.board.tell(name, {})
    done(pending)
    return found


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


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """End of a group that NCCL refuses."""

    #: First line of torch's error; empty: there was none.
    said: str
    #: Error that a worker makes of it.
    taken_for: str
    abort_s: float


def refuse(member: Member) -> Refused:
    """Use a group of two members on one GPU, which NCCL refuses."""
    said = taken_for = ""
    groups = []
    try:
        own = member.connect("refused", "sum")
        groups.append(own.group)
        own.run(member.numbers(64))
    except RuntimeError as error:
        said, taken_for = str(error).partition("\n")[0], type(judged(error)).__name__
    began = time.monotonic()
    end(member.place, groups)
    return Refused(said=said, taken_for=taken_for, abort_s=time.monotonic() - began)
