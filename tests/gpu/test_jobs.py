"""Checks that take a cluster, and the command that runs all checks."""

import dataclasses
import importlib
import json
import subprocess
import sys

import pytest

from bench.gpu import __main__ as command
from bench.gpu.__main__ import PART_S, PARTS, Check, chosen, run_part
from bench.gpu.jobs import KILLS, judge_kills, judge_speed, judge_use, kills, speed
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
    for name in ("messages", "groups", "recoveries"):
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

    assert ran(["cuda:0"]) == ["well", "well"]
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


def test_each_process_of_a_shared_gpu_is_a_host_to_nccl() -> None:
    assert own_host("a")["NCCL_HOSTID"] != own_host("b")["NCCL_HOSTID"]
