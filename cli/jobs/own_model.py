"""Preparation of a user's model or optimizer before a job is sent: finds its code, and has it
described by a process that has torch."""

import dataclasses
import json
import os
import subprocess
import traceback
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oobleck.cli import options
from oobleck.cli.jobs.wheel import unpacked
from oobleck.host.command import CommandFailed
from oobleck.host.display import inline
from oobleck.host.ipc.marker import Marker, with_last_line
from oobleck.host.system.process import with_parent

if TYPE_CHECKING:
    from oobleck.core.job.spec import JobSpec

_MODULE = "oobleck.worker.describe"
#: The module that imports the user's modules.
_LOADER = "oobleck.worker.runtime.code"
#: What of a job may be the user's, and is described.
_OWN = ("model", "optimizer")


def code_folder(
    python: str | None, path: str | None, base: Path, carried: Collection[str]
) -> str | None:
    """Return the folder that the module of `python` lies in: `path`, or the job file's folder,
    `base`, where it is beside the job file. Return None where it is installed, or one of those that
    the job's wheel has, `carried`."""
    from oobleck.core.job.wheel import is_carried

    if python is None or is_carried(python, path, carried):
        return None
    if path is not None:
        return str(base / os.path.expanduser(path))
    first = python.partition(":")[0].partition(".")[0]
    beside = (base / f"{first}.py").is_file() or (base / first).is_dir()
    return str(base) if beside else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Problem of a model or its data, and the fix."""

    where: str
    sentence: str
    #: The job may be run as it is.
    warning: bool

    def __str__(self) -> str:
        return f"{self.where}: {self.sentence}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Findings of a look at a model."""

    #: With its layers known, where they could be.
    job: "JobSpec"
    problems: Sequence[Problem]
    #: Whether it was run for real.
    run: bool

    @property
    def refusals(self) -> Sequence[Problem]:
        return [problem for problem in self.problems if not problem.warning]


def look_at(job: "JobSpec", *, always: bool = False) -> Found:
    """`always`: run the model for real, however large it is."""
    from oobleck.core.job.file import format_job
    from oobleck.core.job.own import OwnModelSpec

    own, optimizer = isinstance(job.model, OwnModelSpec), job.training.optimizer
    if not own and optimizer.code is None and not optimizer.no_decay:
        return Found(job=job, problems=[], run=False)
    if any(frame.f_globals.get("__name__") == _LOADER for frame, _ in traceback.walk_stack(None)):
        text = (
            "the module that a job names submits a job when it is imported, and every worker "
            'imports it; move the call that submits below if __name__ == "__main__"'
        )
        raise CommandFailed(text, options.USAGE)
    evaluation = job.evaluation
    looked_at = evaluation if evaluation and evaluation.data and evaluation.data.code else None
    unknown = dataclasses.replace(_given(job, dict.fromkeys(_OWN, "")), evaluation=looked_at)
    with unpacked(unknown) as here, closing(Marker()) as marker:
        ended = subprocess.run(
            [*with_parent(_MODULE), *(["--always"] if always else []), str(marker.fd)],
            input=format_job(here),
            capture_output=True,
            text=True,
            check=False,
            pass_fds=[marker.fd],
        )
        verdict = marker.verdict(ended.returncode)
    lines = ended.stderr.strip().splitlines()
    if verdict:
        raise CommandFailed(with_last_line(verdict, lines[-1] if lines else ""), options.USAGE)
    if ended.returncode or not ended.stdout:
        # The cause is unknown; the last line of stderr usually names it.
        last = lines[-1] if lines else "it printed nothing"
        text = f"model: its code ended the process that looked at it ({last})"
        raise CommandFailed(text, options.USAGE)
    found = json.loads(ended.stdout)
    problems = [Problem(**fields) for fields in found["problems"]]
    try:
        job = _given(job, found["descriptions"])
    except ValueError as error:
        raise CommandFailed(str(error), options.USAGE) from error
    return Found(job=job, problems=problems, run=found["run"])


def with_description(job: "JobSpec") -> "JobSpec":
    """The job with its model's layers known, and what its optimizer keeps. What is wrong with it is
    told; the last line of that is raised."""
    from oobleck.core.job.own import OwnModelSpec

    found = look_at(job)
    for problem in found.problems:
        if problem.warning:
            tell(f"warning: {problem}")
    refuse(found.refusals)
    if isinstance(job.model, OwnModelSpec) and not found.run:
        tell("note: the model is large and was not run; 'oobleck check' runs it layer by layer")
    return found.job


def tell(line: str) -> None:
    click.echo(inline(f"oobleck: {line}"), err=True)


def refuse(problems: Sequence[Problem]) -> None:
    """End the command with a line for each; without any nothing happens."""
    if problems:
        *others, last = problems
        for problem in others:
            tell(str(problem))
        raise CommandFailed(str(last), options.USAGE)


def _given(job: "JobSpec", descriptions: Mapping[str, str]) -> "JobSpec":
    """The job with these descriptions of what is the user's in it. Raises ValueError."""
    from oobleck.core.job.code import Json
    from oobleck.core.job.own import OwnModelSpec

    model, training = job.model, job.training
    if isinstance(model, OwnModelSpec) and "model" in descriptions:
        model = dataclasses.replace(model, described=Json(descriptions["model"]))
    if training.optimizer.code is not None and "optimizer" in descriptions:
        text = Json(descriptions["optimizer"])
        optimizer = dataclasses.replace(training.optimizer, described=text)
        training = dataclasses.replace(training, optimizer=optimizer)
    return dataclasses.replace(job, model=model, training=training)
