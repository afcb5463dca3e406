"""`oobleck simulate`: a trace of failures replayed with the planner, without a cluster."""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from oobleck.cli.options import Seconds, form_options, set_option
from oobleck.cli.planning.question import (
    Flags,
    Question,
    question_options,
    read_question,
)
from oobleck.core.job.spec import OF_SEVERAL_HOLDERS, RecoveryPolicy
from oobleck.core.profile import MOST_NODES
from oobleck.core.units import comma_separated
from oobleck.host.command import USAGE, CommandFailed

if TYPE_CHECKING:
    from oobleck.cli.output.text import Form
    from oobleck.planner.simulate.compare import Comparison
    from oobleck.planner.simulate.costs import Costs
    from oobleck.planner.simulate.racks import Racks
    from oobleck.planner.simulate.replay import Setting
    from oobleck.planner.simulate.search import Point
    from oobleck.planner.simulate.shapes import Shapes
    from oobleck.planner.simulate.trace import Trace

#: Seconds of silence before progress is shown.
_QUIET_S = 2.0
#: Figures that --search prints for each setting, beside its objective.
_SEARCHED = ("samples_per_s", "goodput", "returns", "lost_guarantee_s")
_POLICIES: tuple[RecoveryPolicy, ...] = get_args(RecoveryPolicy)


_EPILOG = """\b
Example of a SPEC:
  mtbf=30d,repair=20h,nodes=1000,rack=16,rack_mtbf=1y,days=365,seed=1

Exit codes: 0 replayed, also if no policy can go on to the end (the lines below the table say when
and why); 2 wrong usage, a wrong trace, or no plan fits."""


@click.command(epilog=_EPILOG)
@click.argument("job_file", metavar="[JOB.yaml]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(path_type=Path),
    metavar="T.csv",
    help="Rows of time_s,event,node[,value]; event is add, remove, slow (value: the share of the "
    "profiled speed), notice (value: seconds until the remove), or repair (of a worker process). "
    "Rows of one time are one event.",
)
@click.option(
    "--make",
    metavar="SPEC",
    help="Write a trace to standard output, and replay nothing; an example is below. The same SPEC "
    "gives the same trace.",
)
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
    metavar="N",
    help="Nodes of the full cluster, which the job is planned for and results are compared with.",
)
@question_options
@click.option(
    "--policy",
    "policies",
    metavar="all|NAME[,NAME...]",
    default="auto",
    show_default=True,
    help=f"Policies to replay the trace with: {', '.join(_POLICIES)}.",
)
@click.option(
    "--costs",
    "costs_file",
    type=click.Path(path_type=Path),
    metavar="C.json",
    help="Costs of interruptions, as a JSON object (docs/simulation.md has names and defaults).",
)
@click.option(
    "--spares",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="K",
    help="Live nodes that stay outside the job until it loses one: it trains on N - K at most.",
)
@click.option(
    "--racks",
    "racks_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="CSV file with the columns node,rack. A row of the trace may then name a rack in place of "
    "a node, and hits all of its nodes at once.",
)
@click.option(
    "--search",
    "searched",
    is_flag=True,
    help="Search from the given values for the fault tolerance, spares, fewest nodes of a "
    "pipeline, and interval of checkpoints with the most samples, or with --price the cheapest.",
)
@click.option(
    "--plot",
    "plot_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="OUT.png",
    help="Plot samples and live nodes over time. Needs the package matplotlib: pip install "
    "'oobleck-cluster[plot]'.",
)
@click.option(
    "--until", type=Seconds(), metavar="TIME", help="End of the replay.  [default: the last row]"
)
@click.option(
    "--price",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="Price of a node for an hour: tell also what the samples cost.",
)
@form_options("One JSON object: policies, bounds, and the costs that were used.")
def simulate(
    job_file: Path | None,
    trace_file: Path | None,
    make: str | None,
    profile_file: Path | None,
    overrides: tuple[str, ...],
    nodes: int | None,
    policies: str,
    costs_file: Path | None,
    spares: int,
    racks_file: Path | None,
    searched: bool,
    plot_file: Path | None,
    until: float | None,
    price: float | None,
    form: "Form",
    **flags: Any,
) -> None:
    """Replay a trace of failures for JOB.yaml, or for a profile, and compare recovery policies."""
    from oobleck.cli.output.table import terminal_width
    from oobleck.cli.output.text import document, is_data
    from oobleck.planner.simulate.costs import data as costs_data
    from oobleck.planner.simulate.trace import LATEST_S

    if make is not None:
        _make(make)
        return
    if trace_file is None:
        raise click.UsageError("give --trace T.csv, or --make SPEC to write one")
    if nodes is None:
        raise click.UsageError("--nodes is missing: the nodes of the full cluster")
    if nodes > MOST_NODES:
        raise click.UsageError(f"--nodes {nodes}: give at most {MOST_NODES}")
    if until is not None and until > LATEST_S:
        raise click.UsageError(f"--until: {until:g} s is too late; give at most {LATEST_S:g} s")
    if price is not None and not math.isfinite(price):
        raise click.UsageError(f"--price {price}: give a finite number")
    if spares >= nodes:
        raise click.UsageError(f"--spares {spares}: give fewer than --nodes {nodes}")
    chosen = _chosen(policies)
    if searched and len(chosen) > 1:
        raise click.UsageError("--search searches under one policy; give --policy NAME")
    if plot_file is not None:
        _check_plot(plot_file)
    question = read_question(job_file, profile_file, overrides, Flags(**flags))
    notes = list(question.notes)
    if chosen == _POLICIES and not question.fault_tolerance:
        chosen = [policy for policy in chosen if policy not in OF_SEVERAL_HOLDERS]
        left_out = comma_separated(sorted(OF_SEVERAL_HOLDERS))
        notes.append(f"no job without fault tolerance may have {left_out}: they are left out")
    _allowed(chosen, question.fault_tolerance)
    racks = {} if racks_file is None else _racks(racks_file)
    case = _Case(
        path=trace_file,
        trace=_trace(trace_file, racks),
        racks=racks,
        question=question,
        nodes=nodes,
        until_s=until,
        costs=_costs(costs_file),
    )
    point = case.point(spares)
    setting = case.setting(point)
    found = _compare(setting, chosen)
    data: dict[str, Any] = {**found.data(price), "costs": costs_data(case.costs)}
    if searched:
        data["search"] = _search(case, point, chosen[0], price)
    if notes:
        data["notes"] = notes
    if plot_file is not None:
        from oobleck.cli.planning.plot import plot_comparison

        plot_comparison(found, setting, plot_file)
    if is_data(form):
        click.echo(document(data, form))
        return
    click.echo(simulation_text(data, None if form == "wide" else terminal_width()))


