"""Job files before submission: absolute paths, and checks of data and profile."""

import contextlib
import dataclasses
import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oobleck.cli import options
from oobleck.cli.jobs.own_model import Problem, code_folder, with_description
from oobleck.cli.jobs.wheel import read_wheel
from oobleck.cli.output.text_file import CONFIG_OF_MODEL, JOB_FILE, PROFILE_OF_JOB, read_text
from oobleck.host.command import CommandFailed

if TYPE_CHECKING:
    from oobleck.core.job.model import AnyModel
    from oobleck.core.job.spec import DataSpec, JobSpec

#: Tokens of text without a tokenizer, and bytes of text to check before a submission.
_BYTES = 256
_LOOKED_AT_BYTES = 1 << 24


def read_job(
    path: Path, overrides: Sequence[str], shown_as: Mapping[str, str] | None = None
) -> "JobSpec":
    """Return the job with absolute paths and a checked model.

    Errors name the file and line, or the override. `shown_as`: how the user wrote an override, if
    not as `--set OVERRIDE`.
    """
    return with_description(read_only(path, overrides, shown_as))


def read_only(
    path: Path, overrides: Sequence[str], shown_as: Mapping[str, str] | None = None
) -> "JobSpec":
    """Return the job as `read_job` does, without a check of the model."""
    source, base = _place(path)
    return _parsed(read_text(path, JOB_FILE), overrides, source, base, shown_as or {})


def read_form(path: Path, overrides: Sequence[str]) -> "JobSpec":
    """Return the job with paths as they are written; no file that it names is read."""
    source, base = _place(path)
    return _formed(read_text(path, JOB_FILE), overrides, source, base, {})


def _place(path: Path) -> tuple[str, Path]:
    """Return the file's name in messages, and the folder that its relative paths start from."""
    if str(path) == "-":
        return "standard input", Path.cwd()
    return str(path), path.absolute().parent


def job_of_text(text: str, overrides: Sequence[str], *, source: str, base: Path) -> "JobSpec":
    """Return a job as `read_job` does, from the text of a job file.

    `base`: folder that relative paths in it start from. `source`: its name in messages.
    """
    return with_description(_parsed(text, overrides, source, base, {}))


def _parsed(
    text: str, overrides: Sequence[str], source: str, base: Path, shown_as: Mapping[str, str]
) -> "JobSpec":
    """Parse the text of a job file, and make all paths absolute."""
    return with_absolute_paths(_formed(text, overrides, source, base, shown_as), base)


def _formed(
    text: str, overrides: Sequence[str], source: str, base: Path, shown_as: Mapping[str, str]
) -> "JobSpec":
    from oobleck.core.errors import InvalidJob
    from oobleck.core.job.file import parse_job

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
        raise CommandFailed(message, options.USAGE) from error
    return job


def with_absolute_paths(job: "JobSpec", base: Path) -> "JobSpec":
    """Return the job with absolute paths, because workers run in other folders."""
    from oobleck.core.job.model import ModelSpec, OwnModelSpec

    def absolute(path: str | None) -> str | None:
        return None if path is None else str(base / os.path.expanduser(path))

    def folder_of(python: str | None, path: str | None) -> str | None:
        return code_folder(python, path, base, carried)

    def of_data(data: "DataSpec") -> "DataSpec":
        return dataclasses.replace(
            data,
            text=tuple(str(base / os.path.expanduser(pattern)) for pattern in data.text),
            tokens=absolute(data.tokens),
            tokenizer=absolute(data.tokenizer),
            cache=absolute(data.cache),
            path=folder_of(data.python, data.path),
        )

    def of_model(model: "AnyModel") -> "AnyModel":
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
        raise CommandFailed(text, options.USAGE) from error


def read_profile(job: "JobSpec") -> str:
    """Return the text of the profile file that the job names, checked; empty if it names none."""
    from oobleck.core.profile_file import parse_profile
    from oobleck.planner.profile.measurement import check_fits

    if job.profile_path is None:
        return ""
    text = read_text(Path(job.profile_path), PROFILE_OF_JOB)
    try:
        check_fits(parse_profile(text), job)
    except ValueError as error:
        raise CommandFailed(f"profile: {job.profile_path}: {error}", options.USAGE) from error
    return text


def check_checkpoints(job: "JobSpec") -> None:
    """Check, for a cluster on this machine, that the job may begin with its checkpoints.

    Raise CommandFailed.
    """
    from oobleck.core.checkpoint import why_not_begin
    from oobleck.host.storage.checkpoints import list_checkpoints
    from oobleck.host.storage.folder import open_folder

    spec = job.checkpoint
    if spec is None:
        return
    try:
        listing = list_checkpoints(open_folder(spec.path))
    except ValueError as error:
        raise CommandFailed(f"checkpoint.path: {error}", options.USAGE) from error
    except OSError as error:
        text = f"checkpoint.path: cannot read {spec.path}: {error.strerror or error}"
        raise CommandFailed(text, options.USAGE) from error
    newest = next(((found.name, found.manifest) for found in listing.checkpoints), None)
    damaged = tuple(listing.damaged.values())
    if refusal := why_not_begin(job, spec, newest, damaged=damaged, data=None):
        raise CommandFailed(refusal, options.USAGE)


