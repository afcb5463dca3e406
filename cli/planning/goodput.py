"""`oobleck goodput`: what a job's time was spent on."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from oobleck.cli import options
from oobleck.cli.options import job_argument, master_option
from oobleck.host.ipc.endpoint import Endpoint

if TYPE_CHECKING:
    from oobleck.cli.client import MasterClient
    from oobleck.cli.output.text import Form

Record = Mapping[str, Any]


@click.command()
@job_argument()
@master_option
@click.option(
    "--costs",
    is_flag=True,
    help="Print what interruptions and steps took instead, as JSON for 'oobleck simulate --costs'.",
)
@options.form_options("One JSON object, as of a policy in 'oobleck simulate --json'.")
def goodput(job_id: str, master: Endpoint, costs: bool, form: "Form") -> None:
    """Show what the time of a job was spent on, from its submission until now or its end: useful
    steps, work done again, standstill by cause, and waiting.
    """
    from oobleck.cli.client import MasterClient
    from oobleck.cli.output.text import document, is_data
    from oobleck.planner.report.goodput import account

    with MasterClient(master) as connection:
        # Events first: each is about steps that the metrics have by then.
        events = [json.loads(record.json) for record in connection.events(job_id, follow=False)]
        metrics = [*map(json.loads, connection.metrics(job_id, follow=False))]
        if costs:
            click.echo(json.dumps(_costs(connection, job_id, events, metrics), indent=2))
            return
        evaluated = connection.metrics(job_id, follow=False, evaluations=True)
        data = account(events, metrics, [*map(json.loads, evaluated)], until=time.time())
    click.echo(document(data, form) if is_data(form) else goodput_text(data))


def _costs(
    connection: "MasterClient", job_id: str, events: Sequence[Record], metrics: Sequence[Record]
) -> Mapping[str, float]:
    from oobleck.planner.report.goodput import ENDS
    from oobleck.planner.report.learned import learn_costs

    if any(one["event"] in ENDS for one in events):  # its plan is not kept, nor its links' speed
        return learn_costs(events, metrics)
    planning = connection.planning(job_id)
    return learn_costs(
        events,
        metrics,
        link_bytes_per_s=planning.profile.links.inter_node_bytes_per_s,
        microbatches=sum(route.microbatches for route in planning.plan.routes),
    )


def goodput_text(data: Mapping[str, Any]) -> str:
    """Return a table of the causes, below a line of the goodput."""
    from oobleck.cli.output.table import table
    from oobleck.core.units import count

    wall_s, spent = data["wall_s"], data["seconds"]

    def row(name: str, span_s: float) -> list[object]:
        return [name, f"{span_s:.3f}", f"{100 * span_s / wall_s if wall_s else 0.0:.1f}%"]

    rows = [row("useful", spent["useful"])]
    causes = sorted(data["badput"].items(), key=lambda one: -one[1])
    rows += [row(cause, span_s) for cause, span_s in causes]
    head = (
        f"goodput {100 * data['goodput']:.1f}%, ETTR {100 * data['ettr']:.1f}%; weighted by the "
        f"nodes that took part {100 * data['node_goodput']:.1f}% and "
        f"{100 * data['node_ettr']:.1f}%; {count(data['steps'], 'step')} in {wall_s:.1f} s"
    )
    return f"{head}\n\n{table(['TIME', 'SECONDS', 'SHARE'], rows)}"
