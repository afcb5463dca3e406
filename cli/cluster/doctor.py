"""`oobleck doctor`: problems of a cluster, or of a host before its first job, and their fixes.

Owns the command, the checks of a host's GPUs, and how findings are shown. Each check of a device is
a process of its own with a time-out, so that a hang is a result. Must not know what the checks do.
"""

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import click
import msgspec

from oobleck.cli import options
from oobleck.cli.client import MasterClient
from oobleck.cli.options import node_names
from oobleck.cli.output.text import Form, document, is_data
from oobleck.core.orders import About, Finding, Look, Looked, Place
from oobleck.host.command import FAILED, UNREACHABLE, CommandFailed
from oobleck.host.display import inline
from oobleck.host.doctor import gpus as host_gpus
from oobleck.host.doctor.process import Doctor
from oobleck.host.gpu.devices import GpuReport, chosen_gpus, find_gpus, worker_environment
from oobleck.host.ipc.endpoint import DEFAULT_MASTER, Endpoint
from oobleck.host.system.process import completed, with_parent
from oobleck.proto import control_pb2 as pb

#: Checks in their order, with the seconds that each may take: all of them fit into the ten minutes
#: that --gpu promises, after two in which GPUs are looked for.
ALONE = {"memory": 60, "products": 60, "copies": 60, "speed": 240}
TOGETHER = {"peers": 45}
_HANGS = (
    "look at the kernel's log (dmesg | grep -i -e xid -e nvrm); a hanging GPU needs a reset "
    "(nvidia-smi --gpu-reset) or a restart of the host"
)


@click.command(
    epilog="Exit codes: 0 no check has failed, 1 a check has failed (or, with "
    "--gpu, there is no GPU), 2 wrong usage, 3 no such node, 4 no master answers, 5 denied."
)
@click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="NODE",
    shell_complete=node_names,
    help="Check only this node; may be repeated.",
)
@click.option(
    "--data",
    multiple=True,
    metavar="PATH",
    help="Check that PATH is the same on all nodes, besides the data of jobs; may be repeated.",
)
@click.option(
    "--checkpoints",
    multiple=True,
    metavar="DIR",
    help="Check that all nodes share DIR, and its speed, besides the folders of jobs.",
)
@click.option(
    "--pairs",
    is_flag=True,
    help="Send 16 MiB each way between nodes to measure the rate, even while a job trains.",
)
@click.option("--here", is_flag=True, help="Check only this host, without a master.")
@click.option("--gpu", is_flag=True, help="Check this host's GPUs, in ten minutes at most.")
@click.option(
    "--gpus",
    metavar="GPU[,GPU...]",
    help="Check only these, as oobleck-agent --gpus.  [default: CUDA_VISIBLE_DEVICES, or all]",
)
@click.option(
    "--master",
    envvar="OOBLECK_MASTER",
    show_envvar=True,
    metavar="HOST:PORT",
    help=f"The master to ask.  [default: {DEFAULT_MASTER}, or this host if none answers]",
)
@options.credential_options
@options.form_options("One JSON object: findings (check, level, what, fix, node, ...) and seconds.")
@click.pass_context
def doctor(
    ctx: click.Context,
    nodes: tuple[str, ...],
    data: tuple[str, ...],
    checkpoints: tuple[str, ...],
    pairs: bool,
    here: bool,
    gpu: bool,
    gpus: str | None,
    master: str | None,
    form: Form,
) -> int:
    """Check the hosts of a cluster, and the network between them, for problems.

    It checks names and routes, ports, clocks, versions, packet sizes, speed of links and disks,
    shared folders, memory, limits and GPUs.

    Each line is PASS, SLOW, WARN or FAIL, then the place, the finding and the fix. Passed checks of
    nodes are shown with -o wide. While a job trains, little is sent and written.
    """
    if gpu:
        if nodes or pairs or here or data or checkpoints:
            raise click.UsageError(
                "--gpu: checks only this host's GPUs; leave the other options out"
            )
        return _show_gpus(gpus, form)
    if gpus is not None:
        raise click.UsageError("--gpus: requires --gpu; give both")
    question = Question(nodes=nodes, data=data, checkpoints=checkpoints, pairs=pairs)
    if here:
        if nodes or pairs:
            raise click.UsageError("--here: checks only this host; leave --node and --pairs out")
        return show(of_host(question), form)
    endpoint = options.endpoint(ctx, ctx.command.params[0], master or DEFAULT_MASTER)
    assert endpoint is not None, "an address was given"
    try:
        return show(of_cluster(endpoint, question), form)
    except CommandFailed as failed:
        if master is not None or nodes or pairs or failed.exit_code != UNREACHABLE:
            raise
    click.echo(f"no master at {endpoint}: checking only this host", err=True)
    return show(of_host(question), form)