def check_inputs(job: "JobSpec") -> list[Problem]:
    """Check a job's data and initial weights for a cluster on this machine.

    They must be complete; the data must suffice and fit the model. Text that is not tokenised yet
    gets only quick checks. Return warnings; raise CommandFailed.
    """
    doubts = _check("data", job.data, job)
    if job.evaluation is not None and job.evaluation.data is not None:
        doubts += _check("evaluation.data", job.evaluation.data, job)
    check_weights(job)
    return doubts


def _check(key: str, data: "DataSpec", job: "JobSpec") -> list[Problem]:
    from oobleck.host.data.token_file import DataError, look_through, read_info

    model = job.model
    if data.code is not None or not model.reads_tokens:
        return []  # checked when the model was described
    doubt = ""
    try:
        if data.tokens is not None and data.dtype is not None and read_info(data.tokens) is None:
            doubt = look_through(data.tokens, data.dtype, model.tokens)
        tokens = _count_tokens(data, _data_files(data, key), model.tokens)
    except DataError as error:
        raise CommandFailed(f"{key}: {error}", options.USAGE) from error
    needed = model.row_tokens + 1
    if tokens is not None and tokens < needed:
        raise CommandFailed(
            f"{key}: {data.tokens or ', '.join(data.text)} holds {tokens} tokens, too few "
            f"for one row of {needed}; give more text or lower model.sequence_length",
            options.USAGE,
        )
    return [Problem(where=key, sentence=doubt, warning=True)] if doubt else []


def check_weights(job: "JobSpec") -> None:
    """Check that the initial weights on this machine are complete. Raise CommandFailed."""
    from oobleck.host.storage.weight_files import WeightsError, open_weights

    if job.model.initial is None:
        return
    try:
        open_weights(job.model.initial)
    except WeightsError as error:
        raise CommandFailed(f"model.weights: {error}", options.USAGE) from error


def _count_tokens(data: "DataSpec", files: set[str], vocabulary: int) -> int | None:
    """Return the number of tokens in `files`; None: unknown yet. Raise DataError."""
    from oobleck.host.data.documents import is_plain
    from oobleck.host.data.token_file import read_info, type_of
    from oobleck.host.data.tokenizer import load_tokenizer

    if data.tokens is not None:
        info = read_info(data.tokens)
        dtype = type_of(data.tokens, info, data.dtype)
        if info is not None:
            info.check_vocabulary(vocabulary, data.tokens)
            return info.tokens
        return os.path.getsize(data.tokens) // (int(dtype.removeprefix("uint")) // 8)
    if data.tokenizer is not None or data.separator:
        tokenizer = load_tokenizer(data.tokenizer)
        tokenizer.check_vocabulary(vocabulary)
        tokenizer.separator(data.separator)
        return None
    if not all(map(is_plain, files)):
        return None
    _check_bytes(sorted(files), vocabulary)
    return sum(os.path.getsize(path) for path in files)


def _check_bytes(files: Sequence[str], vocabulary: int) -> None:
    """Raise DataError if the start of the text has a byte that exceeds the vocabulary."""
    from oobleck.host.data.token_file import DataError

    left = _LOOKED_AT_BYTES if vocabulary < _BYTES else 0
    for path in files:
        if left <= 0:
            return
        with open(path, "rb") as file:
            begin = file.read(left)
        left -= len(begin)
        if begin and (highest := max(begin)) >= vocabulary:
            raise DataError(
                f"{path} has byte {highest}, and every byte is a token: it must be below "
                f"model.vocabulary ({vocabulary}); set model.vocabulary to {_BYTES}"
            )


def _data_files(data: "DataSpec", key: str) -> set[str]:
    if data.tokens is not None:
        _check_is_file(f"{key}.tokens", data.tokens)
        return {data.tokens}
    found: set[str] = set()
    for pattern in data.text:
        matches = glob.glob(pattern, recursive=True)
        if not matches:
            raise CommandFailed(
                f"{key}.text: no file matches {pattern}; give paths or globs of existing text "
                "files (relative ones are relative to the job file)",
                options.USAGE,
            )
        files = {path for path in matches if os.path.isfile(path)}
        if not files:
            _check_is_file(f"{key}.text", matches[0])
        found |= files
    return found


def _check_is_file(key: str, path: str) -> None:
    if not os.path.exists(path):
        raise CommandFailed(f"{key}: {path} does not exist", options.USAGE)
    if not os.path.isfile(path):
        raise CommandFailed(
            f"{key}: {path} is not a regular file; give files of training data",
            options.USAGE,
        )
