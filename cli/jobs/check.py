"""`oobleck check`: whether a job would be accepted, and what its model consists of."""

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oobleck.cli import options
from oobleck.cli.jobs.job_file import check_checkpoints, check_inputs, read_only, read_profile
from oobleck.cli.jobs.own_model import Found, look_at, refuse, tell

if TYPE_CHECKING:
    from oobleck.cli.output.form import Form
    from oobleck.core.job.description import TreeSketch
    from oobleck.core.job.spec import JobSpec

EPILOG = """\b
Exit codes: 0 no problem, 2 the job would be refused, with a line on standard error for each
problem."""


@click.command(epilog=EPILOG)
@click.argument("job_file", metavar="JOB.yaml", type=click.Path(dir_okay=False, path_type=Path))
@options.set_option
@options.form_options("Layers and problems as one JSON object.")
def check(job_file: Path, overrides: tuple[str, ...], form: "Form") -> int:
    """Check the job that JOB.yaml (- for standard input) describes for problems.

    No master is asked; files are expected on this machine. A model of your own is run for one
    micro-batch, layer by layer, and shown as a table.
    """
    from oobleck.cli.output.form import document, is_data

    found = look_at(read_only(job_file, overrides), always=True)
    if found.job.model.known:
        found = replace(found, problems=[*found.problems, *check_inputs(found.job)])
        check_checkpoints(found.job)
        read_profile(found.job)
    layers = _layers(found.job)
    if is_data(form):
        problems = [
            {"where": p.where, "sentence": p.sentence, "warning": p.warning} for p in found.problems
        ]
        answer = {"ok": not found.refusals, "layers": layers, "problems": problems}
        click.echo(document(answer, form))
        return options.USAGE if found.refusals else 0
    _show(found, layers, wide=form == "wide")
    return 0


def _show(found: Found, layers: list[dict[str, Any]], *, wide: bool) -> None:
    from oobleck.cli.output.table import table, terminal_width
    from oobleck.core.units import format_bytes

    if layers:
        compiled = any(layer["compiled"] for layer in layers)
        heads: tuple[str, ...] = ("LAYERS", "CLASS", "PARAMETERS", "KEPT PER ROW", "OUTPUT PER ROW")
        rows = [
            (
                _range(layer["first"], layer["last"]),
                layer["class"],
                f"{layer['parameters']:,}",
                format_bytes(layer["kept_bytes"]),
                ", ".join(layer["output"]),
                *(["yes" if layer["compiled"] else "no"] if compiled else []),
            )
            for layer in layers
        ]
        heads += ("COMPILED",) if compiled else ()
        click.echo(table(heads, rows, width=None if wide else terminal_width()))
    for problem in found.problems:
        if problem.warning:
            tell(f"warning: {problem}")
    refuse(found.refusals)
    click.echo("ok")


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _layers(job: "JobSpec") -> list[dict[str, Any]]:
    """Return a record for each run of equal layers of a user's model.

    Empty for other models, and if its layers are unknown.
    """
    from oobleck.core.job.model import OwnModelSpec

    model = job.model
    if not isinstance(model, OwnModelSpec) or not model.known:
        return []
    found = []
    for kind, run in groupby(range(model.layer_count), key=model.order.__getitem__):
        numbers, sketch = list(run), model.description.kinds[kind]
        found.append(
            {
                "first": numbers[0],
                "last": numbers[-1],
                "class": sketch.name,
                "parameters": sketch.parameters,
                "kept_bytes": sketch.kept_bytes,
                "output": _shapes(sketch.output),
                "compiled": sketch.compiled is not None,
            }
        )
    return found


def _shapes(output: "TreeSketch") -> list[str]:
    return [f"{tensor.dtype}{list(tensor.shape)}" for tensor in output.tensors]
