"""Packing of the code beside a job file into a wheel that goes with the job.

Code travels if more nodes accept it than allow its folder. Otherwise, and if all nodes are on this
machine, it is read in place. Data, checkpoints and all else that is not code stay.
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
from oobleck.cli.output.text import GONE
from oobleck.core.job.code import ANY, Code, is_allowed
from oobleck.core.job.spec import JobSpec
from oobleck.core.units import count, format_bytes
from oobleck.host.command import USAGE, CommandFailed
from oobleck.host.storage.backup import JOURNAL
from oobleck.host.system.files import read_regular
from oobleck.host.wheel import S, Wheel, placed
from oobleck.proto import control_pb2 as pb
from oobleck.proto.status import read_code

#: Suffixes of Python, and of small files in packages that it reads: settings, sources of kernels.
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
#: Most names of files in each list of the line about them.
_NAMES_SHOWN = 3


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
    if not (pack and beside and job.code is None and _travels(beside[0], base, nodes)):
        yield job
        return
    found = find(base, stays=_paths_of(job))
    content = wheel_of(found)
    say(_summary(found, base))
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


def _travels(code: Code, base: Path, nodes: Sequence[pb.NodeInfo]) -> bool:
    """Return whether sending the code in the folder `base` with the job lets more nodes run it."""
    live = [node for node in nodes if node.state not in (*GONE, "disconnected")]
    known = [policy for node in live if (policy := read_code(node))]
    if live and not known:  # agents or a master of an earlier release
        return False
    folders = [dataclasses.replace(code, path=path) for path in (str(base), os.path.realpath(base))]
    allowing = [any(is_allowed(folder, one.allows) for folder in folders) for one in known]
    if all_here(nodes) and all(allowing):
        return False
    accepting = sum(one.accepts for one in known)
    # A node that allows any folder need not have this one, so it counts only as accepting.
    in_place = sum(
        allowed and not (one.accepts and ANY in one.allows)
        for one, allowed in zip(known, allowing, strict=True)
    )
    if accepting or in_place:
        return accepting > in_place
    # No node accepts it, or is known to allow it. Send it unless, on some node, links may lead from
    # the folder to one that it allows.
    return all(one.why_not([code], brought=False) for one in known)


def _paths_of(job: JobSpec) -> frozenset[str]:
    """Return where the job's checkpoints, output and data are."""
    evaluated = job.evaluation.data if job.evaluation else None
    data = [one for one in (job.data, evaluated) if one is not None]
    paths = [path for one in data for path in (*one.text, one.tokens, one.tokenizer, one.cache)]
    paths += [job.output, job.checkpoint.path if job.checkpoint else None]
    return frozenset(path for path in paths if path is not None)


def _summary(found: "Found", folder: Path) -> str:
    """Return a line about the packed and the omitted files of the folder."""
    others = [name for name in found.files if not name.endswith(_PYTHON)]
    besides = f" (not Python: {_first(others)})" if others else ""
    left = f"; left out: {_first(found.left)}" if found.left else ""
    size = format_bytes(found.size)
    return f"packed {count(len(found.files), 'file')}{besides}, {size}, from {folder}{left}"


def _first(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


@dataclass(slots=True, kw_only=True)
class Found:
    """Code in a folder."""

    #: Content by path below the folder.
    files: dict[str, bytes] = field(default_factory=dict)
    #: Files and folders that are not packed, except hidden ones and caches; folders end with a
    #: slash.
    left: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(map(len, self.files.values()))


def find(folder: Path, *, stays: Collection[str] = ()) -> Found:
    """Return the code in a folder and below it. `stays`: paths and globs of what is no code. Raise
    CommandFailed if there is too much of it."""
    found, entries, size = Found(), 0, 0
    within = os.path.join(os.path.realpath(folder), "")
    packages = set[str]()
    for at, folders, names in os.walk(folder):
        entries += len(folders) + len(names)
        if entries > _MOST_ENTRIES:
            raise _too_much(folder, f"more than {_MOST_ENTRIES} files")
        if at != str(folder):
            if any(name.endswith(_MARKERS) for name in names):
                found.left.append(os.path.join(os.path.relpath(at, folder), ""))
                folders.clear()
                continue
            if "__init__.py" in names or os.path.dirname(at) in packages:
                packages.add(at)
        below = sorted(name for name in folders if not name.startswith("."))
        below = [os.path.join(at, name) for name in below if not name.endswith(_NO_CODE)]
        left = [path for path in below if os.path.islink(path) or _stays(path, stays)]
        found.left += [os.path.join(os.path.relpath(path, folder), "") for path in left]
        folders[:] = [os.path.basename(path) for path in below if path not in left]
        for name in sorted(names):
            path = os.path.join(at, name)
            shown = os.path.relpath(path, folder)
            if name.startswith("."):
                continue
            leads_out = not os.path.realpath(path).startswith(within)
            if leads_out or _stays(path, stays) or not _is_code(path, packaged=at in packages):
                found.left.append(shown)
                continue
            try:
                found.files[shown] = read_regular(path, _MOST_BYTES)
            except OSError as error:
                text = f"{path}: {error.strerror}; correct that, or leave it out of {folder}"
                raise CommandFailed(text, USAGE) from error
            size += len(found.files[shown])
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


def _stays(path: str, stays: Collection[str]) -> bool:
    """Return whether the path is one of these, or matches one that is a glob."""
    return path in stays or any(fnmatchcase(path, pattern) for pattern in stays)


def _is_code(path: str, *, packaged: bool) -> bool:
    if not (path.isascii() and path.isprintable() and "\\" not in path):
        return False
    suffix = os.path.splitext(path)[1]
    if suffix != _PYTHON and not (packaged and suffix in _READ):
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
