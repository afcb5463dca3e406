"""A job file before it is sent: read within limits, its paths made absolute, its data looked at."""

import contextlib
import dataclasses
import glob
import os
import select
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oobleck.cli import options
from oobleck.host.command import CommandFailed

if TYPE_CHECKING:
    from oobleck.planner.job import DataSpec, JobSpec

#: A job file has a few hundred bytes.
MOST_BYTES = 1 << 20
#: How long the writer of a pipe may be silent; one that nobody writes to would be waited for.
PIPE_TIMEOUT_S = 5.0


def read_job(
    path: Path, overrides: Sequence[str], shown_as: Mapping[str, str] | None = None
) -> "JobSpec":
    """The job with all paths made absolute; errors name the file and the line, or the override.

    `shown_as`: how the user wrote an override, where it is not `--set OVERRIDE`.
    """
    from oobleck.planner.errors import InvalidJob
    from oobleck.planner.jobfile import parse_job

    stdin = str(path) == "-"
    source = "standard input" if stdin else str(path)
    text = read_text(path)
    shown = {given: (shown_as or {}).get(given, f"--set {given}") for given in overrides}
    try:
        job = parse_job(text, overrides=overrides, source=source)
    except InvalidJob as error:
        message = str(error)
        for override, flag in shown.items():
            message = message.replace(f"--set {override}:", f"{flag}:")
        if message.startswith(f"{source}:") and overrides:
            with contextlib.suppress(InvalidJob):
                # The file alone is right, so the line is not to blame.
                parse_job(text, source=source)
                what = message.removeprefix(source).partition(": ")[2]
                message = f"{', '.join(shown.values())}: {what}"
        raise CommandFailed(message, options.USAGE) from error
    return with_absolute_paths(job, Path.cwd() if stdin else path.absolute().parent)


def read_text(path: Path) -> str:
    """The text of a regular file, a pipe, or standard input for `-`."""
    try:
        raw = sys.stdin.buffer.read(MOST_BYTES + 1) if str(path) == "-" else _read_file(path)
    except OSError as error:
        raise CommandFailed(f"{path}: {error.strerror}", options.USAGE) from error
    if len(raw) > MOST_BYTES:
        raise CommandFailed(f"{path}: larger than 1 MiB; give a YAML job file", options.USAGE)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise CommandFailed(
            f"{path}: not a text file; give a YAML job file", options.USAGE
        ) from error


def _read_file(path: Path) -> bytes:
    # Without O_NONBLOCK, opening a pipe that nobody writes to waits for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return _read_all(file.read)
        if not stat.S_ISFIFO(mode):
            raise CommandFailed(
                f"{path}: is not a regular file; give a YAML job file, or - for standard input",
                options.USAGE,
            )

        def read_pipe(count: int) -> bytes | None:
            if not select.select([descriptor], [], [], PIPE_TIMEOUT_S)[0]:
                raise CommandFailed(
                    f"{path}: nothing came through this pipe for {PIPE_TIMEOUT_S:.0f} s",
                    options.USAGE,
                )
            return file.read(count)

        return _read_all(read_pipe)


def _read_all(read: Callable[[int], bytes | None]) -> bytes:
    """To the end, or to the first byte that is too many."""
    raw = b""
    while len(raw) <= MOST_BYTES and (piece := read(MOST_BYTES + 1 - len(raw))):
        raw += piece
    return raw


def with_absolute_paths(job: "JobSpec", base: Path) -> "JobSpec":
    """Workers run elsewhere, so relative paths would mean something else there."""
    try:
        str(base).encode()
    except UnicodeEncodeError as error:
        raise CommandFailed(
            f"the folder {str(base)!a} has a name that is not UTF-8 text, and a job cannot "
            "name it; move the job file and its data",
            options.USAGE,
        ) from error
    data = dataclasses.replace(
        job.data,
        text=tuple(str(base / pattern) for pattern in job.data.text),
        tokens=None if job.data.tokens is None else str(base / job.data.tokens),
    )
    output = None if job.output is None else str(base / job.output)
    profile = job.profile if job.profile_path is None else str(base / job.profile_path)
    return dataclasses.replace(job, data=data, output=output, profile=profile)


def read_profile(job: "JobSpec") -> str:
    """The text of the profile file that the job names, checked; empty where it names none."""
    from oobleck.planner.measurement import check_fits
    from oobleck.planner.profilefile import parse_profile

    if job.profile_path is None:
        return ""
    try:
        text = Path(job.profile_path).read_text()
        check_fits(parse_profile(text), job)
    except OSError as error:
        raise CommandFailed(
            f"profile: {job.profile_path}: {error.strerror}; give measure, estimate or the path "
            "of a profile file",
            options.USAGE,
        ) from error
    except ValueError as error:
        raise CommandFailed(f"profile: {job.profile_path}: {error}", options.USAGE) from error
    return text


def check_data(job: "JobSpec") -> None:
    """For a cluster on this machine: whether the data is there, and enough of it."""
    files = _data_files(job.data)
    width = 1 if job.data.tokens is None else int(job.data.dtype.removeprefix("uint")) // 8
    tokens = sum(os.path.getsize(path) for path in files) // width
    needed = job.model.sequence_length + 1
    if tokens < needed:
        raise CommandFailed(
            f"data: {job.data.tokens or ', '.join(job.data.text)} holds {tokens} tokens, too few "
            f"for one row of {needed}; give more text or lower model.sequence_length",
            options.USAGE,
        )


def _data_files(data: "DataSpec") -> set[str]:
    if data.tokens is not None:
        _check_is_file("data.tokens", data.tokens)
        return {data.tokens}
    found: set[str] = set()
    for pattern in data.text:
        matches = glob.glob(pattern, recursive=True)
        if not matches:
            raise CommandFailed(
                f"data.text: no file matches {pattern}; give paths or globs of existing text "
                "files (relative ones are relative to the job file)",
                options.USAGE,
            )
        files = {path for path in matches if os.path.isfile(path)}
        if not files:
            _check_is_file("data.text", matches[0])
        found |= files
    return found


def _check_is_file(key: str, path: str) -> None:
    if not os.path.exists(path):
        raise CommandFailed(f"{key}: {path} does not exist", options.USAGE)
    if not os.path.isfile(path):
        raise CommandFailed(
            f"{key}: {path} is not a regular file; give files that hold the training data",
            options.USAGE,
        )
