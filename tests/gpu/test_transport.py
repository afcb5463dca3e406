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

from bench.gpu import communicators
from bench.gpu.communicators import (
    GROUPS,
    RECOVERIES,
    Folder,
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
from bench.gpu.transport import (
    is_gone,
    judge_end,
    judge_groups,
    judge_messages,
    judge_recoveries,
    judge_replicas,
)
from oobleck.core.orders import Finding
from oobleck.planner.profile.memory import sum_bytes
from oobleck.worker.runtime.errors import HelperLost
from support.fake_nccl import Fabric, RankOfFabric, raising
from support.waiting import PATIENCE_S

T = TypeVar("T")
H100 = "NVIDIA H100 80GB HBM3"


def both(
    folder: Path,
    run: Callable[[Member], T],
    faults: Mapping[str, Callable[[], None]] | None = None,
) -> list[T]:
    """Return the results of two threads' `run`. `faults`: the first one's NCCL has them."""
    fabric, board = Fabric(), Folder(folder)
    makers = [RankOfFabric(fabric) for _ in range(2)]
    makers[0].faults.update(faults or {})
    members = [Member(n, torch.device("cpu"), maker, board) for n, maker in enumerate(makers)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, members))
    for group in makers[1].groups:
        if not group.is_aborted:
            group.abort()
    return found


def test_messages_are_timed_beside_a_receive_that_waits(tmp_path: Path) -> None:
    first, second = both(tmp_path, lambda member: measure(member, size=1 << 16, width=64))
    for one in (first, second):
        assert one.latency_s > 0
        assert one.bytes_per_s > 0
    assert first.slowdown > 0
    assert second.slowdown == 1


@pytest.mark.parametrize("way", ["silent", "aborts"])
def test_six_operations_are_given_up_however_the_peer_goes(tmp_path: Path, way: str) -> None:
    leave = (lambda: None) if way == "silent" else None
    spent_s, _ = both(tmp_path, lambda member: give_up(member, leave, leave, size=64))
    assert spent_s > 0


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

    def messages(latency_s: float, rate: float, slowdown: float, name: str = H100) -> str:
        found = Speeds(latency_s=latency_s, bytes_per_s=rate, slowdown=slowdown)
        return level(judge_messages(name, found))

    assert messages(30e-6, 200e9, 1.03) == "pass"
    assert messages(30e-6, 20e9, 1.03) == "slow"
    assert messages(30e-6, 20e9, 1.03, "NVIDIA L40S") == "pass", "it is not in the table"
    assert messages(900e-6, 200e9, 1.03) == "slow"
    assert messages(30e-6, 200e9, 1.4) == "slow"
    shared = Speeds(latency_s=9.0, bytes_per_s=1.0, slowdown=9.0)
    assert level(judge_messages(H100, shared, shared=True)) == "pass", "two take turns on a GPU"
    assert level(judge_end("killed", "0.31", ended=True)) == "pass"
    assert level(judge_end("aborts", "4.0", ended=True)) == "slow"
    hangs = judge_end("stopped", "no answer within 40 s", ended=False)
    assert (level(hangs), "no answer within 40 s" in hangs.what) == ("fail", True)
    assert level(judge_recoveries(8 << 20, 3)) == "pass"
    assert level(judge_recoveries(1 << 30, 3)) == level(judge_recoveries(0, RECOVERIES)) == "fail"


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
