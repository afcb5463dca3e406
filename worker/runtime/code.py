"""Loading and running of the user's functions that a job names, where this node allows them.

Owns the error sentences of user code, the fingerprint of its sources, and `running`, which wraps
every call of it. `oobleck.core.job.code` refuses names that no job may use.
"""

import ast
import dataclasses
import difflib
import hashlib
import importlib
import importlib.metadata
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch.utils.file_baton import FileBaton

from oobleck.core.job.code import ANY as ANY  # re-exported for callers of `allow`
from oobleck.core.job.code import NO_ARGUMENTS, TORCH_OPTIM, Code, is_allowed
from oobleck.core.units import MOST_REASON_BYTES, head
from oobleck.host.display import inline
from oobleck.host.ipc.marker import Marker
from oobleck.worker.runtime.errors import JobError, NodeError, of_the_device

# ---- Bounded waits for extensions that torch compiles in users' code (`load_inline`, `load`).
#
# torch locks an extension's folder by a file. If the compiling process is killed, the file stays
# and torch waits for ever. A live process keeps the file open, which other processes of its host
# can see.


#: Longest time without a change in a folder that no process of this host has locked. A process of
#: another host may be compiling there.
STALE_S = 60.0
_LOOK_S = 0.5


def bound_waits() -> None:
    """Make torch's waits raise NodeError if the lock is of a killed process."""
    FileBaton.wait = _wait  # type: ignore[method-assign, assignment]  # torch's has no limit


def _wait(baton: FileBaton) -> None:
    lock = Path(baton.lock_file_path)
    changed, since = _changed(lock), time.monotonic()
    while lock.exists():
        if _is_open(lock) or _changed(lock) != changed:
            changed, since = _changed(lock), time.monotonic()
        if time.monotonic() - since > STALE_S:
            raise NodeError(
                f"{lock} is the lock of a process that was killed while it compiled an extension "
                f"of torch; remove it, as by rm {lock}, and start again"
            )
        time.sleep(_LOOK_S)