def _make(spec: str) -> None:
    from oobleck.planner.simulate.made import make_rows, parse_make
    from oobleck.planner.simulate.trace import format_trace

    try:
        wanted = parse_make(spec)
    except ValueError as error:
        raise CommandFailed(f"--make {error}", USAGE) from error
    click.echo(format_trace(make_rows(wanted)), nl=False)


def _chosen(text: str) -> Sequence[RecoveryPolicy]:
    names = [name.strip() for name in text.split(",")]
    if names == ["all"]:
        return _POLICIES
    known: dict[str, RecoveryPolicy] = {policy: policy for policy in _POLICIES}
    for name in names:
        if name not in known:
            raise CommandFailed(
                f"--policy {name!r}: no such policy; give all, or some of {', '.join(known)}", USAGE
            )
    return [known[name] for name in dict.fromkeys(names)]


def _allowed(policies: Sequence[RecoveryPolicy], fault_tolerance: int) -> None:
    """Refuse policies that no job of this fault tolerance may have."""
    for policy in policies:
        if policy in OF_SEVERAL_HOLDERS and not fault_tolerance:
            raise CommandFailed(
                f"--policy {policy}: it needs other nodes that hold the same layers; give a fault "
                "tolerance of 1 or more, or another policy",
                USAGE,
            )


def _trace(path: Path, racks: "Racks") -> "Trace":
    from oobleck.cli.jobs.job_file import TextFile, read_text
    from oobleck.planner.simulate.racks import with_racks
    from oobleck.planner.simulate.trace import parse_rows, trace_of

    wanted = TextFile(
        what="a trace of rows time_s,event,node[,value]", most_mib=256, field="--trace "
    )
    text = read_text(path, wanted)
    try:
        return trace_of(with_racks(parse_rows(text), racks))
    except ValueError as error:
        raise CommandFailed(f"--trace {path}: {error}", USAGE) from error


def _racks(path: Path) -> "Racks":
    from oobleck.cli.jobs.job_file import TextFile, read_text
    from oobleck.planner.simulate.racks import parse_racks

    text = read_text(path, TextFile(what="lines of node,rack", most_mib=16, field="--racks "))
    try:
        return parse_racks(text)
    except ValueError as error:
        raise CommandFailed(f"--racks {path}: {error}", USAGE) from error