def _show_gpus(gpus: str | None, form: Form) -> int:
    try:
        # All lines: an operator who checks one host wants to see that it was checked.
        return show(_look(gpus), "wide" if form == "table" else form)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _look(option: str | None) -> Iterator[Finding]:
    """Yield findings about this host's GPUs. Raise ValueError for a wrong choice of GPUs."""
    environment = {**worker_environment("cuda"), **os.environ}
    chosen = chosen_gpus(option, environment)
    yield from host_gpus.look()
    try:
        report = find_gpus(environment, chosen)
    except ValueError as error:
        what, _, fix = str(error).removeprefix("--device cuda: ").partition("; ")
        fix = fix.removesuffix(", or use --device cpu")
        yield Finding(check="gpu", level="fail", what=what, fix=fix)
        return
    yield _described(report)
    visible = ",".join(gpu.visible for gpu in report.gpus)
    devices = [f"cuda:{number}" for number in range(len(report.gpus))]
    seen = {**environment, "CUDA_VISIBLE_DEVICES": visible}
    for name, limit_s in {**ALONE, **(TOGETHER if len(devices) > 1 else {})}.items():
        command = [*with_parent("oobleck.worker.doctor"), name, *devices]
        yield from run_check(name, command, limit_s, seen)


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
        fix = "workers on slower GPUs delay the others: choose one kind with --gpus"
        return Finding(check="gpu", level="warn", what=what, fix=fix)
    return Finding(check="gpu", level="pass", what=what)


def run_check(
    name: str, command: Sequence[str], limit_s: float, environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Run a check and yield its findings. If it failed or found nothing, yield one more about its
    end."""
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
        last = lines[-1] if lines else "no output"
        what = f"ends with exit code {result.returncode}: {last}"
        fix = "check the driver (nvidia-smi, dmesg) and torch's build for CUDA"
        yield Finding(check=name, level="fail", what=what, fix=fix)


# ---- questions and answers


LEVELS = ("pass", "slow", "warn", "fail")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    nodes: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()
    pairs: bool = False


def of_cluster(endpoint: Endpoint, question: Question) -> Iterator[Finding]:
    """Yield the findings about the cluster. Raise CommandFailed."""
    request = pb.ExamineRequest(
        nodes=question.nodes,
        data=[os.path.abspath(path) for path in question.data],
        checkpoints=[_absolute(path) for path in question.checkpoints],
        pairs=question.pairs,
    )
    with MasterClient(endpoint) as connection:
        connection.nodes()  # fails at once if there is no master
        yield from connection.examine(request)


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)


def of_host(question: Question) -> Iterator[Finding]:
    """Yield the findings of this host, without a master."""
    own = [Place(path=os.environ.get("TMPDIR", "/tmp"), use="own")]
    own.append(Place(path=os.path.expanduser("~/.cache/oobleck"), use="own"))
    places = [Place(path=os.path.abspath(path), use="data") for path in question.data]
    places += [Place(path=_absolute(path), use="checkpoints") for path in question.checkpoints]
    about = About(places=tuple(own), variables=dict(os.environ))

    async def look() -> Sequence[Finding]:
        doctor = Doctor(lambda: about, None)
        try:
            answer = await doctor.ask(Look(places=tuple(places)))
        finally:
            await doctor.close()
        if isinstance(answer, Looked):
            return answer.findings
        what = getattr(answer, "reason", "the checking process gave another answer")
        fix = "check what occupies this host (top, dmesg)"
        return [Finding(check="doctor", level="fail", what=what, fix=fix)]

    yield from asyncio.run(look())


def show(found: Iterator[Finding], form: Form) -> int:
    """Print findings as they arrive, and their number; return the exit code. Raise CommandFailed,
    and what `found` raises."""
    began = time.monotonic()
    known = []
    for finding in found:
        known.append(finding)
        if not is_data(form) and (form == "wide" or is_told(finding)):
            click.echo(inline(str(finding)))
    spent_s = time.monotonic() - began
    if is_data(form):
        findings = [msgspec.to_builtins(finding) for finding in known]
        click.echo(document({"findings": findings, "seconds": round(spent_s, 1)}, form))
    else:
        click.echo(f"{counted(known)}, in {spent_s:.0f} s")
    return FAILED if any(finding.level == "fail" for finding in known) else 0


def is_told(finding: Finding) -> bool:
    """Return whether a narrow listing shows the finding. Passed checks of nodes, of which there may
    be thousands, are only in a wide one."""
    return finding.level != "pass" or not finding.node


def counted(findings: Sequence[Finding]) -> str:
    return ", ".join(f"{sum(f.level == one for f in findings)} {one}" for one in LEVELS)
