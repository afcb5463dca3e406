"""Checks of NCCL by what a worker's own communicators do: groups, launches, messages, lost peers,
what recoveries leave behind, replicas that stay equal."""

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import torch

from bench.gpu.communicators import (
    GROUPS,
    RECOVERIES,
    STEPS,
    Ended,
    Member,
    Speeds,
    Used,
    give_up,
    measure,
    recover_again,
    train_alike,
    use_alone,
    use_together,
)
from bench.gpu.engine import job_of
from bench.gpu.launches import (
    LAUNCHES,
    Launched,
    Polled,
    Refused,
    launch_alone,
    launch_beside_polls,
    refuse,
    slow_down,
)
from bench.gpu.pair import Task, is_shared, pair
from oobleck.core.orders import Finding
from oobleck.core.units import format_bytes
from oobleck.planner.profile.machine import GPUS, machine_of
from oobleck.planner.profile.memory import LINK_CTAS, sum_bytes
from oobleck.worker.runtime.device import board_name
from oobleck.worker.transport.nccl.group import NcclMaker

Way = Literal["killed", "stopped", "aborts"]
WAYS: Mapping[Way, str] = {
    "killed": "that is killed",
    "stopped": "that is stopped, as by a network that is silent,",
    "aborts": "that aborts",
}
#: Numbers of a message of 64 MiB, more than NCCL buffers.
_LARGE = 1 << 24
_WIDTH = 8192
#: The longest that a worker's control loop should wait for a loss.
_ABORT_S = 2.0
_LATENCY_S = 200e-6
_SLOWDOWN = 1.15
#: Least rate of a message over a link's few channels: 33 MB in a quarter of a stage's forward of 17
#: ms.
_LEAST_BYTES_PER_S = 8e9
_LEFT_BYTES = 64 << 20
#: Limit of a group's memory, relative to what plans count.
_MORE = 1.5
_CONNECT_S = 15.0
#: Limits of the time of groups' destructors, and of the host's time for a launch.
_RELEASE_S = 2.0
_LAUNCH_S = 200e-6
#: Cycles of a busy kernel, about two seconds.
_BUSY_CYCLES = 4_000_000_000
_POLL_S = 0.001
_SIX = "six sends, receives and sums with a peer"
_DEBUG = "see NCCL_DEBUG=INFO; a job can do without NCCL: resources: {transport: tcp}"


def lone(devices: Sequence[str]) -> Iterator[Finding]:
    """Check that many groups of this process alone can be used and leave nothing."""
    place = torch.device(devices[0])
    torch.cuda.set_device(place)

    def free() -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(place)[0]

    yield judge_groups("lone", use_alone(NcclMaker(place), place, free))


def launches(devices: Sequence[str]) -> Iterator[Finding]:
    """Measure a launch of this process alone, and the abort of one that waits for other work."""
    place = torch.device(devices[0])
    torch.cuda.set_device(place)

    def occupy() -> None:
        torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]  # torch's

    yield judge_launched(launch_alone(NcclMaker(place), place, occupy))


def judge_launched(found: Launched) -> Finding:
    """Judge launches of one process, and the abort of one that waits for two seconds of work."""
    figures = msgspec.structs.asdict(found)
    what = (
        f"a launch takes the host {found.launch_s * 1e6:.0f} us; one that has not begun is aborted "
        f"in {found.abort_s:.2f} s"
    )
    if found.launch_s > _LAUNCH_S:
        fix = "look at CPU affinity and power saving of the host"
        return Finding(check="launches", level="slow", what=what, fix=fix, figures=figures)
    return Finding(check="launches", level="pass", what=what, figures=figures)


def refused(devices: Sequence[str]) -> Iterator[Finding]:
    """Check how NCCL refuses two processes of one host on one GPU."""
    words, codes = pair("refused", [devices[0], devices[0]], as_hosts=False)
    if codes != [0, 0]:
        yield _failed("refused", "two processes on one GPU end otherwise", words)
        return
    yield judge_refused(msgspec.json.decode(words, type=Refused))


def judge_refused(found: Refused) -> Finding:
    """Judge the end of a group that cannot be."""
    if not found.said:
        what = "two processes on one GPU are not refused"
        fix = "tell the project: it takes a shared GPU for one that NCCL refuses"
        return Finding(check="refused", level="warn", what=what, fix=fix)
    what = (
        f"two processes on one GPU are refused ({found.said}), which counts as "
        f"{found.taken_for}; the group is aborted in {found.abort_s:.2f} s"
    )
    if found.taken_for != "TransportError":
        fix = "tell the project: it is for a meeting to be repeated, not for a sick GPU"
        return Finding(check="refused", level="fail", what=what, fix=fix)
    return Finding(check="refused", level="pass", what=what)


def polls(devices: Sequence[str]) -> Iterator[Finding]:
    """Check that a thread launches while another polls the same communicator."""
    words, codes = pair("polls", devices)
    if codes != [0, 0]:
        yield _failed("polls", "launches beside polls of another thread fail", words)
        return
    yield judge_polled(msgspec.json.decode(words, type=Polled))


