"""Checks of two devices that CPUs can stand for, and what is concluded from what a GPU says."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from oobleck.cli.cluster.doctor import ALONE, TOGETHER, WITH_JOBS
from oobleck.core.finding import Finding
from oobleck.host.device import worker_environment
from oobleck.planner.profile.memory import sum_bytes
from oobleck.worker.doctor.__main__ import CHECKS
from oobleck.worker.doctor.jobs import (
    JOBS_S,
    KILLS,
    kills,
    of_kills,
    of_speed,
    of_use,
    speed,
)
from oobleck.worker.doctor.pair import PAIR_S
from oobleck.worker.doctor.recoveries import WAYS
from oobleck.worker.doctor.replicas import groups, of_groups, of_replicas, replicas
from oobleck.worker.doctor.single import (
    FREED_S,
    freed_after,
    of_forks,
    of_killed,
    of_memory,
    of_products,
    products,
)
from oobleck.worker.doctor.together import aborts, of_peers, sums

Check = Callable[[Sequence[str]], Iterator[Finding]]


@pytest.mark.parametrize(
    ("check", "what"),
    [
        (sums, "a sum is right"),
        (aborts, "a receive from a killed peer is given"),
        pytest.param(groups, "20 groups connect in", marks=pytest.mark.soak),
        (replicas, "are the same to the bit after 20 steps"),
    ],
)
def test_two_processes_connect_sum_and_lose_each_other(
    check: Check, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in worker_environment("cuda").items():
        monkeypatch.setenv(name, value)
    (found,) = check(["cpu", "cpu"])
    assert (found.level, what in found.what) == ("pass", True), found


def test_the_memory_of_a_killed_process_is_waited_for_and_not_for_ever() -> None:
    now = 0.0

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    def freed(after_s: float) -> float | None:
        nonlocal now
        now = 0.0
        return freed_after(lambda: 7 if now >= after_s else 6, 7, clock=lambda: now, sleep=wait)

    assert freed(0) == 0
    assert freed(2.5) == pytest.approx(2.5, abs=0.02)
    assert freed(FREED_S + 1) is None


def test_what_is_concluded() -> None:
    def level(found: Finding) -> str:
        assert bool(found.fix) == (found.level != "pass"), found
        return found.level

    assert level(of_forks(2.5, on_gpu=True)) == "pass"
    assert level(of_forks(9.0, on_gpu=True)) == "slow"
    assert level(of_forks(9.0, on_gpu=False)) == "pass", "how busy a CPU is says nothing"
    assert level(of_killed(1 << 30, 0.4, "taken 1073741824")) == "pass"
    assert level(of_killed(1 << 30, 9.0, "taken 1073741824")) == "slow"
    assert level(of_killed(1 << 30, None, "taken 1073741824")) == "fail"
    unable = of_killed(0, None, "torch.OutOfMemoryError: CUDA out of memory")
    assert (level(unable), "CUDA out of memory" in unable.what) == ("fail", True)
    assert level(of_memory("cuda:0", 79 << 30, 80 << 30, right=True)) == "pass"
    assert level(of_memory("cuda:0", 60 << 30, 80 << 30, right=True)) == "warn"
    assert level(of_memory("cuda:0", 79 << 30, 80 << 30, right=False)) == "fail"
    h100, pcie, slice_ = "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 1g"
    assert level(of_products("cuda:0", h100, 600e12)) == "pass"
    assert level(of_products("cuda:0", h100, 200e12)) == "slow"
    assert level(of_peers(h100, 300e9)) == "pass"
    assert level(of_peers(h100, 40e9)) == "slow"
    for other in (pcie, slice_):
        assert level(of_products("cuda:0", other, 60e12)) == "pass", "it is not in the table"
        assert level(of_peers(other, 15e9)) == "pass"


def test_what_is_concluded_of_groups_replicas_and_jobs() -> None:
    each = sum_bytes()

    def level(found: Finding) -> str:
        assert bool(found.fix) == (found.level != "pass"), found
        return found.level

    assert level(of_groups(2.0, 20 * each, 0, 0, 0.3)) == "pass"
    assert level(of_groups(40.0, 20 * each, 0, 0, 0.3)) == "slow"
    assert level(of_groups(2.0, 40 * each, 0, 0, 0.3)) == "warn"
    assert level(of_groups(2.0, 20 * each, 15 * each, 0, 0.3)) == "fail"
    assert level(of_groups(2.0, 20 * each, 0, 20, 0.3)) == "fail"
    assert level(of_replicas("equal", True)) == "pass"
    assert level(of_replicas("0, 3", True)) == "fail"
    assert level(of_replicas("", False)) == "fail"
    losses = [5.5, 5.25, 5.125]

    def change(stall_s: float, **phases: float) -> dict[str, object]:
        return {"stall_s": stall_s, "phases": phases}

    soon = [[change(1.0, rendezvous=0.25, first_step=0.5), change(9.0)], [change(1.0, detect=2.0)]]
    well = of_kills(losses, [losses, [5.5, 5.25 + 1e-12, 5.125]], soon)
    assert level(well) == "pass"
    assert well.figures == {"detect_s": 2.0, "first_step_s": 0.5, "rendezvous_s": 0.25}
    assert "the longest phase is detect, 2.00 s" in well.what
    assert level(of_kills(losses, [losses], [[change(30.0)], *soon])) == "slow"
    assert level(of_kills(losses, [losses], [[], *soon])) == "warn"
    assert level(of_kills(losses, [losses, [5.5, 5.25, 5.1251]], soon)) == "fail"
    assert level(of_kills(losses, [losses[:2]], soon)) == "fail"
    assert level(of_speed(95.0, 100.0)) == "pass"
    assert level(of_speed(60.0, 100.0)) == "slow"
    assert level(of_use("n1/0", 1 << 30, 1 << 30)) == "pass"
    assert level(of_use("n1/0", 1 << 30, 5 << 28)) == "warn"


@pytest.mark.soak
@pytest.mark.parametrize("check", [kills, speed])
def test_jobs_run_on_a_cluster_of_this_host(check: Check) -> None:
    """On CPUs: what of them is slow there says nothing."""
    found = list(check(["cpu", "cpu"]))
    assert {one.level for one in found} <= {"pass", "slow", "warn"}, found
    if check is kills:
        (only,) = found
        assert f"{len(KILLS)} of {len(KILLS)} jobs recovered from kills" in only.what


def test_products_are_timed() -> None:
    (found,) = products(["cpu"])
    assert (found.level, "TFLOP/s in bf16" in found.what) == ("pass", True)


def test_limits_leave_room_for_those_of_the_checks_themselves() -> None:
    pairs = ("sums", "aborts", "groups", "replicas", "messages", "recoveries")
    assert min(TOGETHER[name] for name in pairs) >= PAIR_S + 30
    assert TOGETHER["ends"] >= len(WAYS) * PAIR_S + 30
    assert ALONE["killed"] >= FREED_S + 30
    assert WITH_JOBS["kills"] >= 2 * JOBS_S
    assert WITH_JOBS["speed"] >= PAIR_S + JOBS_S + 30
    assert {*ALONE, *TOGETHER, *WITH_JOBS} == {*CHECKS}
