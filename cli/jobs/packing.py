"""Packing of the code beside a job file into a wheel that goes with the job.

Code travels if nodes take it; where all nodes are on this machine, or allow its folder and take no
wheels, it stays and is read in place. Data, checkpoints and whatever else is no code stay too.
"""

import dataclasses
import io
import os
import stat
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from oobleck.cli.jobs.checks import all_here
from oobleck.cli.jobs.own_code import look_at, refuse, tell
from oobleck.core.job.code import Code, is_allowed
from oobleck.core.job.spec import JobSpec
from oobleck.core.units import count, format_bytes
from oobleck.host.command import USAGE, CommandFailed
from oobleck.host.storage.backup import JOURNAL
from oobleck.host.system.files import read_regular
from oobleck.host.wheel import S, Wheel, placed
from oobleck.proto import control_pb2 as pb
from oobleck.proto.status import read_code

#: Suffixes of Python, and of small files that it reads: settings, sources of kernels.
_PYTHON = ".py"
_READ = frozenset(
    {
        *(".json", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".txt", ".jinja"),
        *(".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"),
    }
)
#: Largest file that is not Python.
_MOST_READ_BYTES = 1 << 20
#: Most files and bytes that are packed without being named, and most entries looked at.
_MOST_FILES = 2000
_MOST_BYTES = 16 << 20
_MOST_ENTRIES = 200_000
#: Endings of folders without code of the job's, and of files that only such folders have: virtual
#: environments, checkpoints, a master's state, credentials.
_NO_CODE = ("__pycache__", "node_modules", ".egg-info", ".dist-info", ".data")
_MARKERS = ("pyvenv.cfg", ".safetensors", JOURNAL, "ca.crt")
_METADATA = "oobleck_job-0.dist-info/WHEEL"
_TAGS = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
#: Most names of files that stay behind in the line about the others.
_NAMES_TOLD = 3


@contextmanager
def packed(
    job: JobSpec,
    base: Path,
    nodes: Sequence[pb.NodeInfo],
    *,
    pack: bool = True,
    say: Callable[[str], None] = tell,
) -> Iterator[JobSpec]:
    """Yield the job as it is sent: with its code in a wheel if the nodes need that. The wheel is
    there during the block, and was checked as the nodes will have it. Raise CommandFailed.

    `base`: folder of the job file.
    """
    beside = [code for code in job.functions if code.path == str(base)]
    if not (pack and beside and job.code is None and _travels(beside, nodes)):
        yield job
        return
    found = find(base, stays=_paths_of(job))
    content = wheel_of(found)
    told = f"{count(len(found.files), 'file')}, {format_bytes(found.size)}, from {base}"
    say(f"packed {told}{_left(found.left)}")
    with tempfile.TemporaryDirectory(prefix="oobleck-") as folder:
        path = Path(folder) / "job.whl"
        path.write_bytes(content)
        alone = look_at(carried(job, str(base), str(path)))
        refuse(alone.refusals)
        yield alone.job


def carried(job: JobSpec, folder: str, wheel: str) -> JobSpec:
    """Return the job with the wheel in place of the code in the folder."""

    def moved(spec: S) -> S:
        return dataclasses.replace(spec, path=None) if spec.path == folder else spec

    return dataclasses.replace(placed(job, moved), code=wheel)


def _travels(beside: Sequence[Code], nodes: Sequence[pb.NodeInfo]) -> bool:
    """Return whether the code has to come with the job, so that most nodes run it."""
    there = [node for node in nodes if node.state not in ("lost", "disconnected")]
    known = [code for node in there if (code := read_code(node))]
    in_place = [all(is_allowed(code, one.allows) for code in beside) for one in known]
    if all_here(nodes) and all(in_place):
        return False
    return sum(one.accepts for one in known) >= sum(in_place)