def _costs(path: Path | None) -> "Costs":
    from oobleck.cli.jobs.job_file import TextFile, read_text
    from oobleck.planner.simulate.costs import Costs, parse_costs

    if path is None:
        return Costs()
    wanted = TextFile(what="a JSON object of costs", most_mib=1, field="--costs ")
    text = read_text(path, wanted)
    try:
        return parse_costs(text)
    except ValueError as error:
        raise CommandFailed(f"--costs {path}: {error}", USAGE) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """Trace and job that are replayed, with settings that --search may change."""

    path: Path
    trace: "Trace"
    racks: "Racks"
    question: Question
    nodes: int
    until_s: float | None
    costs: "Costs"
    #: Plans by fault tolerance and fewest nodes of a pipeline.
    shapes: dict[tuple[int, int], "Shapes"] = field(default_factory=dict)

    def point(self, spares: int) -> "Point":
        """Return the settings that were given."""
        from oobleck.planner.simulate.search import Point

        return Point(
            fault_tolerance=self.question.fault_tolerance,
            spares=spares,
            min_nodes=self.question.min_nodes,
            checkpoint_every_s=self.costs.checkpoint_every_s,
        )

    def setting(self, point: "Point") -> "Setting":
        """Return the setting of replays. Raises CommandFailed."""
        from oobleck.core.errors import PlanInfeasible
        from oobleck.planner.simulate.compare import set_up

        try:
            return set_up(
                self.trace,
                self._shapes(point),
                nodes=self.nodes,
                costs=replace(self.costs, checkpoint_every_s=point.checkpoint_every_s),
                until_s=self.until_s,
                spares=point.spares,
                mtbf_s=self.question.mtbf_s,
                racks=self.racks,
            )
        except PlanInfeasible as error:
            raise CommandFailed(str(error), USAGE) from error
        except ValueError as error:
            raise CommandFailed(f"--trace {self.path}: {error}", USAGE) from error

    def _shapes(self, point: "Point") -> "Shapes":
        from oobleck.planner.recovery.terms import Terms
        from oobleck.planner.search.firstplan import node_specification
        from oobleck.planner.simulate.shapes import Shapes

        key = point.fault_tolerance, point.min_nodes
        if key in self.shapes:
            return self.shapes[key]
        question, profile = self.question, self.question.profile
        if question.global_batch % profile.microbatch:
            raise CommandFailed(
                f"--global-batch {question.global_batch}: it must be a multiple of the micro-batch "
                f"({profile.microbatch})",
                USAGE,
            )
        sizes = node_specification(
            profile,
            nodes=max(self.nodes, *(live for _, live in self.trace.live())),
            fault_tolerance=point.fault_tolerance,
            min_nodes=point.min_nodes,
            shadows=question.shadows,
        )
        terms = Terms(
            profile=profile,
            sizes=sizes,
            fault_tolerance=point.fault_tolerance,
            tied=question.tied,
            schedule=question.schedule,
            shadows=question.shadows,
        )
        microbatches = question.global_batch // profile.microbatch
        return self.shapes.setdefault(key, Shapes(terms, microbatches=microbatches))


def _search(
    case: _Case, start: "Point", policy: RecoveryPolicy, price: float | None
) -> Mapping[str, Any]:
    """Return the best settings and how much worse others are, as plain data."""
    from oobleck.planner.simulate.compare import node_seconds
    from oobleck.planner.simulate.replay import replay
    from oobleck.planner.simulate.search import NOTHING, Point, Tried, search

    objective = "samples_per_s" if price is None else "cost_per_million_samples"
    until_s = case.trace.end_s if case.until_s is None else case.until_s
    tell, clear = _progress(until_s)

    def attempt(point: Point) -> Tried:
        try:
            _allowed([policy], point.fault_tolerance)
            setting = case.setting(point)
        except CommandFailed as refused:
            return Tried(point=point, value=NOTHING, figures={}, refused=str(refused))
        result = replay(setting, policy, lambda at: tell("search", at))
        told = result.data(price, node_seconds(setting))
        value = told[objective]
        if value is None:
            return Tried(point=point, value=NOTHING, figures={}, refused="no sample")
        return Tried(
            point=point,
            value=value if price is None else -value,
            figures={name: told[name] for name in (*_SEARCHED, objective) if name in told},
        )

    try:
        return search(start, case.nodes, attempt).data(objective)
    finally:
        clear()


def _compare(setting: "Setting", policies: Sequence[RecoveryPolicy]) -> "Comparison":
    from oobleck.planner.simulate.compare import compare

    tell, clear = _progress(setting.until_s)
    try:
        return compare(setting, policies, tell)
    finally:
        clear()


