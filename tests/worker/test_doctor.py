"""Checks of a GPU by torch that a CPU can stand for, and what is concluded from figures."""

from oobleck.cli.cluster.doctor import ALONE, TOGETHER
from oobleck.core.orders import Finding
from oobleck.worker.doctor import (
    CHECKS,
    judge_memory,
    judge_peers,
    judge_products,
    judge_speed,
    products,
    speed,
)

H100, PCIE = "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"
SLICE = "NVIDIA H100 80GB HBM3 MIG 1g"


def level(found: Finding) -> str:
    assert bool(found.fix) == (found.level != "pass"), found
    return found.level


def test_products_are_timed() -> None:
    (found,) = products(["cpu"])
    assert (found.level, "TFLOP/s in bf16" in found.what) == ("pass", True)


def test_a_step_is_timed_beside_one_of_torch_alone() -> None:
    (found,) = speed(["cpu"])
    assert found.level in ("pass", "slow"), "how busy a CPU is says nothing"
    own, share, torchs = (
        float(word.replace(",", ""))
        for word in found.what.replace("torch's ", "").split()
        if word.replace(",", "").replace(".", "").isdigit()
    )
    assert own > 0
    assert abs(own / torchs - share) < 0.02


def test_conclusions_from_memory() -> None:
    assert level(judge_memory("cuda:0", 79 << 30, 80 << 30, right=True)) == "pass"
    assert level(judge_memory("cuda:0", 60 << 30, 80 << 30, right=True)) == "warn"
    assert level(judge_memory("cuda:0", 79 << 30, 80 << 30, right=False)) == "fail"


def test_conclusions_from_rates() -> None:
    assert level(judge_products("cuda:0", H100, 600e12)) == "pass"
    assert level(judge_products("cuda:0", H100, 200e12)) == "slow"
    assert level(judge_peers(H100, 300e9)) == "pass"
    assert level(judge_peers(H100, 40e9)) == "slow"
    assert level(judge_speed("cuda:0", 95.0, 100.0)) == "pass"
    assert level(judge_speed("cuda:0", 60.0, 100.0)) == "slow"
    for other in (PCIE, SLICE):
        assert level(judge_products("cuda:0", other, 60e12)) == "pass", "it is not in the table"
        assert level(judge_peers(other, 15e9)) == "pass"


def test_the_command_names_every_check() -> None:
    assert {*ALONE, *TOGETHER} == {*CHECKS}
    assert sum({**ALONE, **TOGETHER}.values()) <= 600 - 120