def _changed(lock: Path) -> float:
    """Return the time of the last change of the lock's folder or a file in it."""
    try:
        with os.scandir(lock.parent) as entries:
            times = [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
        return max([lock.parent.stat().st_mtime, *times])
    except FileNotFoundError:  # just removed
        return 0.0


def _is_open(lock: Path) -> bool:
    """Return whether a process of this user has the lock open."""
    place = str(lock.resolve())
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(descriptor) == place:
                return True
        except OSError:  # another user's, or just closed
            continue
    return False


#: Packages whose lines do not locate an error in the user's code.
_NOT_THE_USERS = sys.stdlib_module_names | {"oobleck", "torch", "numpy"}

#: Limits on an exception's text: characters read, and bytes shown.
_MOST_READ, _MOST_TEXT_BYTES = 64 << 10, MOST_REASON_BYTES // 2

_allowed: tuple[str, ...] = ()


def allow(prefixes: Sequence[str]) -> None:
    """Allow this process to load functions of these packages, or below these directories."""
    global _allowed
    _allowed = tuple(
        os.path.realpath(prefix) if os.sep in prefix else prefix for prefix in prefixes
    )
    bound_waits()


def call(code: Code, key: str, *given: Any, **more: Any) -> Any:
    """Call the function with its arguments and those `given`, and return its result.

    `key`: key of the job file, for messages. Raises NodeError where this node lacks the function or
    does not allow it, JobError where it fails.
    """
    function = _function(code, key)
    what = f"{key}: {code.name}"
    try:
        with running(what, passing=(OSError, ImportError)):
            return function(*given, **more, **json.loads(code.arguments or NO_ARGUMENTS))
    except (OSError, ImportError, NodeError) as error:  # another node may have what is missing
        if code.ours and isinstance(error, NodeError):
            raise  # our own errors are complete
        raise NodeError(f"{what} failed: {described(error)}") from error


class running:  # used like a function
    """Context manager that runs its block as user code, so that errors are the job's alone.

    Any error becomes a UserCodeError; `SystemExit`, `KeyboardInterrupt` and `GeneratorExit` become
    Ended. It names `what` ran, `how` it failed, and the user's line. JobError, NodeError, device
    errors and errors of `passing` are raised unchanged. Meanwhile the process's marker names the
    running code, in case the process ends.
    """

    def __init__(
        self,
        what: str,
        how: str | Callable[[], str] = " failed",
        *,
        passing: tuple[type[BaseException], ...] = (),
    ) -> None:
        self._what, self._how, self._passing = what, how, passing

    def __enter__(self) -> None:
        _marked.enter(self._what)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _marked.leave()
        if error is None or isinstance(error, (JobError, NodeError, *self._passing)):
            return
        if of_the_device(error):
            return
        how = self._how if isinstance(self._how, str) else self._how()
        raised = UserCodeError if isinstance(error, Exception) else Ended
        raise raised(f"{self._what}{how}: {described(error)}") from error


class UserCodeError(JobError):
    """Error raised by the user's code, with the original as its cause."""


class Ended(UserCodeError):
    """End of the process by the user's code, or an attempt at it. It would do so on any node."""


class _Marked:
    """Record of the user's code that runs in this process, in all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marker: Marker | None = None
        #: By thread (`threading.get_ident`), innermost last; only threads that run user code.
        self._running: dict[int, list[str]] = {}

    def begin(self, marker: Marker | None) -> None:
        self._lock = threading.Lock()  # another thread may have held it at the fork
        self._marker, self._running = marker, {}

    def enter(self, what: str) -> None:
        with self._lock:
            self._running.setdefault(threading.get_ident(), []).append(what)
            self._write()

    def leave(self) -> None:
        thread = threading.get_ident()
        with self._lock:
            if thread in self._running:  # entered since `begin`
                self._running[thread].pop()
                if not self._running[thread]:
                    del self._running[thread]
            self._write()

    def end(self) -> None:
        with self._lock:
            if self._marker is not None:
                self._marker.write("")
            self._marker = None

    def _write(self) -> None:
        if self._marker is not None:
            # Any of the threads may end the process.
            innermost = [entered[-1] for entered in self._running.values()]
            self._marker.write(" or ".join(dict.fromkeys(innermost)))


_marked = _Marked()
# A forked process, such as a data loader, must not write to this process's marker.
os.register_at_fork(after_in_child=lambda: mark_in(None))


def mark_in(marker: Marker | None) -> None:
    """Record in `marker`, from now on, the user's code that this process runs; None: stop
    recording.
    """
    _marked.begin(marker)


def end_process(status: int) -> NoReturn:
    """End this process at once, and clear the marker, so that user code is not blamed."""
    _marked.end()
    os._exit(status)


def described(error: BaseException) -> str:
    """Return one line for an exception of the user's code: the error, and the last executed line of
    that code."""
    if isinstance(error, UserCodeError) and error.__cause__ is not None:
        error = error.__cause__
    places = [
        f" ({Path(frame.f_code.co_filename).name}:{line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_THE_USERS
    ]
    try:
        text = str(error)[:_MOST_READ].strip().partition("\n")[0]
    except BaseException:  # noqa: BLE001  # the user's __str__ may raise anything
        text = ""
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    # Some libraries put a whole batch into the text; cut it before the line number.
    return head(inline(what), _MOST_TEXT_BYTES) + inline(places[-1] if places else "")


def fingerprint(*sources: Code) -> str:
    """Return the SHA-256 (hex) over the functions' modules and their imports of the user's own.

    These are modules of the same package or directory, also imported within functions. The
    functions' modules are imported, and nothing is called. Empty for torch's own classes. Raises
    NodeError.
    """
    digest = hashlib.sha256()
    files: dict[str, Path] = {}
    for code in sources:
        if not (code.group is None and code.module == TORCH_OPTIM):
            _function(code, "code")
            files |= _sources(code)
    if not files:
        return ""
    for name in sorted(files):
        digest.update(f"{name}\0".encode())
        digest.update(files[name].read_bytes())
        digest.update(b"\0")
    return digest.hexdigest()


def _sources(code: Code) -> dict[str, Path]:
    """Return the source files of the code, by the names that they have on every node."""
    name = code.module if code.group is None else _entry_point(code, "code").module
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return {}
    if code.path is not None:
        return _with_imports({name: Path(file)}, Path(code.path))
    # Of Oobleck's own code take only the module: its neighbours depend on the installation.
    root = Path(file) if name.startswith("oobleck.") else _root_of(name, Path(file))
    found = root.rglob("*.py") if root.is_dir() else [root]
    return {str(path.relative_to(root.parent)): path for path in found}


def _with_imports(files: dict[str, Path], folder: Path) -> dict[str, Path]:
    """Return `files` and all files below `folder` that they import, judged by their text. Modules
    loaded so far differ from node to node."""
    found, left = dict(files), list(files.items())
    while left:
        name, path = left.pop()
        for imported in sorted(_imported(name, path)):
            place = folder.joinpath(*imported.split("."))
            for file in (place.with_suffix(".py"), place / "__init__.py"):
                if imported not in found and file.is_file():
                    found[imported] = file
                    left.append((imported, file))
    return found


def _imported(name: str, path: Path) -> set[str]:
    """Return the modules that a file may import, with their packages. A name imported from one of
    them, such as a function, is included too."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # files that are not loaded may be invalid
        return set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: 1 - node.level or None] if node.level else []
            origin = ".".join(filter(None, [*parts, node.module]))
            found.add(origin)
            found.update(f"{origin}.{alias.name}" if origin else alias.name for alias in node.names)
    parents = {".".join(one.split(".")[:n]) for one in found for n in range(1, one.count(".") + 1)}
    return {one for one in found | parents if one}


