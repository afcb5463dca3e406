"""Checks of two GPUs by what a worker's own communicators do: messages, the ways in which a peer
goes, and what many recoveries leave behind."""

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from oobleck.core.finding import Finding
from oobleck.core.units import format_bytes
from oobleck.planner.profile.machine import GPUS, machine_of
from oobleck.worker.doctor.communicators import (
    RECOVERIES,
    Folder,
    Member,
    Speeds,
    give_up,
    measure,
    recover_again,
)
from oobleck.worker.doctor.pair import Task, pair
from oobleck.worker.transport.nccl.group import NcclMaker

Way = Literal["killed", "stopped", "aborts"]
WAYS: tuple[Way, ...] = ("killed", "stopped", "aborts")
_PEERS: Mapping[Way, str] = {
    "killed": "that is killed",
    "stopped": "that is stopped, as by a network that is silent,",
    "aborts": "that aborts",
}
#: Numbers: a message of 64 MiB, and what no buffer of NCCL's takes.
_LARGE = 1 << 24
_WIDTH = 8192
#: A worker's control loop is not to wait longer than that for a loss.
_ABORT_S = 2.0
_LATENCY_S = 200e-6
_SLOWDOWN = 1.15
_LEAST_RATE = 0.3
_LEFT_BYTES = 64 << 20
_POLL_S = 0.001


def messages(devices: Sequence[str]) -> Iterator[Finding]:
    """Measure how long a small message takes, how fast a large one is, and how far a receive that
    waits slows computation."""
    words, codes = pair("messages", devices)
    if codes != [0, 0]:
        yield _failed("messages", f"two communicators do not work: {words or 'they hang'}")
        return
    latency_s, rate, slowdown = map(float, words.split())
    name = torch.cuda.get_device_name(devices[0]) if devices[0] != "cpu" else "cpu"
    yield of_messages(name, Speeds(latency_s=latency_s, bytes_per_s=rate, slowdown=slowdown))


def of_messages(name: str, found: Speeds) -> Finding:
    """`name`: of the boards."""
    machine = machine_of(f"cuda {name}")
    what = (
        f"a small message takes {found.latency_s * 1e6:.0f} us, a large one goes at "
        f"{found.bytes_per_s / 1e9:.3g} GB/s; while a receive waits, products take "
        f"{found.slowdown:.2f} of their time"
    )
    if machine.name in GPUS and found.bytes_per_s < _LEAST_RATE * machine.intra_node_bytes_per_s:
        fix = "see the check peers, and NCCL_DEBUG=INFO for the way that NCCL takes"
    elif found.latency_s > _LATENCY_S:
        fix = "look at CPU affinity and power saving of the host, and at NCCL_DEBUG=INFO"
    elif found.slowdown > _SLOWDOWN:
        fix = "receives hold more multiprocessors than 4: look at NCCL_MAX_CTAS and the like"
    else:
        return Finding(check="messages", level="pass", what=what)
    return Finding(check="messages", level="slow", what=what, fix=fix)


def ends(devices: Sequence[str]) -> Iterator[Finding]:
    """Check that six operations at once are given up in whichever way their peer goes."""
    for way in WAYS:
        words, codes = pair(f"ends-{way}", devices)
        yield of_end(way, words, ended=codes[0] == 0)
        if codes[0] != 0:
            return  # each of the others may take as long


def of_end(way: Way, words: str, *, ended: bool) -> Finding:
    """`words`: seconds, or what was said at last."""
    peer = _PEERS[way]
    if not ended:
        what = f"sends, receives and sums with a peer {peer} cannot be given up: {words or 'hang'}"
        fix = "update the driver and NCCL; until then a job recovers with transport: tcp"
        return Finding(check="ends", level="fail", what=what, fix=fix)
    what = f"six sends, receives and sums with a peer {peer} are given up in {float(words):.2f} s"
    if float(words) > _ABORT_S:
        fix = "every recovery waits for that: update the driver and NCCL"
        return Finding(check="ends", level="slow", what=what, fix=fix)
    return Finding(check="ends", level="pass", what=what)


def recoveries(devices: Sequence[str]) -> Iterator[Finding]:
    """Check that recoveries leave nothing behind."""
    words, codes = pair("recoveries", devices)
    if codes != [0, 0]:
        yield _failed("recoveries", f"{RECOVERIES} recoveries fail: {words or 'they hang'}")
        return
    left, threads = map(int, words.split())
    yield of_recoveries(left, threads)


def of_recoveries(left: int, threads: int) -> Finding:
    """`left`: bytes of a GPU beyond what the first one has left."""
    if left > _LEFT_BYTES or threads >= RECOVERIES:
        what = f"{RECOVERIES} recoveries leave {format_bytes(left)} and {threads} threads behind"
        fix = "a job would run out of memory in the end: update NCCL and the driver"
        return Finding(check="recoveries", level="fail", what=what, fix=fix)
    what = f"{RECOVERIES} recoveries leave nothing behind"
    return Finding(check="recoveries", level="pass", what=what)


def _failed(check: str, what: str) -> Finding:
    fix = "see NCCL_DEBUG=INFO, and what the checks sums and groups say"
    return Finding(check=check, level="fail", what=what, fix=fix)


# ---- of two processes


def _member(place: torch.device, rank: int, folder: Path) -> Member:
    return Member(rank, place, NcclMaker(place), Folder(folder))


def exchange(place: torch.device, rank: int, folder: Path, connect_s: float) -> str:
    found = measure(_member(place, rank, folder), size=_LARGE, width=_WIDTH)
    return f"{found.latency_s} {found.bytes_per_s} {found.slowdown}"


def lose_peer(way: Way, place: torch.device, rank: int, folder: Path, connect_s: float) -> str:
    member = _member(place, rank, folder)
    board = member.board
    if way == "aborts":
        return str(give_up(member, None, None, size=_LARGE))
    if rank == 1:
        board.tell("pid", {"pid": str(os.getpid()).encode()})
    signum = signal.SIGKILL if way == "killed" else signal.SIGSTOP
    leave = partial(os.kill, os.getpid(), signum)
    return str(give_up(member, leave, lambda: _until_gone(board.hear("pid")), size=_LARGE))


def _until_gone(told: Mapping[str, bytes]) -> None:
    while not is_gone(int(told["pid"])):
        time.sleep(_POLL_S)


def is_gone(pid: int) -> bool:
    """Return whether process `pid` does nothing any more: it has ended, or is stopped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return True
    return state in "TZX"


def recover(place: torch.device, rank: int, folder: Path, connect_s: float) -> str:
    def free() -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(place)[0]

    left = recover_again(_member(place, rank, folder), free)
    return f"{left.bytes} {left.threads}"


TASKS: dict[str, Task] = {
    "messages": exchange,
    **{f"ends-{way}": partial(lose_peer, way) for way in WAYS},
    "recoveries": recover,
}
