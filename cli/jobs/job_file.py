"""Job files before submission: read within limits of size and time, and with absolute paths."""

import contextlib
import dataclasses
import json
import os
import select
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from oobleck.cli.jobs.own_code import code_folder, read_wheel, with_description
from oobleck.core.errors import InvalidJob
from oobleck.core.job.file import parse_job
from oobleck.core.job.model import AnyModel, ModelSpec, OwnModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec
from oobleck.core.profile import parse_profile
from oobleck.host.command import USAGE, CommandFailed
from oobleck.host.system.files import open_at_once
from oobleck.planner.profile.measurement import check_fits

# ---- text files that the user names: a regular file, a pipe, or standard input


#: Longest silence of a pipe's writer; a pipe without one would block for ever.
PIPE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """Text file that a command reads."""

    #: Description for messages, after "give".
    what: str
    most_mib: int
    #: Prefix of messages, before the path.
    field: str = ""


#: A job file has a few hundred bytes, the profile of the largest model a megabyte.
JOB_FILE = TextFile(what="a YAML job file", most_mib=1)
PROFILE_FILE = TextFile(
    what="a profile file, as 'oobleck profile JOB.yaml --output P.json' writes it",
    most_mib=16,
    field="--profile ",
)
PROFILE_OF_JOB = TextFile(
    what="measure, estimate or the path of a profile file", most_mib=16, field="profile: "
)

CONFIG_OF_MODEL = TextFile(
    what="the config.json of a Hugging Face model", most_mib=1, field="model: "
)


def read_text(path: Path, wanted: TextFile) -> str:
    """Return the text of a regular file, a pipe, or standard input for `-`. Raise CommandFailed."""
    most = wanted.most_mib << 20
    try:
        if str(path) == "-":
            if sys.stdin is None:  # closed by the process that started this one
                raise _refused(path, wanted, "standard input is closed")
            raw = sys.stdin.buffer.read(most + 1)
        else:
            raw = _read_file(path, wanted, most)
    except OSError as error:
        raise _refused(path, wanted, str(error.strerror)) from error
    if len(raw) > most:
        raise _refused(path, wanted, f"larger than {wanted.most_mib} MiB")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _refused(path, wanted, "not a text file") from error


def _refused(path: Path, wanted: TextFile, problem: str) -> CommandFailed:
    text = f"{wanted.field}{path}: {problem}; give {wanted.what}"
    return CommandFailed(text, USAGE)


def _read_file(path: Path, wanted: TextFile, most: int) -> bytes:
    descriptor = open_at_once(path)
    with open(descriptor, "rb", buffering=0) as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return _read_all(file.read, most)
        if not stat.S_ISFIFO(mode):
            raise _refused(path, wanted, "is not a regular file")

        def read_pipe(count: int) -> bytes | None:
            if not select.select([descriptor], [], [], PIPE_TIMEOUT_S)[0]:
                silence = f"nothing came through this pipe for {PIPE_TIMEOUT_S:.0f} s"
                raise _refused(path, wanted, silence)
            return file.read(count)

        return _read_all(read_pipe, most)


def _read_all(read: Callable[[int], bytes | None], most: int) -> bytes:
    """Read to the end, or one byte beyond the limit."""
    raw = b""
    while len(raw) <= most and (piece := read(most + 1 - len(raw))):
        raw += piece
    return raw


def read_job(
    path: Path, overrides: Sequence[str], shown_as: Mapping[str, str] | None = None
) -> JobSpec:
    """Return the job with absolute paths and a checked model.

    Errors name the file and line, or the override. `shown_as`: how the user wrote an override, if
    not as `--set OVERRIDE`.
    """
    return with_description(read_only(path, overrides, shown_as))


def read_only(
    path: Path, overrides: Sequence[str], shown_as: Mapping[str, str] | None = None
) -> JobSpec:
    """Return the job as `read_job` does, without a check of the model."""
    source, base = _place(path)
    return _parsed(read_text(path, JOB_FILE), overrides, source, base, shown_as or {})


def read_form(path: Path, overrides: Sequence[str]) -> JobSpec:
    """Return the job with paths as they are written; no file that it names is read."""
    source, base = _place(path)
    return _formed(read_text(path, JOB_FILE), overrides, source, base, {})


def folder_of(path: Path) -> Path:
    """Return the folder that relative paths in the job file start from."""
    return _place(path)[1]


