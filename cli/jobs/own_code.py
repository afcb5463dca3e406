"""Users' code that a job names: its wheel, its folder, and checks of its model or optimizer.

A process with torch describes the model before the job is sent.
"""

import dataclasses
import json
import os
import subprocess
import tempfile
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from oobleck.cli.client import MasterClient
from oobleck.cli.output.progress import shown_if_long
from oobleck.core.job.code import Json
from oobleck.core.job.file import format_job
from oobleck.core.job.model import ModelSpec, OwnModelSpec
from oobleck.core.job.spec import FLOAT8_MULTIPLE, JobSpec, fit_float8
from oobleck.host.command import FAILED, USAGE, CommandFailed
from oobleck.host.display import inline
from oobleck.host.ipc.marker import Marker, with_last_line
from oobleck.host.system.files import read_regular
from oobleck.host.system.process import with_parent
from oobleck.host.wheel import MOST_WHEEL_BYTES, Wheel, is_carried, stored_as, unpacked_in
from oobleck.planner.profile.estimate import layer_counts

# ---- the wheel: read, unpacked for checks, and sent


def read_wheel(path: str) -> Wheel:
    """Read and check a wheel. Raise CommandFailed with the fix."""
    try:
        return Wheel(read_regular(path, MOST_WHEEL_BYTES))
    except OSError as error:
        text = f"code: {path}: {error.strerror}; name a wheel of pure Python (dist/NAME.whl)"
        raise CommandFailed(text, USAGE) from error
    except ValueError as error:
        raise CommandFailed(f"code: {path}: {error}", USAGE) from error


@contextmanager
def unpacked(job: JobSpec) -> Iterator[JobSpec]:
    """Yield the job for this machine, with its wheel unpacked during the block."""
    if job.code is None:
        yield job
        return
    wheel = read_wheel(job.code)
    with tempfile.TemporaryDirectory(prefix="oobleck-") as folder:
        place = Path(folder) / "code"
        try:
            wheel.unpack(place)
        except OSError as error:
            text = f"code: {place}: {error.strerror}; make room, or set TMPDIR to another place"
            raise CommandFailed(text, FAILED) from error
        except ValueError as error:
            raise CommandFailed(f"code: {job.code}: {error}", USAGE) from error
        yield unpacked_in(job, str(place), wheel.modules)


def sent_text(connection: MasterClient, job: JobSpec) -> str:
    """Return the job's text for the master, after sending its wheel. Raise CommandFailed."""
    if job.code is not None:
        wheel = read_wheel(job.code)
        connection.put_code(wheel.content)
        job = dataclasses.replace(job, code=stored_as(wheel.digest))
    return format_job(job, defaults=False)  # a master of an earlier release may not know all keys


# ---- the model and the optimizer


_MODULE = "oobleck.worker.describe"
#: Module that imports the user's modules.
_LOADER = "oobleck.worker.runtime.code"
#: Parts of a job that may be the user's and are described.
_OWN = ("model", "optimizer")


def code_folder(
    python: str | None, path: str | None, base: Path, carried: Collection[str]
) -> str | None:
    """Return the folder of the module of `python`.

    That is `path`, or the job file's folder `base` if the module is there. None: it is installed,
    or it is in the job's wheel (`carried`).
    """
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
    #: Whether the job may still run.
    warning: bool

    def __str__(self) -> str:
        return f"{self.where}: {self.sentence}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Findings about a model."""

    #: Job with a description of its layers, if there is one.
    job: JobSpec
    problems: Sequence[Problem]
    #: Whether the model was run for real.
    run: bool

    @property
    def refusals(self) -> Sequence[Problem]:
        return [problem for problem in self.problems if not problem.warning]


def look_at(job: JobSpec, *, always: bool = False) -> Found:
    """Check the user's code of a job. `always`: run the model for real, however large it is."""
    own, optimizer = isinstance(job.model, OwnModelSpec), job.training.optimizer
    if not own and optimizer.code is None and not optimizer.no_decay:
        return Found(job=job, problems=_left_in_bfloat16(job), run=False)
    if any(frame.f_globals.get("__name__") == _LOADER for frame, _ in traceback.walk_stack(None)):
        text = (
            "the module that the job names submits a job when it is imported, and every worker "
            'imports it; move the call that submits below if __name__ == "__main__"'
        )
        raise CommandFailed(text, USAGE)
    evaluation = job.evaluation
    looked_at = evaluation if evaluation and evaluation.data and evaluation.data.code else None
    unknown = dataclasses.replace(_given(job, dict.fromkeys(_OWN, "")), evaluation=looked_at)
    line = "checking the code of the job, in a process that loads torch"
    with unpacked(unknown) as here, closing(Marker()) as marker, shown_if_long(line):
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
        raise CommandFailed(with_last_line(verdict, lines[-1] if lines else ""), USAGE)
    if ended.returncode or not ended.stdout:
        # The cause is unknown; the last line of stderr usually names it.
        last = lines[-1] if lines else "it printed nothing"
        text = f"model: its code ended the process that checked it ({last})"
        raise CommandFailed(text, USAGE)
    found = json.loads(ended.stdout)
    problems = _left_in_bfloat16(job) + [Problem(**fields) for fields in found["problems"]]
    try:
        job = _given(job, found["descriptions"])
    except ValueError as error:
        raise CommandFailed(str(error), USAGE) from error
    return Found(job=job, problems=problems, run=found["run"])


def _left_in_bfloat16(job: JobSpec) -> list[Problem]:
    """Return a warning for each size of a built-in model with which an fp8 job multiplies in
    bfloat16."""
    if job.training.precision != "fp8" or not isinstance(job.model, ModelSpec):
        return []
    sizes = {
        one.key: size
        for group in layer_counts(job.model).block.linear
        for one in group
        for size in (one.inputs, one.outputs)
        if not fit_float8(size)
    }
    return [
        Problem(
            where=f"model.config.{key}",
            sentence=(
                f"gives weights of size {size}, which multiply in bfloat16: fp8 takes weights "
                f"whose sizes are multiples of {FLOAT8_MULTIPLE}"
            ),
            warning=True,
        )
        for key, size in sizes.items()
    ]


def with_description(job: JobSpec) -> JobSpec:
    """Return the job with its layers and its optimizer's state described. Print problems; raise
    CommandFailed with the last one."""
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
    """Raise CommandFailed with the last problem, after printing the others; do nothing for none."""
    if problems:
        *others, last = problems
        for problem in others:
            tell(str(problem))
        raise CommandFailed(str(last), USAGE)


def _given(job: JobSpec, descriptions: Mapping[str, str]) -> JobSpec:
    """Return the job with these descriptions of the user's parts. Raise ValueError."""
    model, training = job.model, job.training
    if isinstance(model, OwnModelSpec) and "model" in descriptions:
        model = dataclasses.replace(model, described=Json(descriptions["model"]))
    if training.optimizer.code is not None and "optimizer" in descriptions:
        text = Json(descriptions["optimizer"])
        optimizer = dataclasses.replace(training.optimizer, described=text)
        training = dataclasses.replace(training, optimizer=optimizer)
    return dataclasses.replace(job, model=model, training=training)
