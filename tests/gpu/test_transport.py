"""Trials of a worker's communicators over a fake of NCCL, and conclusions from their figures."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from msgspec.structs import replace
from torch._C._distributed_c10d import AllreduceOptions

from bench.gpu import communicators
from bench.gpu.communicators import (
    GROUPS,
    RECOVERIES,
    Ended,
    Folder,
    Member,
    Speeds,
    Used,
    give_up,
    measure,
    noticed,
    recover_again,
    train_alike,
    use_alone,
    use_together,
)
from bench.gpu.engine import job_of
from bench.gpu.launches import (
    CTAS,
    Launched,
    Polled,
    Refused,
    launch_alone,
    launch_beside_polls,
    refuse,
    slow_down,
)
from bench.gpu.transport import (
    is_gone,
    judge_end,
    judge_groups,
    judge_launched,
    judge_messages,
    judge_polled,
    judge_receives,
    judge_recoveries,
    judge_refused,
    judge_replicas,
)
from oobleck.core.orders import Finding
from oobleck.planner.profile.memory import LINK_CTAS, sum_bytes
from oobleck.worker.runtime.errors import HelperLost
from oobleck.worker.transport.nccl.group import Identifiers
from support.fake_nccl import Fabric, RankOfFabric, nccl_error, raising
from support.waiting import PATIENCE_S

T = TypeVar("T")
H100 = "NVIDIA H100 80GB HBM3"


def both(
    folder: Path,
    run: Callable[[Member], T],
    *faults: Mapping[str, Callable[[], None]],
) -> list[T]:
    """Return the results of two threads' `run`. `faults`: those of each one's NCCL."""
    fabric, board = Fabric(), Folder(folder)
    makers = [RankOfFabric(fabric) for _ in range(2)]
    for maker, own in zip(makers, faults, strict=False):
        maker.faults.update(own)
    members = [Member(n, torch.device("cpu"), maker, board) for n, maker in enumerate(makers)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, members))
    for group in makers[1].groups:
        if not group.is_aborted:
            group.abort()
    return found


def test_messages_are_timed(tmp_path: Path) -> None:
    for one in both(tmp_path, lambda member: measure(member, size=1 << 16)):
        assert one.latency_s > 0
        assert one.bytes_per_s > 0


def test_products_are_timed_beside_receives_of_each_width(tmp_path: Path) -> None:
    first, second = both(tmp_path, lambda member: slow_down(member, 64))
    assert [*first] == [*second] == [*CTAS]
    assert all(times > 0 for times in first.values())
    assert {*second.values()} == {1.0}, "it keeps off the GPU"


def test_a_receive_is_polled_while_others_are_launched(tmp_path: Path) -> None:
    first, second = both(tmp_path, launch_beside_polls)
    assert first.launch_s > 0
    assert first.polls > 0
    assert second == Polled(launch_s=0.0, polls=0)


def test_a_launch_that_has_not_begun_is_aborted() -> None:
    rank, occupied = RankOfFabric(Fabric()), []
    found = launch_alone(rank, CPU, lambda: occupied.append(rank.groups[0].is_aborted))
    assert occupied == [False]
    assert rank.groups[0].is_aborted
    assert found.launch_s > 0


def test_a_group_that_is_refused_is_told_with_what_a_worker_makes_of_it(tmp_path: Path) -> None:
    error = nccl_error("ncclInvalidUsage", "invalid usage", "Duplicate GPU detected")
    found = both(tmp_path, refuse, {"allreduce": raising(error)}, {"allreduce": raising(error)})
    for one in found:
        assert "invalid usage" in one.said
        assert one.taken_for == "TransportError"


def test_a_group_that_is_not_refused_is_told_as_such(tmp_path: Path) -> None:
    for one in both(tmp_path, refuse):
        assert (one.said, one.taken_for) == ("", "")


@pytest.mark.parametrize("way", ["silent", "aborts"])
def test_six_operations_are_given_up_however_the_peer_goes(tmp_path: Path, way: str) -> None:
    leave = (lambda: None) if way == "silent" else None
    found, none = both(
        tmp_path, lambda member: give_up(member, leave, leave, size=64, notice_s=0.1)
    )
    assert found is not None
    assert found.noticed == 0, "an abort alone ends them"
    assert found.abort_s > 0
    assert none is None


def test_operations_that_show_the_loss_are_counted() -> None:
    rank, one = RankOfFabric(Fabric()), torch.ones(1)
    ends, waits = (rank.make(Identifiers(), 0, 1, 1) for _ in range(2))
    for group in (ends, waits):
        group.eager_connect_single_device(CPU)
    works = [ends.allreduce([one], AllreduceOptions()), waits.recv([one], 0, 0)]
    assert noticed(works, 0.5)[0] == 1
    waits.abort()
    assert noticed(works, PATIENCE_S)[0] == 2


def test_an_abort_that_does_not_end_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communicators, "_ABORTED_S", 0.1)
    stuck = {"abort": lambda: time.sleep(1)}
    with pytest.raises(HelperLost, match="1 of NCCL's communicators did not end"):
        both(tmp_path, lambda member: give_up(member, lambda: None, lambda: None, size=64), stuck)


def test_recoveries_leave_nothing(tmp_path: Path) -> None:
    before = threading.active_count()
    for left in both(tmp_path, lambda member: recover_again(member, lambda: 0)):
        assert left.bytes == 0
        assert left.threads < RECOVERIES
    assert threading.active_count() <= before + 2


def test_what_recoveries_leave_is_counted(tmp_path: Path) -> None:
    free = iter(range(1 << 30, 0, -1000))
    found = both(tmp_path, lambda member: recover_again(member, lambda: next(free)))
    assert {left.bytes for left in found} <= {1000, 2000, 3000}


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_is_gone_when_it_does_nothing_any_more(signum: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
    try:
        assert not is_gone(process.pid)
        process.send_signal(signum)
        until = time.monotonic() + PATIENCE_S
        while not is_gone(process.pid):
            assert time.monotonic() < until
    finally:
        process.kill()
        process.wait()
    assert is_gone(process.pid)


CPU = torch.device("cpu")


def test_groups_of_one_are_used_and_leave_nothing() -> None:
    rank = RankOfFabric(Fabric())
    found = use_alone(rank, CPU, lambda: 0)
    assert len(rank.groups) == GROUPS + 1
    assert all(group.is_aborted for group in rank.groups)
    assert (found.right, found.left_threads) == (True, 0)
    assert judge_groups("lone", found).level == "pass"


def test_a_group_of_one_that_fails_raises() -> None:
    rank = RankOfFabric(Fabric())
    rank.faults["alltoall"] = raising(RuntimeError("unhandled cuda error"))
    with pytest.raises(RuntimeError, match="unhandled cuda error"):
        use_alone(rank, CPU, lambda: 0)


def test_groups_of_two_are_used_and_leave_nothing(tmp_path: Path) -> None:
    for found in both(tmp_path, use_together):
        assert found.right
        assert found.left_bytes == 0
    assert {path.name for path in tmp_path.glob("many-*")} == {f"many-{n}" for n in range(GROUPS)}


def test_replicas_stay_equal(tmp_path: Path) -> None:
    assert both(tmp_path, lambda member: train_alike(member, job_of(CPU))) == [[], []]


def test_replicas_that_part_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, left = communicators.Own.run, [5]

    def forgets(own: communicators.Own, numbers: torch.Tensor) -> None:
        run(own, numbers)
        left[0] -= 1
        if not left[0]:
            numbers[0] += 1.0  # in one of the two

    monkeypatch.setattr(communicators.Own, "run", forgets)
    first, second = both(tmp_path, lambda member: train_alike(member, job_of(CPU)))
    assert first == second != []


def test_conclusions_from_messages_and_recoveries() -> None:
    def level(found: Finding) -> str:
        assert bool(found.fix) == (found.level != "pass"), found
        return found.level

    def messages(latency_s: float, rate: float, name: str = H100) -> str:
        return level(judge_messages(name, Speeds(latency_s=latency_s, bytes_per_s=rate)))

    assert messages(30e-6, 40e9) == "pass"
    assert messages(30e-6, 4e9) == "slow"
    assert messages(30e-6, 4e9, "NVIDIA L40S") == "pass", "it is not in the table"
    assert messages(900e-6, 200e9) == "slow"
    shared = Speeds(latency_s=9.0, bytes_per_s=1.0)
    assert level(judge_messages(H100, shared, shared=True)) == "pass", "two take turns on a GPU"

    def end(abort_s: float, released_s: float | None) -> str:
        found = Ended(noticed=2, noticed_s=0.5, abort_s=abort_s, released_s=released_s)
        return level(judge_end("killed", found))

    assert end(0.31, 0.1) == "pass"
    assert end(4.0, 0.1) == end(0.31, 5.0) == end(0.31, None) == "slow"
    assert level(judge_recoveries(8 << 20, 3)) == "pass"
    assert level(judge_recoveries(1 << 30, 3)) == level(judge_recoveries(0, RECOVERIES)) == "fail"


def test_conclusions_from_launches() -> None:
    def level(found: Finding) -> str:
        assert bool(found.fix) == (found.level != "pass"), found
        return found.level

    assert level(judge_launched(Launched(launch_s=30e-6, abort_s=0.1))) == "pass"
    assert level(judge_launched(Launched(launch_s=900e-6, abort_s=0.1))) == "slow"
    assert level(judge_polled(Polled(launch_s=30e-6, polls=7))) == "pass"
    assert level(judge_polled(Polled(launch_s=900e-6, polls=7))) == "slow"
    well = {most: 1.02 if most <= LINK_CTAS else 1.4 for most in CTAS}
    assert level(judge_receives(well)) == "pass", "workers use no such"
    assert level(judge_receives({**well, LINK_CTAS: 1.4})) == "slow"
    expected = Refused(said="NCCL error", taken_for="TransportError", abort_s=0.1)
    assert level(judge_refused(expected)) == "pass"
    assert level(judge_refused(replace(expected, taken_for="AcceleratorError"))) == "fail"
    assert level(judge_refused(Refused(said="", taken_for="", abort_s=0.1))) == "warn"


def test_conclusions_from_groups_and_replicas() -> None:
    each = sum_bytes()

    def level(
        connect_s: float, taken: int, left: int = 0, threads: int = 0, *, right: bool = True
    ) -> str:
        used = Used(
            connect_s=connect_s,
            abort_s=0.3,
            taken_bytes=taken * each,
            left_bytes=left * each,
            left_threads=threads,
            right=right,
        )
        found = judge_groups("groups", used, each)
        assert bool(found.fix) == (found.level != "pass"), found
        return found.level

    assert level(2.0, GROUPS) == "pass"
    assert level(40.0, GROUPS) == "slow"
    assert level(2.0, 2 * GROUPS) == "warn"
    assert level(2.0, GROUPS, left=15) == level(2.0, GROUPS, threads=GROUPS) == "fail"
    assert level(2.0, GROUPS, right=False) == "fail"
    assert judge_replicas([]).level == "pass"
    assert judge_replicas([0, 3]).level == "fail"