def judge_polled(found: Polled) -> Finding:
    """Judge launches beside polls."""
    what = (
        f"{LAUNCHES} launches beside {found.polls} polls of another thread take "
        f"{found.launch_s * 1e6:.0f} us each, and all end"
    )
    figures = {"launch_s": found.launch_s, "polls": float(found.polls)}
    if found.launch_s > _LAUNCH_S:
        fix = "look at CPU affinity and power saving of the host"
        return Finding(check="polls", level="slow", what=what, fix=fix, figures=figures)
    return Finding(check="polls", level="pass", what=what, figures=figures)


def receives(devices: Sequence[str]) -> Iterator[Finding]:
    """Measure how much a receive that waits slows computation down, by its multiprocessors."""
    words, codes = pair("receives", devices)
    if codes != [0, 0]:
        yield _failed("receives", "receives of some multiprocessors do not end", words)
        return
    yield judge_receives(msgspec.json.decode(words, type=dict[int, float]))


def judge_receives(found: Mapping[int, float]) -> Finding:
    """Judge receives that wait. `found`: time of a product in parts of its time alone, by the most
    multiprocessors of the receive."""
    each = ", ".join(f"{times:.2f} beside one of {most}" for most, times in found.items())
    what = f"while a receive waits, products take of their time {each} multiprocessors at most"
    figures = {f"times_of_{most}": times for most, times in found.items()}
    if max(times for most, times in found.items() if most <= LINK_CTAS) > _SLOWDOWN:
        fix = f"workers' receives have {LINK_CTAS}: look at NCCL_MAX_CTAS and the like"
        return Finding(check="receives", level="slow", what=what, fix=fix, figures=figures)
    return Finding(check="receives", level="pass", what=what, figures=figures)


def groups(devices: Sequence[str]) -> Iterator[Finding]:
    """Check that two processes use many groups beside each other, and that these leave nothing."""
    words, codes = pair("groups", devices)
    if codes != [0, 0]:
        yield _failed("groups", f"{GROUPS} groups of two cannot be used", words)
        return
    yield judge_groups("groups", msgspec.json.decode(words, type=Used), sum_bytes())


def judge_groups(check: str, used: Used, planned: int | None = None) -> Finding:
    """Judge the groups' life. `planned`: bytes that plans count for a group; None: groups of one
    take less."""
    each = used.taken_bytes // GROUPS
    what = (
        f"{GROUPS} groups connect in {used.connect_s:.1f} s and take {format_bytes(each)} each; "
        f"all are aborted in {used.abort_s:.2f} s"
    )
    if not used.right:
        return Finding(check=check, level="fail", what=f"{what}, and err", fix=_DEBUG)
    if used.left_bytes > used.taken_bytes // 2 or used.left_threads > GROUPS // 2:
        what += f", but {format_bytes(used.left_bytes)} and {used.left_threads} threads stay"
        fix = "every loss would leave as much: update NCCL and the driver"
        return Finding(check=check, level="fail", what=what, fix=fix)
    if planned is not None and each > _MORE * planned:
        what += f", where plans count {format_bytes(planned)}"
        fix = "leave that more of the GPU free: give agents --memory-per-worker"
        return Finding(check=check, level="warn", what=what, fix=fix)
    if used.connect_s > _CONNECT_S:
        fix = "every recovery waits for that: look at NCCL_DEBUG=INFO and at the network's names"
        return Finding(check=check, level="slow", what=what, fix=fix)
    return Finding(check=check, level="pass", what=what)


def messages(devices: Sequence[str]) -> Iterator[Finding]:
    """Measure how long a small message takes, and how fast a large one is."""
    words, codes = pair("messages", devices)
    if codes != [0, 0]:
        yield _failed("messages", "two communicators do not work", words)
        return
    latency_s, rate = map(float, words.split())
    found = Speeds(latency_s=latency_s, bytes_per_s=rate)
    name = board_name(torch.device(devices[0]))
    yield judge_messages(name, found, shared=is_shared(devices))


def judge_messages(name: str, found: Speeds, *, shared: bool = False) -> Finding:
    """Judge the speed of messages. `name`: the boards'; `shared`: it is one board, on which both
    processes take turns, so rates are reported alone."""
    machine = machine_of(f"cuda {name}")
    what = (
        f"a small message takes {found.latency_s * 1e6:.0f} us, a large one goes at "
        f"{found.bytes_per_s / 1e9:.3g} GB/s"
    )
    if shared:
        return Finding(check="messages", level="pass", what=f"{what} (two on one GPU: not judged)")
    if machine.name in GPUS and found.bytes_per_s < _LEAST_BYTES_PER_S:
        fix = "see the check peers, and NCCL_DEBUG=INFO for the way that NCCL takes"
    elif found.latency_s > _LATENCY_S:
        fix = "look at CPU affinity and power saving of the host, and at NCCL_DEBUG=INFO"
    else:
        return Finding(check="messages", level="pass", what=what)
    return Finding(check="messages", level="slow", what=what, fix=fix)


