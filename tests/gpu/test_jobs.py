"""Checks that take a cluster, and the command that runs all checks."""

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import __main__ as command
from bench.gpu.__main__ import PART_S, PARTS, Check, chosen, run_part
from bench.gpu.jobs import (
    KILLS,
    drill_tests,
    judge_kills,
    judge_speed,
    judge_use,
    kills,
    speed,
    unit_tests,
    units,
)
from bench.gpu.page import NOT_SEEN, PAGE, filled, rows
from bench.gpu.pair import PAIR_S, own_host
from bench.gpu.transport import WAYS
from bench.support.daemons import CHECKOUT
from oobleck.core.orders import Finding


def level(found: Finding) -> str:
    assert bool(found.fix) == (found.level != "pass"), found
    return found.level


def test_conclusions_from_jobs() -> None:
    losses = [5.5, 5.25, 5.125]

    def change(stall_s: float, **phases: float) -> dict[str, object]:
        return {"stall_s": stall_s, "phases": phases}

    soon = [[change(1.0, rendezvous=0.25, first_step=0.5), change(9.0)], [change(1.0, detect=2.0)]]
    well = judge_kills(losses, [losses, [5.5, 5.25 + 1e-12, 5.125]], soon)
    assert level(well) == "pass"
    assert well.figures == {"detect_s": 2.0, "first_step_s": 0.5, "rendezvous_s": 0.25}
    assert "the longest phase is detect, 2.00 s" in well.what
    assert level(judge_kills(losses, [losses], [[change(30.0)], *soon])) == "slow"
    assert level(judge_kills(losses, [losses], [[], *soon])) == "warn"
    assert level(judge_kills(losses, [losses, [5.5, 5.25, 5.1251]], soon)) == "fail"
    assert level(judge_kills(losses, [[5.5, float("nan"), 5.125]], soon)) == "fail"
    assert level(judge_kills(losses, [losses[:2]], soon)) == "fail"
    assert level(judge_speed(95.0, 100.0, 120.0)) == "pass"
    assert level(judge_speed(60.0, 100.0, 120.0)) == "slow"
    assert level(judge_use("g1/0", 1 << 30, 1 << 30)) == "pass"
    assert level(judge_use("g1/0", 1 << 30, 5 << 28)) == "warn"


@pytest.mark.soak
def test_jobs_recover_from_kills_on_a_cluster_of_this_host() -> None:
    (found,) = kills(["cpu"])
    assert found.level in ("pass", "slow"), found
    assert f"{len(KILLS)} of {len(KILLS)} jobs recovered from kills" in found.what


@pytest.mark.soak
def test_tests_of_state_and_step_are_run_on_a_device() -> None:
    (found,) = units(["cpu"])
    assert found.level == "pass", found
    assert " passed" in found.what


