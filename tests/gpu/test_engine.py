"""Checks of one device by what a worker does on it, and conclusions from their figures."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch.nn.attention import SDPBackend

from bench.gpu import engine
from bench.gpu.block import Rates, block, judge_attention, judge_rates, judge_reserved
from bench.gpu.engine import (
    FREED_S,
    LOADING,
    apart,
    backwards,
    errors,
    freed_after,
    judge_assert,
    judge_backwards,
    judge_forks,
    judge_killed,
    judge_syncs,
    judge_want_of_memory,
    starting,
    syncs,
)
from bench.gpu.float8 import float8, judge
from bench.gpu.step import contenders, described, judge_shares, step
from bench.support.daemons import CHECKOUT
from oobleck.core.orders import Finding
from oobleck.worker.state.optimizer import learning_rate
from oobleck.worker.step.stage import StageRunner

Check = Callable[[Sequence[str]], Iterator[Finding]]


@pytest.mark.parametrize("check", [backwards, syncs, errors, block, float8])
def test_a_cpu_passes_what_a_worker_does_on_it(check: Check) -> None:
    found = list(check(["cpu"]))
    assert {one.level for one in found} == {"pass"}, found


def test_the_start_of_a_process_is_measured_in_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_STARTS", 1)
    monkeypatch.setenv("PYTHONPATH", CHECKOUT)
    found = list(starting(["cpu"]))
    for each, loading in zip(found, LOADING, strict=True):
        assert f"loads kernels as {loading}" in each.what
        assert each.figures["product_s"] > 0
        assert each.figures["beside_bytes"] == 0


def test_a_step_is_measured_beside_loops_of_torch() -> None:
    *each, shares = step(["cpu"])
    assert [one.what.partition(":")[0] for one in each] == [
        name for name, _ in contenders(compiled=False)
    ]
    for one in each:
        assert one.level == "pass", one
        assert 0 < one.figures["host_s"] <= one.figures["step_s"]
    expected = each[0].figures["tokens_per_s"] / each[1].figures["tokens_per_s"]
    assert shares.figures["torch"] == pytest.approx(expected)
    assert len([*contenders(compiled=True)]) == 7


def test_conclusions_from_a_step() -> None:
    reached = {"engine": 90.0, "torch": 100.0, "torch, compiled": 120.0}
    well = judge_shares(reached)
    assert (well.level, well.figures) == ("pass", {"torch": 0.9, "torch, compiled": 0.75})
    faster = judge_shares({**reached, "engine, compiled": 114.0})
    assert faster.figures == {"torch": 0.9, "torch, compiled": 0.95}
    slow = judge_shares({**reached, "engine": 70.0})
    assert (slow.level, bool(slow.fix)) == ("slow", True)
    figures = {"tokens_per_s": 1e4, "flops_per_s": 494.5e12, "step_s": 1.0, "host_s": 0.1}
    on_h100 = described("engine", "NVIDIA H100 80GB HBM3", {**figures, "peak_bytes": 2.0**30})
    assert "(50% MFU)" in on_h100.what
    assert "MFU" not in described("engine", "NVIDIA L40S", {**figures, "peak_bytes": 0.0}).what


def test_gradients_are_held_against_each_other() -> None:
    some = [torch.tensor([4.0, -2.0]), torch.tensor([1.0])]
    assert apart(some, [one.clone() for one in some]) == 0
    assert apart(some, [torch.tensor([4.0, -1.0]), torch.tensor([1.0])]) == 0.25
    assert not apart(some, [torch.tensor([4.0, -1.0]), torch.tensor([float("nan")])]) <= 1


def test_conclusions_from_the_engine() -> None:
    def level(found: Finding) -> str:
        assert bool(found.fix) == (found.level != "pass"), found
        return found.level

    def of(again: float, split: float, recomputed: float) -> str:
        found = judge_backwards("cuda:0", again=again, split=split, recomputed=recomputed)
        return level(found)

    assert of(0, 0, 0) == "pass"
    assert of(1e-3, 1e-3, 2e-3) == "pass", "attention may add in any order"
    assert of(0, 1e-3, 0) == of(0, 0, 1e-3) == "warn"
    assert of(0, 0.5, 0) == of(0, 0, 0.5) == of(0.5, 0, 0) == "fail"
    assert of(float("nan"), 0, 0) == of(0, float("nan"), 0) == "fail"
    waited = RuntimeError("called a synchronizing CUDA operation")
    assert level(judge_syncs(waited, on_gpu=True)) == "slow"
    assert level(judge_syncs(None, on_gpu=True)) == "pass"
    assert level(judge_want_of_memory(torch.OutOfMemoryError("CUDA out of memory"), 8.0)) == "pass"
    assert level(judge_want_of_memory(torch.OutOfMemoryError("CUDA out of memory"), 7.0)) == "fail"
    assert level(judge_want_of_memory(RuntimeError("out of luck"), 8.0)) == "fail"
    assert level(judge_want_of_memory(None, 8.0)) == "fail"
    triggered = torch.AcceleratorError("CUDA error: device-side assert triggered")
    assert level(judge_assert(triggered)) == "pass"
    assert level(judge_assert(torch.AcceleratorError("CUDA error: unknown error"))) == "fail"
    assert level(judge_assert(IndexError("index 8 is out of bounds"))) == "fail"


def test_a_wait_is_reported_with_its_line() -> None:
    """It is the worker's own, whatever torch ran below it; a line of the check says nothing."""
    with pytest.raises(AttributeError) as within:
        learning_rate(None, 1, 1, 1.0)  # type: ignore[arg-type]
    assert "(worker/state/optimizer.py:" in judge_syncs(within.value, on_gpu=True).what
    with pytest.raises(TypeError) as own:
        apart([None], [None])  # type: ignore[list-item]
    assert "worker/" not in judge_syncs(own.value, on_gpu=True).what


