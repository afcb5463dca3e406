"""What makes a GPU sick, what is only told, and what makes one slow."""

import pytest
from msgspec.structs import replace

from oobleck.host.gpu.health import LOOK, hindrance, troubles
from oobleck.host.gpu.sample import GpuProcess, GpuSample, Xid

BUS = "0000:3b:00.0"
WELL = GpuSample(
    bus=BUS,
    ecc_uncorrected=0,
    remap_pending=False,
    remap_failed=False,
    clock_reasons=0,
    clock_mhz=1980,
    most_clock_mhz=1980,
    temperature_c=54,
    processes=(GpuProcess(pid=7),),
)


def told(board: GpuSample = WELL, *codes: int) -> list[tuple[str, bool]]:
    found = troubles([board], [Xid(bus=BUS, code=code) for code in codes])
    assert all(trouble.fix for trouble in found)
    return [(trouble.what, trouble.sick) for trouble in found]


def test_a_gpu_that_is_well_has_no_trouble_and_that_one_says_nothing_is_told() -> None:
    assert told() == []
    assert told(GpuSample(bus=BUS, uuid="GPU-0")) == []
    assert told(GpuSample(bus=BUS)) == [("NVML can read nothing of it", False)]


@pytest.mark.parametrize("code", [46, 48, 62, 64, 74, 79, 95, 109, 119, 120, 140])
def test_errors_that_need_a_reset_make_it_sick(code: int) -> None:
    ((what, sick),) = told(WELL, code)
    assert what.startswith(f"Xid {code}, ")
    assert sick


@pytest.mark.parametrize("code", [63, 92, 94, 121])
def test_what_it_has_mended_is_only_told(code: int) -> None:
    ((what, sick),) = told(WELL, code)
    assert what.startswith(f"Xid {code}, ")
    assert not sick


@pytest.mark.parametrize("code", [13, 31, 43, 45, 69])
def test_errors_of_a_program_are_none_of_the_gpu(code: int) -> None:
    assert told(WELL, code) == []


def test_a_row_of_memory_that_is_replaced_is_told_and_one_that_is_not_makes_it_sick() -> None:
    mended = replace(WELL, ecc_uncorrected=1, remap_pending=True)
    assert told(mended) == [
        ("a bad row of memory is replaced with the next reset", False),
        ("1 memory errors that ECC could not correct, since it started", False),
    ]
    failed = replace(mended, remap_failed=True)
    assert told(failed)[0] == ("a bad row of memory could not be replaced", True)


def test_a_lost_one_is_sick_and_the_sick_come_first_each_error_once() -> None:
    assert told(GpuSample(bus=BUS, error="GPU is lost"), 94, 79, 79) == [
        ("GPU is lost", True),
        ("Xid 79, it has fallen off the bus", True),
        ("Xid 94, memory error that hit one program alone", False),
    ]
    (trouble,) = troubles([], [Xid(bus="", code=79)])
    assert not trouble.sick, "it may be another node's"
    assert str(trouble) == "GPU unknown: Xid 79, it has fallen off the bus; restart the host"


HOT = replace(WELL, clock_reasons=0x48, clock_mhz=1200, temperature_c=89)


@pytest.mark.parametrize(
    ("samples", "why"),
    [
        ([HOT] * LOOK, "too hot, 1200 of 1980 MHz, 89 °C"),
        ([WELL] * 2 + [HOT] * 4, "too hot, 1200 of 1980 MHz, 89 °C"),
        ([WELL] * 3 + [HOT] * 3, ""),
        ([replace(HOT, clock_reasons=0x88)], "the power supply holds it back, 1200 of 1980 MHz"),
        ([replace(HOT, clock_reasons=0x08)], "the hardware holds it back, 1200 of 1980 MHz"),
        (
            [replace(HOT, clock_reasons=0x06)],
            "at its power limit, clocks are set lower, 1200 of 1980 MHz",
        ),
        ([replace(HOT, clock_reasons=0x01)], ""),
        ([GpuSample(bus=BUS)], ""),
        ([], ""),
    ],
)
def test_what_holds_it_back_is_what_did_in_most_samples(samples: list[GpuSample], why: str) -> None:
    assert hindrance(samples, [7]) == why


def test_others_on_it_are_named_where_its_own_process_is() -> None:
    shared = replace(WELL, processes=(GpuProcess(pid=7), GpuProcess(pid=9)))
    assert hindrance([shared], [7, 8]) == "shared with process 9"
    assert hindrance([shared], [107]) == "", "the numbers are of another namespace"
