"""Acceptance tests of the engine on this host's GPUs.

    python -m bench.gpu [transport] [engine] [recovery] [doctor] [--check NAME]
                        [--devices cuda:0,cuda:1 | --devices cpu] [--share]
    python -m bench.gpu page FINDINGS

    transport   NCCL by what a worker's own communicators do
    engine      what a worker does on a device, and a job's speed and memory
    recovery    jobs whose workers are killed; tests of recovery over NCCL
    doctor      oobleck doctor --gpu, the health of the host
    page        write findings of such runs, lines of JSON, into docs/cuda.md

Without a part all are run, each within nine minutes. A check is a process of its own with a
time-out, so a hang is a finding. Each finding is a line of JSON on the standard output, and one to
read on the standard error; the exit code is 1 if one fails. Checks of two processes need two GPUs,
or --share: then both run on the first GPU, which shows everything but rates. --devices cpu: the
checks that a CPU can stand for.
"""

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.support.daemons import CHECKOUT
from oobleck.agent.gpus import versions
from oobleck.cli.cluster.doctor import run_check
from oobleck.core.orders import Finding
from oobleck.host.gpu.devices import GpuReport, chosen_gpus, find_gpus, worker_environment
from oobleck.host.system.process import completed, with_parent

#: For a part, whichever of its checks hang.
PART_S = 540.0


@dataclass(frozen=True, slots=True)
class Check:
    """A check: module and function, its longest time, its processes, whether a CPU can stand for
    a GPU in it."""

    run: str
    limit_s: float
    processes: int = 1
    on_cpus: bool = False


PARTS: Mapping[str, Mapping[str, Check]] = {
    "transport": {
        "lone": Check("transport:lone", 60),
        "launches": Check("transport:launches", 60),
        "refused": Check("transport:refused", 95),
        "messages": Check("transport:messages", 95, processes=2),
        "receives": Check("transport:receives", 95, processes=2),
        "polls": Check("transport:polls", 95, processes=2),
        "ends": Check("transport:ends", 220, processes=2),
        "recoveries": Check("transport:recoveries", 95, processes=2),
        "groups": Check("transport:groups", 95, processes=2),
    },
    "engine": {
        "forks": Check("engine:forks", 60, on_cpus=True),
        "starting": Check("engine:starting", 180, on_cpus=True),
        "killed": Check("engine:killed", 65),
        "waits": Check("engine:waits", 40),
        "backwards": Check("engine:backwards", 60, on_cpus=True),
        "syncs": Check("engine:syncs", 60, on_cpus=True),
        "errors": Check("engine:errors", 40, on_cpus=True),
        "block": Check("block:block", 90, on_cpus=True),
        "float8": Check("float8:float8", 90, on_cpus=True),
        "step": Check("step:step", 240, on_cpus=True),
        "speed": Check("jobs:speed", 240, on_cpus=True),
        "units": Check("jobs:units", 120, on_cpus=True),
    },
    "recovery": {
        "kills": Check("jobs:kills", 290, on_cpus=True),
        "replicas": Check("transport:replicas", 95, processes=2),
        "drill": Check("jobs:drill", 290),
    },
}
DOCTOR = "doctor"
#: Name of the finding that says what the others were seen on.
MACHINE = "machine"


def chosen(parts: Sequence[str], names: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Check]]]:
    """Yield the parts with those of their checks that are to be run. Raises ValueError."""
    known = {name for checks in PARTS.values() for name in checks}
    if unknown := {*names} - known:
        raise ValueError(f"--check {min(unknown)}: there are {', '.join(sorted(known))}")
    for part, checks in PARTS.items():
        wanted = {name: check for name, check in checks.items() if not names or name in names}
        if wanted and (not parts or part in parts):
            yield part, wanted


def run_part(
    checks: Mapping[str, Check],
    devices: Sequence[str],
    environment: Mapping[str, str],
    *,
    share: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Finding]:
    """Run the checks of a part in their order, all within `PART_S`."""
    until = clock() + PART_S
    for name, check in checks.items():
        given = devices
        if devices == ["cpu"]:
            if not check.on_cpus:
                continue
        elif check.processes > 1:
            if share:
                given = [devices[0]] * check.processes
            elif len(devices) < check.processes:
                what = f"not tried: it needs {check.processes} GPUs"
                fix = "both of its processes run on one GPU with --share"
                yield Finding(check=name, level="warn", what=what, fix=fix)
                continue
        began = clock()
        left_s = until - began
        if left_s <= 0:
            what = f"not tried: the checks before it took {PART_S:g} s"
            yield Finding(check=name, level="warn", what=what, fix=f"run it with --check {name}")
            continue
        command = [*with_parent("bench.gpu"), "run", name, *given]
        limit_s = round(min(check.limit_s, left_s), 1)
        words = " (two processes on one GPU)" if share and check.processes > 1 else ""
        for finding in run_check(name, command, limit_s, environment):
            figures = {**finding.figures, "check_s": round(clock() - began, 1)}
            yield msgspec.structs.replace(finding, what=f"{finding.what}{words}", figures=figures)


