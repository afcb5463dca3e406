"""`oobleck doctor`: what is wrong with a host before its first job, and what mends it.

Each check of a device is a process of its own with a time-out, so that a hang is a result. Must not
know what the checks do.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

import click
import msgspec

from oobleck.cli.cluster import host_checks
from oobleck.cli.options import FAILED, json_option
from oobleck.host.device import find_gpus, worker_environment
from oobleck.host.display import inline
from oobleck.host.finding import Finding
from oobleck.host.gpu.choice import GpuReport, chosen_gpus
from oobleck.host.system.process import completed, with_parent

#: In this order, with seconds for each; the first ones need one GPU, the others two. Checks with a
#: limit of their own have half a minute beyond it, in which torch starts.
ALONE = {"forks": 90, "memory": 60, "killed": 80, "products": 60, "copies": 45, "waits": 45}
TOGETHER = {"peers": 45, "sums": 85, "aborts": 85, "groups": 85, "replicas": 85}
#: With jobs on a small cluster of this host.
WITH_JOBS = {"kills": 180, "speed": 170}
#: Of all, whichever hang.
MOST_S = 600.0
#: What a host without a GPU can be asked.
_ON_CPUS = {"forks": 90}
_HANGS = (
    "look at the kernel's log (dmesg | grep -i -e xid -e nvrm); a GPU that hangs wants a reset "
    "(nvidia-smi --gpu-reset) or a restart of the host"
)


@click.command(
    epilog="Exit codes: 0 nothing is wrong or slow beyond warnings, 1 a check has failed (or there "
    "is no GPU), 2 wrong usage."
)
@click.option("--gpu", is_flag=True, help="Look at this host's GPUs, in ten minutes at most.")
@click.option(
    "--gpus",
    metavar="GPU[,GPU...]",
    help="At these alone, as oobleck-agent --gpus.  [default: CUDA_VISIBLE_DEVICES, or all]",
)
@json_option("One JSON object: findings, each with check, level, what and fix; and seconds.")
def doctor(gpu: bool, gpus: str | None, as_json: bool) -> int:
    """Look for what is wrong with this host before its first job: each line is PASS, SLOW, WARN or
    FAIL, what was found, and what mends it. Needs no master."""
    if not gpu:
        raise click.UsageError("say what to look at: --gpu")
    began = time.monotonic()
    found = []
    try:
        for finding in _look(gpus):
            found.append(finding)
            if not as_json:
                click.echo(inline(str(finding)))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    failed = sum(finding.level == "fail" for finding in found)
    spent_s = time.monotonic() - began
    if as_json:
        findings = [msgspec.to_builtins(finding) for finding in found]
        click.echo(json.dumps({"findings": findings, "seconds": round(spent_s, 1)}, indent=2))
    else:
        levels = ("pass", "slow", "warn", "fail")
        counts = ", ".join(f"{sum(f.level == one for f in found)} {one}" for one in levels)
        click.echo(f"{counts}, in {spent_s:.0f} s")
    return FAILED if failed else 0


def _look(option: str | None) -> Iterator[Finding]:
    """Raises ValueError for a wrong choice of GPUs."""
    environment = {**worker_environment("cuda"), **os.environ}
    chosen = chosen_gpus(option, environment)
    yield from host_checks.look()
    try:
        report = find_gpus(environment, chosen)
    except ValueError as error:
        what, _, fix = str(error).removeprefix("--device cuda: ").partition("; ")
        fix = fix.removesuffix(", or use --device cpu")
        yield Finding(check="gpu", level="fail", what=what, fix=fix)
        yield from checks(_ON_CPUS, ["cpu"], environment)
        return
    yield _described(report)
    visible = ",".join(gpu.visible for gpu in report.gpus)
    devices = [f"cuda:{number}" for number in range(len(report.gpus))]
    seen = {**environment, "CUDA_VISIBLE_DEVICES": visible}
    several = {**TOGETHER, **WITH_JOBS} if len(devices) > 1 else {"kills": WITH_JOBS["kills"]}
    yield from checks({**ALONE, **several}, devices, seen)


def _described(report: GpuReport) -> Finding:
    names = sorted({gpu.name for gpu in report.gpus})
    what = (
        f"{len(report.gpus)} of {', '.join(names)}; torch for CUDA {report.cuda}, NCCL "
        f"{report.nccl or 'none'}"
    )
    if not report.nccl:
        fix = "install a torch that has NCCL; without it messages go through the host"
        return Finding(check="gpu", level="slow", what=what, fix=fix)
    if len(names) > 1:
        fix = "workers on slower ones hold the others up: choose one kind with --gpus"
        return Finding(check="gpu", level="warn", what=what, fix=fix)
    return Finding(check="gpu", level="pass", what=what)


def checks(
    limits: Mapping[str, float],
    devices: Sequence[str],
    environment: Mapping[str, str],
    most_s: float = MOST_S,
) -> Iterator[Finding]:
    """Run them in this order, each with its limit, and all of them within `most_s`."""
    until = time.monotonic() + most_s
    for name, limit_s in limits.items():
        left_s = until - time.monotonic()
        if left_s <= 0:
            what = f"not tried: those before it took {most_s:g} s"
            by_hand = f"python -m oobleck.worker.doctor {name} {' '.join(devices)}"
            yield Finding(check=name, level="warn", what=what, fix=f"run '{by_hand}'")
            continue
        command = [*with_parent("oobleck.worker.doctor"), name, *devices]
        yield from run_check(name, command, round(min(limit_s, left_s), 1), environment)


def run_check(
    name: str, command: Sequence[str], limit_s: float, environment: Mapping[str, str]
) -> Iterator[Finding]:
    """What a check says, and how it ended where it says nothing."""
    try:
        result = completed(command, limit_s, environment)
    except subprocess.TimeoutExpired:
        what = f"no answer within {limit_s:g} s: it hangs"
        yield Finding(check=name, level="fail", what=what, fix=_HANGS)
        return
    lines = result.stderr.decode(errors="replace").strip().splitlines()
    try:
        found = [msgspec.json.decode(line, type=Finding) for line in result.stdout.splitlines()]
    except msgspec.DecodeError:
        found, lines = [], result.stdout.decode(errors="replace").strip().splitlines()
    yield from found
    if result.returncode or not found:
        last = lines[-1] if lines else "it says nothing"
        what = f"ends with exit code {result.returncode}: {last}"
        fix = "look at the driver (nvidia-smi, dmesg) and at torch's build for CUDA"
        yield Finding(check=name, level="fail", what=what, fix=fix)
