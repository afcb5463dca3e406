"""`oobleck plan`: what the planner would do, without a cluster."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from oobleck.cli.options import USAGE, json_option
from oobleck.host.command import CommandFailed

if TYPE_CHECKING:
    from oobleck.planner.plan import Schedule
    from oobleck.planner.profile import Profile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the plan is asked for, from a job file or from flags."""

    profile: "Profile"
    fault_tolerance: int
    global_batch: int
    min_nodes: int = 1
    #: None: the best one.
    schedule: "Schedule | None" = None
    #: The head shares the embedding's weight.
    tied: bool = False


@click.command(
    epilog="Exit codes: 0 there is a plan, 2 wrong usage or nothing fits (the line says why)."
)
@click.argument("job_file", metavar="[JOB.yaml]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    metavar="P.json",
    help="Measured times and bytes per layer, in place of a job and estimates.",
)
@click.option("--nodes", type=click.IntRange(min=1), required=True, metavar="N")
@click.option(
    "--gpus-per-node",
    type=click.IntRange(min=1),
    metavar="G",
    help="[default: the profile's, or 1]",
)
@click.option(
    "--fault-tolerance",
    type=click.IntRange(min=0),
    metavar="F",
    help="Losses to survive.  [default: the job's, or 1]",
)
@click.option(
    "--global-batch",
    type=click.IntRange(min=1),
    metavar="B",
    help="Samples per step.  [default: the job's]",
)
@click.option(
    "--microbatch",
    type=click.IntRange(min=1),
    metavar="b",
    help="Samples per micro-batch.  [default: the job's or the profile's]",
)
@click.option(
    "--memory-per-worker",
    metavar="SIZE",
    help="With a job that sets no limit itself.  [default: this machine's RAM / G]",
)
@click.option(
    "--schedule",
    type=click.Choice(["auto", "1f1b", "gpipe", "zb-h1"]),
    help="Order of compute in a pipeline.  [default: the job's, or auto: the best that fits]",
)
@click.option(
    "--lost",
    type=click.IntRange(min=0),
    default=0,
    metavar="k",
    help="Show also what follows the loss of k nodes, one after the other.",
)
@json_option("One JSON object: templates, plan, and after_losses with --lost.")
def plan(
    job_file: Path | None,
    profile_file: Path | None,
    nodes: int,
    gpus_per_node: int | None,
    fault_tolerance: int | None,
    global_batch: int | None,
    microbatch: int | None,
    memory_per_worker: str | None,
    schedule: str | None,
    lost: int,
    as_json: bool,
) -> None:
    """Show the templates and the plan for JOB.yaml, or for a profile, on N nodes."""
    if (job_file is None) == (profile_file is None):
        raise click.UsageError("give either a job file or --profile P.json")
    from oobleck.planner.report import make_report

    try:
        if profile_file is not None:
            question = from_profile(
                profile_file, gpus_per_node, fault_tolerance, global_batch, microbatch
            )
        else:
            assert job_file is not None
            question = from_job(
                job_file,
                gpus_per_node or 1,
                fault_tolerance,
                global_batch,
                microbatch,
                memory_per_worker,
            )
        if schedule is not None:
            wanted = None if schedule == "auto" else cast("Schedule", schedule)
            question = dataclasses.replace(question, schedule=wanted)
        report = make_report(
            question.profile,
            nodes=nodes,
            fault_tolerance=question.fault_tolerance,
            global_batch=question.global_batch,
            min_nodes=question.min_nodes,
            lost=lost,
            tied=question.tied,
            wanted=question.schedule,
        )
    except ValueError as error:  # also PlanInfeasible
        raise CommandFailed(str(error), USAGE) from error
    if as_json:
        from oobleck.cli import text

        click.echo(text.dump(report.data()))
    else:
        click.echo(report_text(report.data(), report.drawing()))


def from_profile(
    path: Path,
    gpus_per_node: int | None,
    fault_tolerance: int | None,
    global_batch: int | None,
    microbatch: int | None,
) -> Question:
    from oobleck.planner.profilefile import parse_profile

    try:
        profile = parse_profile(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if microbatch not in (None, profile.microbatch):
        raise ValueError(
            f"--microbatch {microbatch}: {path} was measured with {profile.microbatch}, and times "
            "do not scale with it; profile again or leave the flag out"
        )
    if global_batch is None:
        raise ValueError("--global-batch is missing; a profile does not say it")
    if gpus_per_node is not None:
        profile = dataclasses.replace(profile, gpus_per_node=gpus_per_node)
    return Question(
        profile=profile,
        fault_tolerance=1 if fault_tolerance is None else fault_tolerance,
        global_batch=global_batch,
    )


def from_job(
    path: Path,
    gpus_per_node: int,
    fault_tolerance: int | None,
    global_batch: int | None,
    microbatch: int | None,
    memory_per_worker: str | None,
) -> Question:
    import psutil

    from oobleck.cli.job import read_job, read_profile
    from oobleck.planner.estimate import estimate_profile
    from oobleck.planner.memory import budget_bytes
    from oobleck.planner.profilefile import parse_profile
    from oobleck.planner.units import parse_bytes

    given = {
        f"{key}={value}": f"{flag} {value}"
        for key, flag, value in (
            ("fault_tolerance", "--fault-tolerance", fault_tolerance),
            ("training.global_batch", "--global-batch", global_batch),
            ("training.microbatch", "--microbatch", microbatch),
        )
        if value is not None
    }
    job = read_job(path, tuple(given), shown_as=given)
    try:
        memory = (
            parse_bytes(memory_per_worker)
            if memory_per_worker
            else psutil.virtual_memory().total // gpus_per_node
        )
    except ValueError as error:
        raise ValueError(f"--memory-per-worker: {error}") from error
    if text := read_profile(job):
        profile = dataclasses.replace(
            parse_profile(text),
            gpus_per_node=gpus_per_node,
            gpu_memory_bytes=budget_bytes(job.resources.memory_per_worker_bytes, memory),
        )
    else:
        profile = estimate_profile(job, gpus_per_node=gpus_per_node, memory_per_worker_bytes=memory)
    return Question(
        profile=profile,
        fault_tolerance=job.fault_tolerance,
        global_batch=job.training.global_batch,
        min_nodes=job.resources.min_nodes_per_pipeline,
        schedule=job.training.wanted_schedule,
        tied=job.model.tied,
    )


def report_text(report: dict[str, Any], drawing: str) -> str:
    """The drawing between the templates that it is made of and what follows losses."""
    from oobleck.cli import text

    rows = [
        (
            template["nodes"],
            len(template["stages"]),
            f"{template['iteration_s']:.4g} s",
            " ".join(
                f"{stage['first_layer']}..{stage['last_layer']}" for stage in template["stages"]
            ),
        )
        for template in report["templates"]
    ]
    parts = [
        text.table(("TEMPLATE NODES", "STAGES", "ITERATION", "LAYERS"), rows),
        drawing.rstrip(),
    ]
    for loss in report.get("after_losses", []):
        if loss["plan"] is None:
            parts.append(f"{loss['lost']} lost: the job waits for nodes: {loss['reason']}")
            continue
        shape = " + ".join(str(p["template_nodes"]) for p in loss["plan"]["pipelines"])
        parts.append(
            f"{loss['lost']} lost: {loss['rule']}, then pipelines of {shape} nodes, "
            f"{loss['plan']['step_s']:.4g} s per step ({loss['reason']})"
        )
    return "\n\n".join(parts)
