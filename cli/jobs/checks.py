"""Checks of a job for a cluster on this machine, and of whether its nodes are here."""

import contextlib
import glob
import os
from collections.abc import Sequence

import psutil

from oobleck.cli.jobs.own_code import Problem
from oobleck.cli.output.text import GONE
from oobleck.core.checkpoint import why_not_begin
from oobleck.core.job.spec import DataSpec, JobSpec
from oobleck.host.address import own_hostname
from oobleck.host.command import USAGE, CommandFailed
from oobleck.host.storage.checkpoints import list_checkpoints
from oobleck.host.storage.folder import open_folder
from oobleck.proto import control_pb2 as pb

#: Tokens of text without a tokenizer, and bytes of text to check before a submission.
_BYTES = 256
_LOOKED_AT_BYTES = 1 << 24


def is_here(node: pb.NodeInfo) -> bool:
    """Return whether the node's agent is a process of this machine."""
    if node.hostname != own_hostname():
        return False
    with contextlib.suppress(psutil.Error):
        return any(
            "oobleck" in word and "agent" in word for word in psutil.Process(node.pid).cmdline()
        )
    return False


def all_here(nodes: Sequence[pb.NodeInfo]) -> bool:
    """Return whether all nodes are on this machine, and so share its files. False if there are
    none."""
    live = [node for node in nodes if node.state not in GONE]
    return bool(live) and all(map(is_here, live))


def check_checkpoints(job: JobSpec) -> None:
    """Check, for a cluster on this machine, that the job may begin with its checkpoints. Raise
    CommandFailed."""
    spec = job.checkpoint
    if spec is None:
        return
    try:
        listing = list_checkpoints(open_folder(spec.path))
    except ValueError as error:
        raise CommandFailed(f"checkpoint.path: {error}", USAGE) from error
    except OSError as error:
        text = f"checkpoint.path: cannot read {spec.path}: {error.strerror or error}"
        raise CommandFailed(text, USAGE) from error
    newest = next(((found.name, found.manifest) for found in listing.checkpoints), None)
    damaged = tuple(listing.damaged.values())
    if refusal := why_not_begin(job, spec, newest, damaged=damaged, data=None):
        raise CommandFailed(refusal, USAGE)


def check_inputs(job: JobSpec) -> list[Problem]:
    """Check a job's data and initial weights for a cluster on this machine.

    They must be complete; the data must suffice and fit the model. Text that is not tokenised yet
    gets only quick checks. Return warnings; raise CommandFailed.
    """
    doubts = _check("data", job.data, job)
    if job.evaluation is not None and job.evaluation.data is not None:
        doubts += _check("evaluation.data", job.evaluation.data, job)
    check_weights(job)
    return doubts


def _check(key: str, data: DataSpec, job: JobSpec) -> list[Problem]:
    from oobleck.host.token_file import DataError, look_through, read_info

    model = job.model
    if data.code is not None or not model.reads_tokens:
        return []  # checked when the model was described
    doubt = ""
    try:
        if data.tokens is not None and data.dtype is not None and read_info(data.tokens) is None:
            doubt = look_through(data.tokens, data.dtype, model.tokens)
        tokens = _count_tokens(data, _data_files(data, key), model.tokens)
    except DataError as error:
        raise CommandFailed(f"{key}: {error}", USAGE) from error
    needed = model.row_tokens + 1
    if tokens is not None and tokens < needed:
        raise CommandFailed(
            f"{key}: {data.tokens or ', '.join(data.text)} holds {tokens} tokens, too few "
            f"for one row of {needed}; give more text or lower model.sequence_length",
            USAGE,
        )
    return [Problem(where=key, sentence=doubt, warning=True)] if doubt else []


def check_weights(job: JobSpec) -> None:
    """Check that the initial weights on this machine are complete. Raise CommandFailed."""
    from oobleck.host.storage.weight_files import WeightsError, open_weights

    if job.model.initial is None:
        return
    try:
        open_weights(job.model.initial)
    except WeightsError as error:
        raise CommandFailed(f"model.weights: {error}", USAGE) from error


def _count_tokens(data: DataSpec, files: set[str], vocabulary: int) -> int | None:
    """Return the number of tokens in `files`; None: unknown yet. Raise DataError."""
    from oobleck.host.token_file import read_info, type_of
    from oobleck.host.tokenise import is_plain, load_tokenizer

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
    from oobleck.host.token_file import DataError

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


def _data_files(data: DataSpec, key: str) -> set[str]:
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
                USAGE,
            )
        files = {path for path in matches if os.path.isfile(path)}
        if not files:
            _check_is_file(f"{key}.text", matches[0])
        found |= files
    return found


def _check_is_file(key: str, path: str) -> None:
    if not os.path.exists(path):
        raise CommandFailed(f"{key}: {path} does not exist", USAGE)
    if not os.path.isfile(path):
        raise CommandFailed(
            f"{key}: {path} is not a regular file; give files of training data",
            USAGE,
        )