def ends(devices: Sequence[str]) -> Iterator[Finding]:
    """Check that six operations at once are given up in whichever way their peer goes."""
    for way in WAYS:
        words, codes = pair(f"ends-{way}", devices)
        if codes[0] != 0:
            yield _failed("ends", f"{_SIX} {WAYS[way]} cannot be given up", words)
            return  # each of the others may take as long
        yield judge_end(way, msgspec.json.decode(words, type=Ended))


def judge_end(way: Way, found: Ended) -> Finding:
    """Judge the end of operations and of their groups."""
    released = "more than 10" if found.released_s is None else f"{found.released_s:.2f}"
    what = (
        f"{_SIX} {WAYS[way]} are given up in {found.abort_s:.2f} s; the groups' destructors take "
        f"{released} s; before, {found.noticed} showed the loss, within {found.noticed_s:.1f} s"
    )
    if found.released_s is None or found.released_s > _RELEASE_S:
        fix = "threads of torch's sleep in them: TORCH_NCCL_BLOCKING_WAIT=1 starts none"
        return Finding(check="ends", level="slow", what=what, fix=fix)
    if found.abort_s > _ABORT_S:
        fix = "every recovery waits for that: update the driver and NCCL"
        return Finding(check="ends", level="slow", what=what, fix=fix)
    return Finding(check="ends", level="pass", what=what)


def recoveries(devices: Sequence[str]) -> Iterator[Finding]:
    """Check that recoveries leave nothing behind."""
    words, codes = pair("recoveries", devices)
    if codes != [0, 0]:
        yield _failed("recoveries", f"{RECOVERIES} recoveries fail", words)
        return
    left, threads = map(int, words.split())
    yield judge_recoveries(left, threads)


def judge_recoveries(left: int, threads: int) -> Finding:
    """Judge what is left. `left`: bytes of a GPU beyond those after the first recovery."""
    if left > _LEFT_BYTES or threads >= RECOVERIES:
        what = f"{RECOVERIES} recoveries leave {format_bytes(left)} and {threads} threads behind"
        fix = "a job would run out of memory in the end: update NCCL and the driver"
        return Finding(check="recoveries", level="fail", what=what, fix=fix)
    what = f"{RECOVERIES} recoveries leave nothing behind"
    return Finding(check="recoveries", level="pass", what=what)


def replicas(devices: Sequence[str]) -> Iterator[Finding]:
    """Check that two replicas, each with samples of its own, stay the same to the bit."""
    words, codes = pair("replicas", devices)
    if codes != [0, 0]:
        yield _failed("replicas", "two replicas do not train", words)
        return
    yield judge_replicas(msgspec.json.decode(words, type=list[int]))


def judge_replicas(differ: Sequence[int]) -> Finding:
    """Judge two replicas. `differ`: layers that are not the same."""
    if differ:
        what = f"after {STEPS} steps two replicas differ in layers {', '.join(map(str, differ))}"
        fix = "sums or updates are not the same on both GPUs: do not train on them"
        return Finding(check="replicas", level="fail", what=what, fix=fix)
    what = f"two replicas are the same to the bit after {STEPS} steps"
    return Finding(check="replicas", level="pass", what=what)


def _failed(check: str, what: str, words: str) -> Finding:
    return Finding(check=check, level="fail", what=f"{what}: {words or 'they hang'}", fix=_DEBUG)


# ---- members of a pair


def _json(found: object) -> str:
    return msgspec.json.encode(found).decode()


def _measure(member: Member) -> str:
    found = measure(member, size=_LARGE)
    return f"{found.latency_s} {found.bytes_per_s}"


def _lose_peer(way: Way, member: Member) -> str:
    board = member.board
    if way == "aborts":
        return _json(give_up(member, None, None, size=_LARGE))
    if member.rank == 1:
        board.tell("pid", {"pid": str(os.getpid()).encode()})
    signum = signal.SIGKILL if way == "killed" else signal.SIGSTOP
    leave = partial(os.kill, os.getpid(), signum)
    return _json(give_up(member, leave, lambda: _until_gone(board.hear("pid")), size=_LARGE))


def _until_gone(message: Mapping[str, bytes]) -> None:
    while not is_gone(int(message["pid"])):
        time.sleep(_POLL_S)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended or is stopped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return True
    return state in "TZX"


def _recover(member: Member) -> str:
    left = recover_again(member, member.free)
    return f"{left.bytes} {left.threads}"


TASKS: Mapping[str, Task] = {
    "groups": lambda member: _json(use_together(member)),
    "refused": lambda member: _json(refuse(member)),
    "polls": lambda member: _json(launch_beside_polls(member)),
    "receives": lambda member: _json(slow_down(member, _WIDTH)),
    "messages": _measure,
    **{f"ends-{way}": partial(_lose_peer, way) for way in WAYS},
    "recoveries": _recover,
    "replicas": lambda member: _json(train_alike(member, job_of(member.place))),
}