def _root_of(name: str, file: Path) -> Path:
    """Return the folder of the top-level package, or the module's file."""
    depth = name.count(".") + (file.name == "__init__.py")
    for _ in range(depth):
        file = file.parent
    return file


def _entry_point(code: Code, key: str) -> importlib.metadata.EntryPoint:
    assert code.group is not None
    found = importlib.metadata.entry_points(group=code.group)
    if code.name in found.names:
        return found[code.name]
    names = ", ".join(sorted(found.names)) or "none"
    raise NodeError(
        f"{key}: this machine has no entry point {code.name} of the group {code.group} (it has "
        f"{names}); install the package that has it on every node"
    )


def _function(code: Code, key: str) -> Callable[..., Any]:
    if code.group is not None:
        point = _entry_point(code, key)
        name, function = point.module, point.attr
    else:
        if not code.ours:
            _check_allowed(code, key)
        name, _, function = code.name.partition(":")
    if code.path is not None and code.path not in sys.path:
        sys.path.append(code.path)  # after installed modules, which others import
    found = _import(name, code, key)
    try:
        value = getattr(found, function)
    except AttributeError:
        file = getattr(found, "__file__", name)
        near = difflib.get_close_matches(function, vars(found), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise NodeError(
            f"{key}: {file} has no {function} on this machine{hint}; correct the name, and give "
            "every node the same code"
        ) from None
    if not callable(value):
        raise JobError(
            f"{key}: {code.name} is {type(value).__name__}; name a class or function that gives "
            "it, so that every worker makes its own"
        )
    owner = getattr(value, "__module__", None) or ""
    if owner.partition(".")[0] != name.partition(".")[0]:
        where = f", as {owner}:{function}" if owner else ""
        raise JobError(
            f"{key}: {code.name} is no function of {name}; name it where it is written{where}"
        )
    return value  # type: ignore[no-any-return]  # it is callable


def _check_allowed(code: Code, key: str) -> None:
    """Raise NodeError where the node does not allow the function."""
    path = None if code.path is None else os.path.realpath(code.path)
    if is_allowed(dataclasses.replace(code, path=path), _allowed):
        return
    what = code.module if code.path is None else code.path
    raise NodeError(
        f"{key}: this node does not allow the job to load {code.name}; start its agent with "
        f"--allow-code {what}, or install the code as a plugin (an entry point)"
    )


def _import(name: str, code: Code, key: str) -> Any:
    try:
        with running(f"{key}: {name}", " cannot be imported", passing=(Exception,)):
            found = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            where = f"in {code.path}" if code.path else "where Python looks"
            raise NodeError(
                f"{key}: there is no module {error.name} {where} on this machine; put the code "
                "there on every node, or install it"
            ) from error
        raise NodeError(
            f"{key}: {name} needs the module {error.name}, which this machine lacks; install it on "
            "every node"
        ) from error
    except JobError:
        raise
    except Exception as error:
        raise NodeError(f"{key}: {name} cannot be imported: {described(error)}") from error
    file = getattr(found, "__file__", None)
    if code.path is not None and Path(code.path) not in Path(file or "").parents:
        raise JobError(
            f"{key}: a module {name} is installed ({file}), and comes before the one in "
            f"{code.path}; give yours another name"
        )
    return found