def _place(path: Path) -> tuple[str, Path]:
    """Return the file's name in messages, and the folder that its relative paths start from."""
    if str(path) == "-":
        return "standard input", Path.cwd()
    return str(path), path.absolute().parent


def job_of_text(text: str, overrides: Sequence[str], *, source: str, base: Path) -> JobSpec:
    """Return a job as `read_job` does, from the text of a job file.

    `base`: folder that relative paths in it start from. `source`: its name in messages.
    """
    return with_description(_parsed(text, overrides, source, base, {}))


def _parsed(
    text: str, overrides: Sequence[str], source: str, base: Path, shown_as: Mapping[str, str]
) -> JobSpec:
    """Parse the text of a job file, and make all paths absolute."""
    return with_absolute_paths(_formed(text, overrides, source, base, shown_as), base)


def _formed(
    text: str, overrides: Sequence[str], source: str, base: Path, shown_as: Mapping[str, str]
) -> JobSpec:
    def read(name: str) -> str:
        return read_text(base / os.path.expanduser(name), CONFIG_OF_MODEL)

    shown = {given: shown_as.get(given, f"--set {given}") for given in overrides}
    try:
        job = parse_job(text, overrides=overrides, source=source, read=read)
    except InvalidJob as error:
        message = str(error)
        for override, flag in shown.items():
            message = message.replace(f"--set {override}:", f"{flag}:")
        if message.startswith(f"{source}:") and overrides:
            with contextlib.suppress(InvalidJob):
                # The file alone is valid, so the line is not at fault.
                parse_job(text, source=source, read=read)
                what = message.removeprefix(source).partition(": ")[2]
                message = f"{', '.join(shown.values())}: {what}"
        raise CommandFailed(message, USAGE) from error
    return job


def with_absolute_paths(job: JobSpec, base: Path) -> JobSpec:
    """Return the job with absolute paths, because workers run in other folders."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else str(base / os.path.expanduser(path))

    def folder_of(python: str | None, path: str | None) -> str | None:
        return code_folder(python, path, base, carried)

    def of_data(data: DataSpec) -> DataSpec:
        return dataclasses.replace(
            data,
            text=tuple(str(base / os.path.expanduser(pattern)) for pattern in data.text),
            tokens=absolute(data.tokens),
            tokenizer=absolute(data.tokenizer),
            cache=absolute(data.cache),
            path=folder_of(data.python, data.path),
        )

    def of_model(model: AnyModel) -> AnyModel:
        if isinstance(model, ModelSpec):
            return dataclasses.replace(model, weights=absolute(model.weights))
        assert isinstance(model, OwnModelSpec), "there are two kinds"
        path = folder_of(model.python, model.path)
        return dataclasses.replace(model, path=path, weights=absolute(model.weights))

    code = absolute(job.code)
    carried = frozenset[str]() if code is None else read_wheel(code).modules
    checkpoint, evaluation, optimizer = job.checkpoint, job.evaluation, job.training.optimizer
    try:
        folder = folder_of(optimizer.python, optimizer.path)
        optimizer = dataclasses.replace(optimizer, path=folder)
        if checkpoint is not None and "://" not in checkpoint.path:
            path = str(base / os.path.expanduser(checkpoint.path))
            checkpoint = dataclasses.replace(checkpoint, path=path)
        if evaluation is not None and evaluation.data is not None:
            evaluation = dataclasses.replace(evaluation, data=of_data(evaluation.data))
        return dataclasses.replace(
            job,
            model=of_model(job.model),
            data=of_data(job.data),
            training=dataclasses.replace(job.training, optimizer=optimizer),
            evaluation=evaluation,
            output=absolute(job.output),
            checkpoint=checkpoint,
            profile=absolute(job.profile_path) or job.profile,
            code=code,
        )
    except ValueError as error:  # only the folder was not checked yet
        text = f"{error} (its folder is {str(base)!a}: move the job file and what it names)"
        raise CommandFailed(text, USAGE) from error


def read_profile(job: JobSpec) -> str:
    """Return the profile that the job names, checked, as JSON text without spaces, since messages
    have a limit; empty if it names none."""
    if job.profile_path is None:
        return ""
    text = read_text(Path(job.profile_path), PROFILE_OF_JOB)
    try:
        check_fits(parse_profile(text), job)
        return json.dumps(json.loads(text), separators=(",", ":"))
    except ValueError as error:
        raise CommandFailed(f"profile: {job.profile_path}: {error}", USAGE) from error