def test_tests_that_checks_name_are_there() -> None:
    arguments = drill_tests("cpu")
    line = [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments]
    done = subprocess.run(line, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    found = {name for name in done.stdout.splitlines() if name.startswith("tests/")}
    for part in arguments[arguments.index("-k") + 1].split(" or "):
        words = part.strip("()").split(" and ")
        assert any(all(word in name for word in words) for name in found), part
    # Those that choose other transports would show nothing of NCCL.
    assert not any("links" in name or "staged" in name for name in found)
    for name in (*arguments, *unit_tests("cpu")):
        assert not name.startswith("tests/") or (Path(CHECKOUT) / name).is_file()


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")  # torch warns of much as it compiles
def test_the_speed_of_a_job_is_held_against_torch_alone() -> None:
    first, *use = speed(["cpu"])
    assert first.level in ("pass", "slow"), first
    assert all(value > 0 for value in first.figures.values())
    assert [one.check for one in use] == ["planned memory"]


def test_every_check_can_be_run() -> None:
    for checks in PARTS.values():
        for check in checks.values():
            module, _, function = check.run.partition(":")
            assert callable(getattr(importlib.import_module(f"bench.gpu.{module}"), function))
            assert check.limit_s <= 300


def test_limits_leave_room_for_those_of_the_checks_themselves() -> None:
    transport = PARTS["transport"]
    for name in ("messages", "receives", "polls", "refused", "groups", "recoveries"):
        assert transport[name].limit_s >= PAIR_S + 30
    assert PARTS["recovery"]["replicas"].limit_s >= PAIR_S + 30
    assert transport["ends"].limit_s >= len(WAYS) * PAIR_S + 30


def test_parts_and_checks_are_chosen() -> None:
    assert [part for part, _ in chosen([], [])] == [*PARTS]
    assert [(part, [*checks]) for part, checks in chosen([], ["kills", "lone"])] == [
        ("transport", ["lone"]),
        ("recovery", ["kills"]),
    ]
    assert [part for part, _ in chosen(["engine"], [])] == ["engine"]
    with pytest.raises(ValueError, match="--check none: there are"):
        list(chosen([], ["none"]))


def test_a_part_ends_within_its_time_whichever_checks_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, limits = 0.0, []

    def hangs(name: str, line: object, limit_s: float, environment: object) -> list[Finding]:
        nonlocal now
        now += limit_s
        limits.append(limit_s)
        return [Finding(check=name, level="fail", what="it hangs", fix="f")]

    monkeypatch.setattr(command, "run_check", hangs)
    checks = {name: Check("x:y", 300) for name in ("first", "second", "third")}
    found = list(run_part(checks, ["cuda:0"], {}, clock=lambda: now))
    assert limits == [300, PART_S - 300]
    assert (found[2].level, found[2].what.startswith("not tried")) == ("warn", True)
    assert "--check third" in found[2].fix


def test_checks_of_two_processes_want_two_gpus_or_share_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def run_check(name: str, line: list[str], limit_s: float, environment: object) -> list[Finding]:
        asked.append(line[line.index("run") + 1 :])
        return [Finding(check=name, level="pass", what="well")]

    monkeypatch.setattr(command, "run_check", run_check)
    one, two = Check("x:y", 9), Check("x:y", 9, processes=2)
    checks = {"one": one, "two": two, "three": dataclasses.replace(one, on_cpus=True)}

    def ran(devices: list[str], *, share: bool = False) -> list[str]:
        asked.clear()
        return [each.what for each in run_part(checks, devices, {}, share=share)]

    assert ran(["cuda:0"]) == ["well", "not tried: it needs 2 GPUs", "well"]
    assert asked == [["one", "cuda:0"], ["three", "cuda:0"]]
    assert ran(["cuda:0"], share=True)[1] == "well (two processes on one GPU)"
    assert asked[1] == ["two", "cuda:0", "cuda:0"]
    ran(["cuda:0", "cuda:1"])
    assert asked[1] == ["two", "cuda:0", "cuda:1"]
    ran(["cpu"])
    assert asked == [["three", "cpu"]]


def test_the_command_prints_findings_as_lines_of_json() -> None:
    line = [sys.executable, "-m", "bench.gpu", "engine", "--check", "errors", "--devices", "cpu"]
    done = subprocess.run(line, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    (found,) = map(json.loads, done.stdout.splitlines())
    assert (found["check"], found["level"]) == ("errors", "pass")
    assert found["figures"]["check_s"] > 0
    assert done.stderr.startswith("PASS  errors: ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--devices", "cpu", "transport"], "none that a CPU stands for"),
        (["--devices", "cpu", "--check", "lone"], "none that a CPU stands for"),
        (["--devices", "cpu", "--check", "errors", "recovery"], "have none of these checks"),
        (["page", "/nowhere"], "give what a run printed"),
        (["page", __file__], "give what a run printed"),
    ],
)
def test_what_can_show_nothing_is_refused_in_a_line(arguments: list[str], told: str) -> None:
    line = [sys.executable, "-m", "bench.gpu", *arguments]
    done = subprocess.run(line, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode > 0
    assert told in done.stderr.splitlines()[-1]


def test_the_doctor_is_a_part() -> None:
    line = [sys.executable, "-m", "bench.gpu", "doctor", "--devices", "cpu"]
    done = subprocess.run(line, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    found = [json.loads(each) for each in done.stdout.splitlines()]
    assert {"driver", "shared memory"} <= {each["check"] for each in found}
    assert done.returncode == any(each["level"] == "fail" for each in found)


def test_a_doctor_that_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(line: list[str], limit_s: float, environment: object) -> None:
        raise subprocess.TimeoutExpired(line, limit_s)

    monkeypatch.setattr(command, "completed", hangs)
    (found,) = command.run_doctor({})
    assert (found.check, found.level) == ("doctor", "fail")


#: Names of findings that are not their check's.
MORE = {"block": ["attention", "reserved"], "speed": ["planned memory"]}


def test_the_page_has_a_row_for_each_check() -> None:
    expected = [
        each for checks in PARTS.values() for name in checks for each in (name, *MORE.get(name, []))
    ]
    assert [name for name, _, _ in rows(PAGE.read_text())] == expected


def test_the_page_is_filled_by_findings() -> None:
    page = PAGE.read_text()
    findings = [
        Finding(check="machine", level="pass", what="1 x NVIDIA H100"),
        Finding(check="lone", level="pass", what="20 groups | connect"),
        Finding(check="ends", level="pass", what="killed: 0.2 s"),
        Finding(check="ends", level="slow", what="stopped: 9 s", fix="f"),
    ]
    seen = filled(page, findings)
    found, before = ({name: cell for name, _, cell in rows(text)} for text in (seen, page))
    assert found["lone"] == "PASS: 20 groups / connect"
    assert found["ends"] == "SLOW: stopped: 9 s (the worst of 2)"
    assert {name for name, cell in found.items() if cell != before[name]} == {"lone", "ends"}
    assert "Seen on 1 x NVIDIA H100." in seen
    assert filled(seen, []) == seen
    assert "Seen on" in page
    assert {*before.values()} == {NOT_SEEN} or "Seen on 1" in page


def test_each_process_of_a_shared_gpu_is_a_host_to_nccl() -> None:
    assert own_host("a")["NCCL_HOSTID"] != own_host("b")["NCCL_HOSTID"]
