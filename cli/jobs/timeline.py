"""A timeline of a running job's steps, from the master to a file, and in one line."""

from pathlib import Path
from typing import Any

import click

from oobleck.cli.options import FAILED, USAGE
from oobleck.core.units import count
from oobleck.host.command import CommandFailed
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.host.timeline import DEVICE_THREADS


def record(master: Endpoint, job_id: str, steps: int) -> str:
    """The text of the Chrome trace of `steps` steps to come. Raises CommandFailed."""
    from oobleck.cli.client import MasterClient

    with MasterClient(master) as connection:
        return connection.timeline(job_id, steps)


def check_folder(output: Path) -> None:
    """Raises CommandFailed unless `output` may lie where it says."""
    if not output.absolute().parent.is_dir():
        raise CommandFailed(f"{output}: there is no such folder; make it first", USAGE)


def write(text: str, output: Path) -> None:
    """Raises CommandFailed."""
    try:
        output.write_text(text)
    except OSError as error:
        raise CommandFailed(
            f"{output}: {error.strerror}; name a file that can be written", FAILED
        ) from error


def summary(trace: dict[str, Any]) -> str:
    events = trace["traceEvents"]
    threads = [event.get("tid", 0) for event in events if event["name"] == "thread_name"]
    workers = sum(thread < DEVICE_THREADS for thread in threads)
    steps = sorted({event["name"] for event in events if event["name"].startswith("step ")})
    phases = sorted({event["name"] for event in events if event.get("cat") == "recovery"})
    within_us = max((c["within_us"] for c in trace["otherData"]["clocks"].values()), default=0.0)
    clocks = f"clocks within {within_us:.0f} us" if within_us else "one clock"
    found = f"{', '.join(steps)} of {count(workers, 'worker')}, {clocks}"
    return f"{found}; change of the plan before it: {', '.join(phases)}" if phases else found


def check_usage(
    job_file: Path | None, job_id: str | None, timeline: Path | None, steps: int | None
) -> None:
    """Raises UsageError unless it is a measurement of a job file or a timeline of a job."""
    if timeline is None and (job_id is not None or steps is not None):
        raise click.UsageError("--job and --steps go with --timeline OUT.json")
    if timeline is not None and (job_id is None or job_file is not None):
        raise click.UsageError(
            "a timeline is of a running job: oobleck profile --timeline OUT.json --job ID"
        )
    if timeline is None and job_file is None:
        raise click.UsageError("Missing argument 'JOB.yaml'.")
