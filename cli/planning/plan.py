"""`oobleck plan`: the planner's answer, without a cluster."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import click

from oobleck.cli.options import form_options, set_option
from oobleck.cli.output.table import folded, table, terminal_width
from oobleck.cli.output.text import Form, document, is_data
from oobleck.cli.planning.question import (
    Flags,
    Question,
    question_options,
    read_question,
)
from oobleck.core.job.spec import RecoveryPolicy
from oobleck.core.schedules import SCHEDULES, Schedule
from oobleck.core.units import count, format_bytes
from oobleck.host.command import USAGE, CommandFailed
from oobleck.host.display import printable
from oobleck.planner.report.speed import speed_lines

if TYPE_CHECKING:
    from oobleck.planner.report.report import PlanReport


@click.command(
    epilog="Exit codes: 0 there is a plan, 2 wrong usage or no plan fits (the line says why)."
)
@click.argument("job_file", metavar="[JOB.yaml]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    metavar="P.json",
    help="Measured times and bytes per layer, in place of a job and estimates.",
)
@set_option
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    required=True,
    metavar="N",
    help="Nodes to plan for.",
)
@question_options
@click.option(
    "--schedule",
    type=click.Choice(["auto", *sorted(SCHEDULES)]),
    help="Order of compute in a pipeline.  [default: the job's, or auto: the best that fits]",
)
@click.option(
    "--lost",
    type=click.IntRange(min=0),
    default=0,
    metavar="k",
    help="Show also the answers to the loss of k nodes, one after the other, not at once: each "
    "hits the plan that answers the previous loss, before any follow-up of that plan.",
)
@click.option(
    "--policy",
    type=click.Choice(get_args(RecoveryPolicy)),
    help="Answer to losses, as recovery.policy in a job file (docs/policies.md).  [default: the "
    "job's, or templates with --profile]",
)
@click.option(
    "--slow",
    multiple=True,
    metavar="NODE[/SLOT]=RATE",
    help="Show also the answers if these workers have a share of their profiled speed, such as "
    "n1=0.5 or n2/0=0.25; may be repeated.",
)
@click.option(
    "--shadows/--no-shadows",
    default=None,
    help="If too few nodes hold a layer, other nodes may hold it without running it, so that fewer "
    "nodes survive as many losses.  [default: as in the job; not with --profile]",
)
@form_options("One JSON object: templates, plan, after_losses with --lost, and slow with --slow.")
def plan(
    job_file: Path | None,
    profile_file: Path | None,
    overrides: tuple[str, ...],
    nodes: int,
    schedule: str | None,
    lost: int,
    policy: str | None,
    slow: tuple[str, ...],
    shadows: bool | None,
    form: Form,
    **flags: Any,
) -> None:
    """Show the templates and the plan for JOB.yaml, or for a profile, on N nodes."""
    question = read_question(job_file, profile_file, overrides, Flags(**flags))
    if schedule is not None:
        wanted = None if schedule == "auto" else cast("Schedule", schedule)
        question = dataclasses.replace(question, schedule=wanted)
    if shadows is not None:
        question = dataclasses.replace(question, shadows=shadows)
    if policy is not None:
        question = dataclasses.replace(question, policy=cast("RecoveryPolicy", policy))
    report = _report(question, nodes, lost, slow)
    data = report.data()
    if question.speed is not None:
        workers = (nodes - len(data["plan"]["idle"])) * report.profile.gpus_per_node
        of_step = partial(question.speed.data, samples=question.global_batch, workers=workers)
        data["speed"] = of_step(step_s=data["plan"]["step_s"])
        for way, profile in question.otherwise.items():
            data["speed"][way] = of_step(step_s=report.first.step_s_by(profile))
    if question.notes:
        data["notes"] = list(question.notes)
    if is_data(form):
        click.echo(document(data, form))
        return
    width = None if form == "wide" else terminal_width()
    drawing = report.drawing() if width is None else report.drawing(width)
    click.echo(report_text(data, drawing, width))


def _report(
    question: Question,
    nodes: int,
    lost: int,
    slow: Sequence[str],
) -> "PlanReport":
    from oobleck.planner.report.report import make_report

    try:
        return make_report(
            question.profile,
            nodes=nodes,
            fault_tolerance=question.fault_tolerance,
            global_batch=question.global_batch,
            min_nodes=question.min_nodes,
            lost=lost,
            tied=question.tied,
            wanted=question.schedule,
            policy=question.policy,
            slow=slow,
            shadows=question.shadows,
            mtbf_s=question.mtbf_s,
        )
    except ValueError as error:  # also PlanInfeasible
        raise CommandFailed(str(error), USAGE) from error


def report_text(report: dict[str, Any], drawing: str, width: int | None = None) -> str:
    """Return the templates, the drawing of the plan, and the answers to losses."""
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
    heads = ("TEMPLATE NODES", "STAGES", "ITERATION", "LAYERS")
    parts = [
        table(heads, rows, width=width),
        *report.get("notes", []),
        drawing.rstrip() + (f"\n{speed_lines(report['speed'])}" if "speed" in report else ""),
    ]
    for loss in report.get("after_losses", []):
        parts += _loss(loss, width)
    if "slow" in report:
        parts += _slow(report["slow"], width)
    lines = printable("\n\n".join(parts)).split("\n")
    return "\n".join(folded(line, width, indent=2) for line in lines)


def _loss(loss: dict[str, Any], width: int | None) -> Iterator[str]:
    """Yield the answer to a loss, each policy's answer as a table, and the follow-ups."""
    policies, follow_ups = loss["policies"], loss["follow_ups"]
    if loss["plan"] is None:
        yield f"{loss['lost']} lost: the job waits for nodes: {loss['reason']}"
    else:
        idle = loss["plan"]["idle"]
        more = f", {count(len(idle), 'idle node')}" if idle else ""
        then = f", and {loss['then']} at a step boundary behind it" if loss["then"] else ""
        yield (
            f"{loss['lost']} lost: {loss['rule']}, then {policies[loss['policy']]['plan']}{more}, "
            f"{loss['plan']['step_s']:.4g} s per step{then} ({loss['reason']})"
        )
    lines = [
        *policies.items(),
        *((f"then {each['policy']}", each) for each in follow_ups),
    ]
    rows = [
        (
            name,
            f"{each['step_s']:.4g} s",
            format_bytes(each["moved_bytes"]),
            f"{each['stall_s']:.2g} s",
            each["can_lose"],
            each["plan"],
        )
        for name, each in lines
        if "refused" not in each
    ]
    if rows:
        yield table(("POLICY", "STEP", "MOVES", "IN", "CAN LOSE", "PLAN"), rows, width=width)
    yield from (
        f"{policy} has no answer: {each['refused']}"
        for policy, each in policies.items()
        if "refused" in each
    )
    yield from (
        f"no {each['policy']} behind it: {each['refused']}"
        for each in follow_ups
        if "refused" in each
    )


def _slow(slow: dict[str, Any], width: int | None) -> Iterator[str]:
    """Yield the answer to slow workers, and the candidates as a table."""
    rates = ", ".join(f"{worker} at {rate:g}" for worker, rate in slow["rates"].items())
    done = slow["taken"] or "nothing is done"
    yield (
        f"{rates} of the profiled speed: a step takes {slow['step_s']:.4g} s, "
        f"{slow['relative']:.2f} times as long; {done} ({slow['reason']})"
    )
    rows = [
        (
            each["rule"],
            f"{each['step_s']:.4g} s",
            f"{each['relative']:.2f}",
            format_bytes(each["moved_bytes"]),
            f"{each['stall_s']:.2g} s",
            each["can_lose"],
            each["plan"],
        )
        for each in slow["candidates"]
    ]
    if rows:
        heads = ("SLOW WORKERS", "STEP", "RELATIVE", "MOVES", "IN", "CAN LOSE", "PLAN")
        yield table(heads, rows, width=width)
