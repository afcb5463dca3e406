"""What two communicators are asked, of a fake of NCCL, and what is concluded from the answers."""

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

from oobleck.core.finding import Finding
from oobleck.worker.doctor import communicators
from oobleck.worker.doctor.communicators import (
    RECOVERIES,
    Folder,
    Member,
    Speeds,
    give_up,
    measure,
    recover_again,
)
from oobleck.worker.doctor.recoveries import is_gone, of_end, of_messages, of_recoveries
from oobleck.worker.runtime.errors import HelperLost
from support.fake_nccl import Fabric, RankOfFabric
from support.waiting import PATIENCE_S

T = TypeVar("T")


def both(
    folder: Path,
    run: Callable[[Member], T],
    faults: Mapping[str, Callable[[], None]] | None = None,
) -> list[T]:
    """What each of two threads' `run` returns. `faults`: of the first one's NCCL."""
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
        assert 0 < one.latency_s < 0.1
        assert one.bytes_per_s > 1 << 16
    assert first.slowdown > 0
    assert second.slowdown == 1


@pytest.mark.parametrize("way", ["silent", "aborts"])
def test_six_operations_are_given_up_however_the_peer_goes(tmp_path: Path, way: str) -> None:
    leave = (lambda: None) if way == "silent" else None
    spent_s, _ = both(tmp_path, lambda member: give_up(member, leave, leave, size=64))
    assert spent_s < 5


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


def test_what_is_concluded() -> None:
    def level(found: Finding) -> str:
        assert bool(found.fix) == (found.level != "pass"), found
        return found.level

    def messages(latency_s: float, rate: float, slowdown: float, name: str = H100) -> str:
        found = Speeds(latency_s=latency_s, bytes_per_s=rate, slowdown=slowdown)
        return level(of_messages(name, found))

    assert messages(30e-6, 200e9, 1.03) == "pass"
    assert messages(30e-6, 20e9, 1.03) == "slow"
    assert messages(30e-6, 20e9, 1.03, "NVIDIA L40S") == "pass", "it is not in the table"
    assert messages(900e-6, 200e9, 1.03) == "slow"
    assert messages(30e-6, 200e9, 1.4) == "slow"
    assert level(of_end("killed", "0.31", ended=True)) == "pass"
    assert level(of_end("aborts", "4.0", ended=True)) == "slow"
    hangs = of_end("stopped", "no answer within 40 s", ended=False)
    assert (level(hangs), "no answer within 40 s" in hangs.what) == ("fail", True)
    assert level(of_recoveries(8 << 20, 3)) == "pass"
    assert level(of_recoveries(1 << 30, 3)) == level(of_recoveries(0, RECOVERIES)) == "fail"


H100 = "NVIDIA H100 80GB HBM3"