class _Report(msgspec.Struct):
    """The part of `oobleck doctor --json` that is read."""

    findings: list[Finding]


def run_doctor(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Run `oobleck doctor --gpu`."""
    command = [*with_parent("oobleck.cli.main"), "doctor", "--gpu", "--json"]
    try:
        done = completed(command, PART_S, environment)
    except subprocess.TimeoutExpired:
        what, fix = f"no answer within {PART_S:g} s", "run oobleck doctor --gpu by itself"
        yield Finding(check=DOCTOR, level="fail", what=what, fix=fix)
        return
    yield from msgspec.json.decode(done.stdout, type=_Report).findings


def described(report: GpuReport) -> Finding:
    """Describe the machine. `report`: its GPUs."""
    found = versions(report)
    names = ", ".join(sorted({gpu.name for gpu in report.gpus}))
    what = (
        f"{len(report.gpus)} x {names}, driver {found.driver}, torch {found.torch}, CUDA "
        f"{found.cuda}, NCCL {found.nccl}"
    )
    return Finding(check=MACHINE, level="pass", what=what)


def run_here(name: str, devices: Sequence[str]) -> None:
    """Run one check in this process."""
    import importlib

    check = next(checks[name] for checks in PARTS.values() if name in checks)
    module, _, function = check.run.partition(":")
    run: Callable[[Sequence[str]], Iterator[Finding]] = getattr(
        importlib.import_module(f"bench.gpu.{module}"), function
    )
    for finding in run(devices):
        _print(finding)


def _print(found: object) -> None:
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    sys.stdout.flush()


def _start(device: str) -> None:
    from bench.gpu.engine import start

    _print(start(device))


def _write_page(path: str) -> None:
    from bench.gpu.page import PAGE, filled

    try:
        lines = Path(path).read_bytes().splitlines()
        findings = [msgspec.json.decode(line, type=Finding) for line in lines]
    except (OSError, msgspec.DecodeError) as error:
        raise SystemExit(f"page {path}: give what a run printed: {error}") from error
    PAGE.write_text(filled(PAGE.read_text(), findings))


def main() -> int:
    """Run the parts or write the page; in a process of its own run one check, start on a device, or
    be one member of a pair."""
    match sys.argv[1:]:
        case ["run", name, *devices]:
            run_here(name, devices)
            return 0
        case ["start", device]:
            _start(device)
            return 0
        case ["page", findings]:
            _write_page(findings)
            return 0
        case ["member", *arguments]:
            from bench.gpu.pair import run_member
            from bench.gpu.transport import TASKS

            run_member(arguments, TASKS)
            return 0
        case _:
            return run_parts()


def run_parts() -> int:
    """Run the parts that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[*PARTS, DOCTOR, []])
    parser.add_argument("--check", action="append", default=[], metavar="NAME")
    parser.add_argument("--devices", metavar="DEVICE[,DEVICE]")
    parser.add_argument("--share", action="store_true")
    given = parser.parse_args()
    path = os.pathsep.join(filter(None, (CHECKOUT, os.environ.get("PYTHONPATH"))))
    environment = {**worker_environment("cuda"), **os.environ, "PYTHONPATH": path}
    devices = given.devices.split(",") if given.devices else []
    found: list[Iterator[Finding]] = []
    try:
        parts = list(chosen(given.parts, given.check))
        doctor = not given.check and (not given.parts or DOCTOR in given.parts)
        checks = [check for _, those in parts for check in those.values()]
        if not doctor and not any(devices != ["cpu"] or check.on_cpus for check in checks):
            raise ValueError("these parts have none of these checks, or none that a CPU stands for")
        if devices != ["cpu"]:
            report = find_gpus(environment, chosen_gpus(None, environment))
            devices = devices or [f"cuda:{number}" for number in range(len(report.gpus))]
            found.append(iter([described(report)]))
    except ValueError as error:
        parser.error(str(error).replace("--device ", "--devices "))
    found += [run_part(checks, devices, environment, share=given.share) for _, checks in parts]
    if doctor:
        found.append(run_doctor(environment))
    worst = 0
    for finding in itertools.chain.from_iterable(found):
        _print(finding)
        print(finding, file=sys.stderr)
        worst |= finding.level == "fail"
    return worst


if __name__ == "__main__":
    raise SystemExit(main())