def _progress(until_s: float) -> tuple[Callable[[str, float], None], Callable[[], None]]:
    """Return a function that shows progress on a terminal if the replay takes long, and one that
    clears it."""
    began, shown = time.monotonic(), [0.0]
    terminal = sys.stderr is not None and sys.stderr.isatty()

    def tell(what: str, at_s: float) -> None:
        now = time.monotonic()
        if not terminal or now < began + _QUIET_S or now < shown[0] + 0.1:
            return
        shown[0] = now
        far = f" {100 * at_s / until_s:3.0f}%" if at_s else ""
        click.echo(f"\r\x1b[K{what}{far}", err=True, nl=False)

    def clear() -> None:
        if shown[0]:
            click.echo("\r\x1b[K", err=True, nl=False)

    return tell, clear


def simulation_text(data: dict[str, Any], width: int | None = None) -> str:
    """Return the table of policies, the bounds, and why policies failed."""
    from oobleck.cli.output.table import folded, table
    from oobleck.host.display import printable

    policies, bounds = data["policies"], data["bounds"]
    priced = any("cost" in each for each in policies.values())
    heads = [
        *("POLICY", "SAMPLES/S", "OF FULL", "USEFUL", "REDONE", "STALLED", "WAITING"),
        *("RETURNS", "MOVED", "AT RISK"),
        *(["COST PER MILLION"] if priced else []),
    ]
    parts = [table(heads, [_row(name, each) for name, each in policies.items()], width=width)]
    parts.append(
        f"bounds: {bounds['free_changes_samples_per_s']:.4g} samples/s if changes were free, "
        f"{bounds['live_nodes_samples_per_s']:.4g} in proportion to the live nodes, "
        f"{bounds['full_samples_per_s']:.4g} with all nodes at all times"
    )
    for name, each in policies.items():
        made = ", ".join(
            f"{rule} {number}" if policy == rule else f"{policy} ({rule}) {number}"
            for policy, own in each["counts"].items()
            for rule, number in own.items()
        )
        parts.append(f"{name}: {made}" if made else f"{name}: no plan")
        if each["failed_at"] is not None:
            since = f"{name} cannot go on from {each['failed_at']:g} s"
            parts.append(f"{since}; at the end: {each['reason']}")
    if "search" in data:
        parts += _search_lines(data["search"])
    parts += data.get("notes", [])
    lines = printable("\n".join([parts[0], "", *parts[1:]])).split("\n")
    return "\n".join(folded(line, width, indent=2) for line in lines)


def _search_lines(found: dict[str, Any]) -> list[str]:
    from oobleck.core.units import count

    def line(what: str, one: dict[str, Any]) -> str:
        settings = (
            f"fault tolerance {one['fault_tolerance']}, {count(one['spares'], 'spare')}, pipelines "
            f"of at least {count(one['min_nodes'], 'node')}, checkpoints every "
            f"{one['checkpoint_every_s']:g} s"
        )
        if "refused" in one:
            return f"{what}: {settings}: {one['refused']}"
        value = f"{found['objective'].replace('_', ' ')} {one[found['objective']]:.5g}"
        worse = f", {100 * one['worse_by']:.2f}% worse" if what != "best" else ""
        return f"{what}: {settings}: {value}{worse}"

    second = [] if found["second"] is None else [line("second", found["second"])]
    near = [line("neighbour", one) for one in found["neighbours"]]
    return [f"{found['tried']} settings were tried", line("best", found["best"]), *second, *near]


def _check_plot(path: Path) -> None:
    """Raise CommandFailed unless the plot can be made there."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise CommandFailed(
            "--plot needs the package matplotlib: pip install 'oobleck-cluster[plot]'", USAGE
        )
    if not path.absolute().parent.is_dir():
        raise CommandFailed(f"--plot {path}: its folder does not exist; make it first", USAGE)


def _row(name: str, each: dict[str, Any]) -> list[object]:
    from oobleck.core.units import format_bytes

    wall_s = each["wall_s"]

    def share(part_s: float) -> str:
        return f"{100 * part_s / wall_s:.1f}%"

    spent = each["seconds"]
    row: list[object] = [
        name,
        f"{each['samples_per_s']:.4g}",
        f"{100 * each['samples_per_s_of_full']:.1f}%",
        *(share(spent[part]) for part in ("useful", "redone", "stalled", "waiting")),
        each["returns"],
        format_bytes(each["moved_bytes"]),
        share(each["lost_guarantee_s"]),
    ]
    if "cost" in each:
        cost = each["cost_per_million_samples"]
        row.append("-" if cost is None else f"{cost:.2f}")
    return row
