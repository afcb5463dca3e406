"""Groups of one process on one GPU, as workers make and end theirs: the first look at NCCL where
there is one GPU alone."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import AllreduceOptions

from oobleck.core.finding import Finding
from oobleck.core.units import format_bytes
from oobleck.planner.profile.memory import GROUP_CTAS
from oobleck.worker.runtime.device import nccl_version
from oobleck.worker.transport.nccl.aborts import Aborts
from oobleck.worker.transport.nccl.group import GroupMaker, Identifiers, NcclMaker

#: As many as workers of a large plan are in.
GROUPS = 20
_ENDED_S = 20.0
_POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """Time and memory that groups took, and what is still there after their end."""

    connect_s: float
    abort_s: float
    taken_bytes: int
    left_bytes: int
    left_threads: int
    #: All sums were right, before the end and behind it.
    right: bool


def lone(devices: Sequence[str]) -> Iterator[Finding]:
    """Check that many groups of this process alone connect, sum, are aborted at once, and leave
    nothing."""
    place = torch.device(devices[0])
    torch.cuda.set_device(place)
    if not nccl_version():
        yield Finding(check="lone", level="pass", what="torch has no NCCL: not tried")
        return
    free = lambda: torch.cuda.mem_get_info(place)[0]  # noqa: E731  # it is said once
    yield of_lone(use(NcclMaker(place), place, free))


def use(
    maker: GroupMaker, place: torch.device, free: Callable[[], int], groups: int = GROUPS
) -> Used:
    """`free`: bytes of the device. Raises HelperLost where an abort does not end."""
    _once(maker, place)  # NCCL and torch have threads of their own from the first one on
    threads, before = _threads(), free()
    began = time.monotonic()
    made = [maker.make(Identifiers(), 0, 1, GROUP_CTAS) for _ in range(groups)]
    for group in made:
        group.eager_connect_single_device(place)
    ones = [torch.ones(1 << 20, device=place) for _ in made]
    for group, one in zip(made, ones, strict=True):
        group.allreduce([one], AllreduceOptions()).wait()
    right = all(float(one.sum()) == one.numel() for one in ones)
    connect_s, taken = time.monotonic() - began, before - free()
    began = time.monotonic()
    aborts = Aborts(place, _ENDED_S)
    aborts.begin(made)
    del group, made
    aborts.settle(lambda: None)
    abort_s = time.monotonic() - began
    right = right and float(torch.ones(8, 8, device=place).sum()) == 64.0
    del one, ones
    if place.type == "cuda":
        torch.cuda.empty_cache()
    _until(lambda: _threads() <= threads)
    return Used(
        connect_s=connect_s,
        abort_s=abort_s,
        taken_bytes=max(0, taken),
        left_bytes=max(0, before - free()),
        left_threads=max(0, _threads() - threads),
        right=right,
    )


def _once(maker: GroupMaker, place: torch.device) -> None:
    group = maker.make(Identifiers(), 0, 1, GROUP_CTAS)
    group.eager_connect_single_device(place)
    one = torch.ones(8, device=place)
    group.allreduce([one], AllreduceOptions()).wait()
    assert float(one.sum()) == one.numel(), "the sum is wrong"
    group.abort()


def _until(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 1.0
    while not done() and time.monotonic() < until:
        time.sleep(_POLL_S)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def of_lone(used: Used) -> Finding:
    what = (
        f"{GROUPS} groups of one connect in {used.connect_s:.1f} s and are aborted in "
        f"{used.abort_s:.2f} s"
    )
    if not used.right:
        fix = "sums or the GPU are not usable with this NCCL: see NCCL_DEBUG=INFO"
        return Finding(check="lone", level="fail", what=f"{what}, and err", fix=fix)
    if used.left_bytes > used.taken_bytes // 2 or used.left_threads > GROUPS // 2:
        what += (
            f", but {format_bytes(used.left_bytes)} of {format_bytes(used.taken_bytes)} and "
            f"{used.left_threads} threads stay"
        )
        fix = "every loss would leave as much: update NCCL and the driver"
        return Finding(check="lone", level="fail", what=what, fix=fix)
    return Finding(check="lone", level="pass", what=f"{what}, and leave nothing")
