"""Question of `oobleck plan`: profile and training parameters, from a job or profile file.

Owns which values come from the file, the flags or this machine. Must not know how plans are made.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import psutil

from oobleck.cli.jobs.job_file import PROFILE_FILE, read_job, read_profile, read_text
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import JobSpec, Precision, RecoveryPolicy
from oobleck.core.profile import Profile, parse_profile
from oobleck.core.schedules import Schedule
from oobleck.core.ties import Ties
from oobleck.core.units import count, parse_bytes
from oobleck.host.command import USAGE, CommandFailed
from oobleck.planner.profile.estimate import estimate_profile, flops_per_token
from oobleck.planner.profile.machine import GPUS, NOMINAL, Machine
from oobleck.planner.profile.memory import gpu_reserve_bytes, usable_bytes
from oobleck.planner.recovery.outlook import MTBF_S
from oobleck.planner.report.speed import Speed

Command = TypeVar("Command", bound=Callable[..., Any])

_NOMINAL_TIMES = (
    "times are for one nominal CPU core per worker: only their proportions are meaningful; --gpu "
    "NAME, or a measured profile, gives real ones"
)
_NO_SPEED = (
    "tokens/s and MFU are omitted: the number of tokens per sample of your own model is unknown"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """Values of the command line that override those of the files; None: not given."""

    gpus_per_node: int | None
    fault_tolerance: int | None
    global_batch: int | None
    microbatch: int | None
    memory_per_worker: str | None
    #: GPU whose published figures the estimates use.
    gpu: str | None = None


_OPTIONS = (
    click.option(
        "--workers-per-node",
        "--gpus-per-node",
        "gpus_per_node",
        type=click.IntRange(min=1),
        metavar="G",
        help="Workers of each node, one per GPU.  [default: the profile's, or 8 with --gpu, or 1]",
    ),
    click.option(
        "--fault-tolerance",
        type=click.IntRange(min=0),
        metavar="F",
        help="Losses to survive.  [default: the job's, or 1]",
    ),
    click.option(
        "--global-batch",
        type=click.IntRange(min=1),
        metavar="B",
        help="Samples per step.  [default: the job's]",
    ),
    click.option(
        "--microbatch",
        type=click.IntRange(min=1),
        metavar="b",
        help="Samples per micro-batch.  [default: the job's or the profile's]",
    ),
    click.option(
        "--memory-per-worker",
        metavar="SIZE",
        help="Memory of one GPU or worker; a margin stays free. A job's own limit takes "
        "precedence.  [default: the profile's limit, or that of --gpu, or this machine's RAM / G]",
    ),
    click.option(
        "--gpu",
        type=click.Choice(sorted(GPUS), case_sensitive=False),
        help="Estimate a job without a measured profile for nodes with 8 (or G) such GPUs, with "
        "NVLink and a network adapter for each, from published figures (docs/planning.md).",
    ),
)


def question_options(command: Command) -> Command:
    """Give a command the options that are the fields of `Flags`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Question that a plan answers."""

    profile: Profile
    fault_tolerance: int
    global_batch: int
    min_nodes: int = 1
    #: None: the best one.
    schedule: Schedule | None = None
    #: Whether the head shares the embedding's weight.
    tied: Ties = False
    #: Whether nodes may hold layers that they do not run.
    shadows: bool = False
    #: Answer to losses.
    policy: RecoveryPolicy = "templates"
    #: Mean time between losses of one node that is expected, seconds.
    mtbf_s: float = MTBF_S
    #: Notes on unused parts of the profile or the machines, and on the basis of times.
    notes: tuple[str, ...] = ()
    #: FLOPs of a step per token, tokens per sample, and peak FLOP/s of a worker; None: unknown.
    speed: Speed | None = None
    #: Where the speed is known: profiles of the job with and without compile and fp8, by the names
    #: of their speeds.
    otherwise: Mapping[str, Profile] = dataclasses.field(default_factory=dict)


def read_question(
    job_file: Path | None, profile_file: Path | None, overrides: Sequence[str], flags: Flags
) -> Question:
    """Read the question from a job file or a profile. Raises CommandFailed and UsageError."""
    try:
        if profile_file is not None and job_file is None:
            if overrides:
                raise click.UsageError("--set: replaces values of a job file; give one")
            return from_profile(profile_file, flags)
        if job_file is not None and profile_file is None:
            return from_job(job_file, overrides, flags)
    except ValueError as error:
        raise CommandFailed(str(error), USAGE) from error
    raise click.UsageError("give either a job file or --profile P.json")


def from_profile(path: Path, flags: Flags) -> Question:
    """Return the question for any stages that the profile allows. Raise ValueError or
    CommandFailed."""
    text = read_text(path, PROFILE_FILE)
    try:
        profile = parse_profile(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if flags.microbatch not in (None, profile.microbatch):
        raise ValueError(
            f"--microbatch {flags.microbatch}: {path} was measured with {profile.microbatch}, and "
            "times do not scale with it; profile again or leave the flag out"
        )
    if flags.gpu is not None:
        raise ValueError(f"--gpu {flags.gpu}: {path} has measured times; leave one of them out")
    if flags.global_batch is None:
        raise ValueError("--global-batch is missing; a profile does not have it")
    return Question(
        profile=_on_machines(profile, flags, limit=None),
        fault_tolerance=1 if flags.fault_tolerance is None else flags.fault_tolerance,
        global_batch=flags.global_batch,
    )


def from_job(path: Path, overrides: Sequence[str], flags: Flags) -> Question:
    """Return the question for a job, with `overrides`, as it would be trained. Raise ValueError or
    CommandFailed."""
    from oobleck.planner.search.firstplan import on_usable_gpus

    given = {
        f"{key}={value}": f"{flag} {value}"
        for key, flag, value in (
            ("fault_tolerance", "--fault-tolerance", flags.fault_tolerance),
            ("training.global_batch", "--global-batch", flags.global_batch),
            ("training.microbatch", "--microbatch", flags.microbatch),
        )
        if value is not None
    }
    job = read_job(path, (*overrides, *given), shown_as=given)
    machine = _machine(flags)
    if job.training.precision == "fp8" and machine.is_gpu and not machine.float8_flops_per_s:
        raise ValueError(
            f"training.precision: fp8 needs products in float8, which {machine.name} lacks; set "
            "it to bf16"
        )
    text = read_profile(job)
    if text and flags.gpu is not None:
        raise ValueError(
            f"--gpu {flags.gpu}: the job names a measured profile; --set profile=estimate leaves "
            "it out"
        )
    if text:
        limit = job.resources.memory_per_worker_bytes
        profile = _on_machines(parse_profile(text), flags, limit=limit)
    else:
        profile = _estimate(job, flags)
    min_nodes = job.resources.min_nodes_per_pipeline
    used = on_usable_gpus(profile, gpus=profile.gpus_per_node, min_nodes=min_nodes)
    speed = None if text else _speed(job, flags)
    return Question(
        profile=used,
        fault_tolerance=job.fault_tolerance,
        global_batch=job.training.global_batch,
        min_nodes=min_nodes,
        schedule=job.training.wanted_schedule,
        tied=job.model.ties,
        shadows=job.recovery.shadows == "auto",
        policy=job.recovery.policy,
        mtbf_s=job.recovery.mtbf_s,
        notes=(*_unused(profile, used), *notes_of_times(flags, speed, measured=bool(text))),
        speed=speed,
        otherwise={} if speed is None else _otherwise(job, flags, used.gpus_per_node),
    )


def _otherwise(job: JobSpec, flags: Flags, gpus_per_node: int) -> Mapping[str, Profile]:
    """Return the profiles of the job with and without compile and fp8, other than its own; none
    where it cannot be compiled."""
    had: Precision = "bf16" if job.training.narrow else job.training.precision
    ways: dict[str, tuple[bool, Precision]] = {
        "without_compile": (False, had),
        "with_compile": (True, had),
    }
    if had == "bf16" and _machine(flags).float8_flops_per_s:
        ways["with_fp8"] = (True, "fp8")
    found = {}
    for name, (compiles, precision) in ways.items():
        recipe = job.training.fp8_recipe if precision == "fp8" else "tensorwise"
        training = dataclasses.replace(
            job.training, compile=compiles, precision=precision, fp8_recipe=recipe
        )
        if training != job.training:
            try:
                profile = _estimate(dataclasses.replace(job, training=training), flags)
            except ValueError:
                continue
            found[name] = dataclasses.replace(profile, gpus_per_node=gpus_per_node)
    return found


def _estimate(job: JobSpec, flags: Flags) -> Profile:
    machine = _machine(flags)
    gpus = flags.gpus_per_node or machine.per_node
    memory = _memory(flags)
    if memory is None and machine.is_gpu:
        memory = machine.memory_bytes - gpu_reserve_bytes(gpus)
    elif memory is None:
        memory = psutil.virtual_memory().total // gpus
    return estimate_profile(
        job, gpus_per_node=gpus, memory_per_worker_bytes=memory, machine=machine
    )


def _machine(flags: Flags) -> Machine:
    return NOMINAL if flags.gpu is None else GPUS[flags.gpu]


def _speed(job: JobSpec, flags: Flags) -> Speed | None:
    """Return the speed of an estimate for a GPU; None for other machines and users' models."""
    machine = _machine(flags)
    if not (machine.is_gpu and isinstance(job.model, ModelSpec)):
        return None
    return Speed(
        flops_per_token=flops_per_token(job),
        tokens_per_sample=job.model.sequence_length,
        peak_flops_per_s=machine.peak(job.training),
    )


