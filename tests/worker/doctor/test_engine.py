"""Checks of one device by what a worker does on it, and what is concluded from them."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch.nn.attention import SDPBackend

from oobleck.core.finding import Finding
from oobleck.worker.doctor.block import Rates, block, of_attention, of_rates, of_reserved
from oobleck.worker.doctor.engine import (
    apart,
    backwards,
    errors,
    of_assert,
    of_backwards,
    of_syncs,
    of_want_of_memory,
    syncs,
)
from oobleck.worker.doctor.lone import GROUPS, Used, of_lone, use
from oobleck.worker.state.optimizer import learning_rate
from oobleck.worker.step.stage import StageRunner
from support.fake_nccl import Fabric, RankOfFabric, raising

Check = Callable[[Sequence[str]], Iterator[Finding]]


@pytest.mark.parametrize("check", [backwards, syncs, errors, block])
def test_a_device_is_asked_what_a_worker_does_on_it(check: Check) -> None:
    found = list(check(["cpu"]))
    assert {one.level for one in found} == {"pass"}, found


def test_gradients_are_held_against_each_other() -> None:
    some = [torch.tensor([4.0, -2.0]), torch.tensor([1.0])]
    assert apart(some, [one.clone() for one in some]) == 0
    assert apart(some, [torch.tensor([4.0, -1.0]), torch.tensor([1.0])]) == 0.25
    assert not apart(some, [torch.tensor([4.0, -1.0]), torch.tensor([float("nan")])]) <= 1


def test_what_is_concluded_of_the_engine() -> None:
    def level(found: Finding) -> str:
        assert bool(found.fix) == (found.level != "pass"), found
        return found.level

    def of(again: float, split: float, recomputed: float) -> str:
        found = of_backwards("cuda:0", again=again, split=split, recomputed=recomputed)
        return level(found)

    assert of(0, 0, 0) == "pass"
    assert of(1e-3, 1e-3, 2e-3) == "pass", "attention may add in any order"
    assert of(0, 1e-3, 0) == of(0, 0, 1e-3) == "warn"
    assert of(0, 0.5, 0) == of(0, 0, 0.5) == of(0.5, 0, 0) == "fail"
    assert of(float("nan"), 0, 0) == of(0, float("nan"), 0) == "fail"
    waited = RuntimeError("called a synchronizing CUDA operation")
    assert level(of_syncs(waited, on_gpu=True)) == "slow"
    assert level(of_syncs(None, on_gpu=True)) == "pass"
    assert level(of_want_of_memory(torch.OutOfMemoryError("CUDA out of memory"), 8.0)) == "pass"
    assert level(of_want_of_memory(torch.OutOfMemoryError("CUDA out of memory"), 7.0)) == "fail"
    assert level(of_want_of_memory(RuntimeError("out of luck"), 8.0)) == "fail"
    assert level(of_want_of_memory(None, 8.0)) == "fail"
    triggered = torch.AcceleratorError("CUDA error: device-side assert triggered")
    assert level(of_assert(triggered)) == "pass"
    assert level(of_assert(torch.AcceleratorError("CUDA error: unknown error"))) == "fail"
    assert level(of_assert(IndexError("index 8 is out of bounds"))) == "fail"


def test_a_wait_is_told_with_its_line() -> None:
    """Of the project's own, whatever torch ran below it; the doctor's own says nothing."""
    with pytest.raises(AttributeError) as within:
        learning_rate(None, 1, 1, 1.0)  # type: ignore[arg-type]
    assert "(worker/state/optimizer.py:" in of_syncs(within.value, on_gpu=True).what
    with pytest.raises(AttributeError) as own:
        of_lone(None)  # type: ignore[arg-type]
    assert "worker/" not in of_syncs(own.value, on_gpu=True).what


def test_a_part_of_a_backward_that_is_missing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageRunner, "backward_weight", lambda self, number: None)
    (found,) = backwards(["cpu"])
    assert (found.level, "in two parts" in found.what) == ("fail", True)


def test_what_is_concluded_of_a_block() -> None:
    def level(found: Finding) -> str:
        assert bool(found.fix) == (found.level != "pass"), found
        return found.level

    def rates(flops: float, update: float) -> Rates:
        return Rates(flops_per_s=flops, update_bytes_per_s=update, snapshot_bytes_per_s=2e10)

    h100, other = "NVIDIA H100 80GB HBM3", "NVIDIA L40S"
    well = of_rates("cuda:0", h100, rates(450e12, 1.2e12))
    assert (level(well), "46% of the peak (MFU)" in well.what) == ("pass", True)
    assert level(of_rates("cuda:0", h100, rates(150e12, 1.2e12))) == "slow"
    assert level(of_rates("cuda:0", h100, rates(450e12, 0.2e12))) == "slow"
    unknown = of_rates("cuda:0", other, rates(50e12, 0.2e12))
    assert (level(unknown), "MFU" in unknown.what) == ("pass", False), "it is not in the table"
    for chosen, on_gpu, expected in (
        (SDPBackend.FLASH_ATTENTION, True, "pass"),
        (SDPBackend.MATH, True, "slow"),
        (SDPBackend.MATH, False, "pass"),
    ):
        assert level(of_attention("x", "heads", chosen, on_gpu=on_gpu)) == expected

    def reserved(held: int, beside: int) -> str:
        return level(of_reserved("cuda:0", allocated=9 << 30, reserved=held, beside=beside))

    assert reserved(10 << 30, 1 << 29) == "pass"
    assert reserved(11 << 30, 1 << 29) == "warn"
    assert reserved(10 << 30, 2 << 30) == "warn"


def test_groups_of_one_are_used_and_leave_nothing() -> None:
    """A fake stands in NCCL's place."""
    rank = RankOfFabric(Fabric())
    found = use(rank, torch.device("cpu"), lambda: 0)
    assert len(rank.groups) == GROUPS + 1
    assert all(group.is_aborted for group in rank.groups)
    assert (found.right, found.left_threads, of_lone(found).level) == (True, 0, "pass")


def test_a_group_of_one_that_fails_is_told() -> None:
    rank = RankOfFabric(Fabric())
    rank.faults["allreduce"] = raising(RuntimeError("unhandled cuda error"))
    with pytest.raises(RuntimeError, match="unhandled cuda error"):
        use(rank, torch.device("cpu"), lambda: 0, groups=1)


def test_what_is_concluded_of_groups_of_one() -> None:
    def level(left: int, threads: int, *, right: bool = True) -> str:
        used = Used(
            connect_s=1.0,
            abort_s=0.1,
            taken_bytes=1 << 30,
            left_bytes=left,
            left_threads=threads,
            right=right,
        )
        found = of_lone(used)
        assert bool(found.fix) == (found.level != "pass"), found
        return found.level

    assert level(1 << 20, 2) == "pass"
    assert level(1 << 30, 0) == level(0, GROUPS) == level(0, 0, right=False) == "fail"