def test_a_part_of_a_backward_that_is_missing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageRunner, "backward_weight", lambda self, number: None)
    (found,) = backwards(["cpu"])
    assert (found.level, "in two parts" in found.what) == ("fail", True)


def test_conclusions_from_a_block() -> None:
    def level(found: Finding) -> str:
        assert bool(found.fix) == (found.level != "pass"), found
        return found.level

    def rates(flops: float, update: float) -> Rates:
        return Rates(flops_per_s=flops, update_bytes_per_s=update, snapshot_bytes_per_s=2e10)

    h100, other = "NVIDIA H100 80GB HBM3", "NVIDIA L40S"
    well = judge_rates("cuda:0", h100, rates(450e12, 1.2e12))
    assert (level(well), "46% of the peak (MFU)" in well.what) == ("pass", True)
    assert level(judge_rates("cuda:0", h100, rates(150e12, 1.2e12))) == "slow"
    assert level(judge_rates("cuda:0", h100, rates(450e12, 0.2e12))) == "slow"
    unknown = judge_rates("cuda:0", other, rates(50e12, 0.2e12))
    assert (level(unknown), "MFU" in unknown.what) == ("pass", False), "it is not in the table"
    for chosen, on_gpu, expected in (
        (SDPBackend.FLASH_ATTENTION, True, "pass"),
        (SDPBackend.MATH, True, "slow"),
        (SDPBackend.MATH, False, "pass"),
    ):
        assert level(judge_attention("x", "heads", chosen, on_gpu=on_gpu)) == expected

    def reserved(held: int, beside: int) -> str:
        return level(judge_reserved("cuda:0", allocated=9 << 30, reserved=held, beside=beside))

    assert reserved(10 << 30, 1 << 29) == "pass"
    assert reserved(11 << 30, 1 << 29) == "warn"
    assert reserved(10 << 30, 2 << 30) == "warn"


def test_conclusions_from_products_in_float8() -> None:
    def level(gain: float, error: float, *, judged: bool = True) -> str:
        found = judge("x", gain=gain, errors={"output": 0.04, "other": error}, judged=judged)
        assert bool(found.fix) == (found.level != "pass"), found
        return found.level

    assert level(1.5, 0.06) == level(0.5, 0.06, judged=False) == "pass"
    assert level(1.0, 0.06) == "slow"
    assert level(1.5, 0.3) == level(1.5, float("nan")) == "fail"


def test_the_memory_of_a_killed_process_is_waited_for_with_a_deadline() -> None:
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


def test_conclusions_from_forks_and_killed_processes() -> None:
    def level(found: Finding) -> str:
        assert bool(found.fix) == (found.level != "pass"), found
        return found.level

    assert level(judge_forks(2.5, on_gpu=True)) == "pass"
    assert level(judge_forks(9.0, on_gpu=True)) == "slow"
    assert level(judge_forks(9.0, on_gpu=False)) == "pass", "how busy a CPU is says nothing"
    assert level(judge_killed(1 << 30, 0.4, "taken 1073741824")) == "pass"
    assert level(judge_killed(1 << 30, 9.0, "taken 1073741824")) == "slow"
    assert level(judge_killed(1 << 30, None, "taken 1073741824")) == "fail"
    unable = judge_killed(0, None, "torch.OutOfMemoryError: CUDA out of memory")
    assert (level(unable), "CUDA out of memory" in unable.what) == ("fail", True)