def notes_of_times(flags: Flags, speed: Speed | None, *, measured: bool) -> tuple[str, ...]:
    """Return notes on the basis of times and a missing speed. Empty if times are measured or a
    speed is known."""
    if measured or speed is not None:
        return ()
    return (_NOMINAL_TIMES,) if flags.gpu is None else (_NO_SPEED,)


def _on_machines(profile: Profile, flags: Flags, *, limit: int | None) -> Profile:
    """Return `profile` with the job's `limit`, or with the machines that the flags describe."""
    memory = _memory(flags)
    if limit is None:
        limit = profile.gpu_memory_bytes if memory is None else usable_bytes(memory)
    gpus = flags.gpus_per_node or profile.gpus_per_node
    return dataclasses.replace(profile, gpus_per_node=gpus, gpu_memory_bytes=limit)


def _memory(flags: Flags) -> int | None:
    if flags.memory_per_worker is None:
        return None
    try:
        memory = parse_bytes(flags.memory_per_worker)
    except ValueError as error:
        raise ValueError(f"--memory-per-worker: {error}") from error
    if memory < 2:  # half of it would be the margin
        raise ValueError(f"--memory-per-worker {flags.memory_per_worker}: give a size like 16GiB")
    return memory


def _unused(profile: Profile, used: Profile) -> tuple[str, ...]:
    """Return notes on the parts of `profile` that are not in `used`."""
    notes = []
    idle = profile.gpus_per_node - used.gpus_per_node
    if idle > 0:
        notes.append(
            f"{idle} of {count(profile.gpus_per_node, 'worker')} per node stay idle: the model's "
            f"{count(len(profile.layers), 'layer')} cannot form a pipeline that uses more than "
            f"{used.gpus_per_node}"
        )
    return tuple(notes)
