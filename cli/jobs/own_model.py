"""What the command line does for a model of the user's before it is sent: finds its code, and has
it described by a process that has torch."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from oobleck.cli import options
from oobleck.host.command import CommandFailed

if TYPE_CHECKING:
    from oobleck.planner.job.spec import JobSpec

_MODULE = "oobleck.worker.describe"


def code_folder(python: str | None, path: str | None, base: Path) -> str | None:
    """Where the module of `python` lies: in `path`, or beside the job file, whose folder is `base`;
    None: it is installed."""
    if python is None:
        return None
    if path is not None:
        return str(base / os.path.expanduser(path))
    first = python.partition(":")[0].partition(".")[0]
    beside = (base / f"{first}.py").is_file() or (base / first).is_dir()
    return str(base) if beside else None


def with_description(job: "JobSpec") -> "JobSpec":
    """The job with its model's layers known."""
    from oobleck.planner.job.code import Json
    from oobleck.planner.job.file import format_job
    from oobleck.planner.job.own import OwnModelSpec

    if not isinstance(job.model, OwnModelSpec):
        return job
    unknown = dataclasses.replace(
        job, model=dataclasses.replace(job.model, described=Json("")), evaluation=None
    )
    found = subprocess.run(
        [sys.executable, "-m", _MODULE],
        input=format_job(unknown),
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        lines = found.stderr.strip().splitlines() or [f"{_MODULE} ended with {found.returncode}"]
        raise CommandFailed(lines[-1], options.USAGE)
    try:
        model = dataclasses.replace(job.model, described=Json(found.stdout))
        return dataclasses.replace(job, model=model)
    except ValueError as error:
        raise CommandFailed(str(error), options.USAGE) from error