def _paths_of(job: JobSpec) -> frozenset[str]:
    """Return where the job's checkpoints, output and data are."""
    evaluated = job.evaluation.data if job.evaluation else None
    data = [one for one in (job.data, evaluated) if one is not None]
    paths = [path for one in data for path in (*one.text, one.tokens, one.tokenizer, one.cache)]
    paths += [job.output, job.checkpoint.path if job.checkpoint else None]
    return frozenset(path for path in paths if path is not None)


def _left(names: Sequence[str]) -> str:
    if not names:
        return ""
    more = len(names) - _NAMES_TOLD
    told = ", ".join(names[:_NAMES_TOLD]) + (f" and {more} more" if more > 0 else "")
    return f"; no code, or too large, and left out: {told}"


@dataclass(slots=True, kw_only=True)
class Found:
    """Code in a folder."""

    #: Content by path below the folder.
    files: dict[str, bytes] = field(default_factory=dict)
    #: Files without a dot at the beginning that are not packed.
    left: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(map(len, self.files.values()))


def find(folder: Path, *, stays: Collection[str] = ()) -> Found:
    """Return the code in a folder and below it. `stays`: paths and globs of what is no code. Raise
    CommandFailed if there is too much of it."""
    found, entries, size = Found(), 0, 0
    for at, folders, names in os.walk(folder):
        entries += len(folders) + len(names)
        if entries > _MOST_ENTRIES:
            raise _too_much(folder, f"more than {_MOST_ENTRIES} files")
        if at != str(folder) and any(name.endswith(_MARKERS) for name in names):
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if _may_hold_code(at, name, stays))
        for name in sorted(names):
            path = os.path.join(at, name)
            below = os.path.relpath(path, folder)
            if name.startswith("."):
                continue
            if _stays(path, stays) or not _is_code(path):
                found.left.append(below)
                continue
            try:
                found.files[below] = read_regular(path, _MOST_BYTES)
            except OSError as error:
                text = f"{path}: {error.strerror}; correct that, or leave it out of {folder}"
                raise CommandFailed(text, USAGE) from error
            size += len(found.files[below])
            if size > _MOST_BYTES or len(found.files) > _MOST_FILES:
                most = f"{count(_MOST_FILES, 'file')} or {format_bytes(_MOST_BYTES)} of code"
                raise _too_much(folder, f"more than {most}")
    return found


def _too_much(folder: Path, what: str) -> CommandFailed:
    return CommandFailed(
        f"{folder}: {what} beside the job file would go with the job; give the job a folder of its "
        "own, name a wheel as code, or leave the code where it is with --no-pack",
        USAGE,
    )


def _may_hold_code(at: str, name: str, stays: Collection[str]) -> bool:
    if name.startswith(".") or name.endswith(_NO_CODE):
        return False
    return not _stays(os.path.join(at, name), stays)


def _stays(path: str, stays: Collection[str]) -> bool:
    """Return whether the path is one of these, or matches one that is a glob."""
    return path in stays or any(fnmatchcase(path, pattern) for pattern in stays)


def _is_code(path: str) -> bool:
    if not (path.isascii() and path.isprintable() and "\\" not in path):
        return False
    suffix = os.path.splitext(path)[1]
    if suffix != _PYTHON and suffix not in _READ:
        return False
    try:
        status = os.stat(path)
    except OSError:  # a link to nothing
        return False
    small = suffix == _PYTHON or status.st_size <= _MOST_READ_BYTES
    return stat.S_ISREG(status.st_mode) and small


def wheel_of(found: Found) -> bytes:
    """Return a wheel of the code, equal for equal code. Raise CommandFailed."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in [*found.files.items(), (_METADATA, _TAGS.encode())]:
            entry = zipfile.ZipInfo(name)  # of 1980, whenever it is packed
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(entry, content)
    try:
        return Wheel(made.getvalue()).content
    except ValueError as error:
        text = f"the code beside the job file cannot be packed: {error}; or give --no-pack"
        raise CommandFailed(text, USAGE) from error
