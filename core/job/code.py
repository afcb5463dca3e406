"""Code of the user that a job names: a function that makes a model, a data set or an optimizer.

Owns how such code is named, which names are refused on every node, and which a node refuses by its
agent's flags. Loads nothing; `oobleck.worker.runtime.code` does.
"""

import re
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, NewType

from msgspec import Meta, Struct

#: A mapping of the job file, kept as the JSON text of it.
Json = NewType("Json", Annotated[str, Meta(extra={"mapping": True})])

NO_ARGUMENTS = Json("{}")
#: Description of user code that was not examined yet.
NOT_DESCRIBED = Json("")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_PLUGIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: Module whose classes every node lets a job name: torch's own optimizers.
TORCH_OPTIM = "torch.optim"
#: Packages that every node has and that hold no users' models.
_NOT_THE_USERS = frozenset({"oobleck", "pip", "setuptools", "pytest", "click", "fsspec"})


#: Allows any module, from anywhere.
ANY = "*"
#: Names of the running program's own module, which workers cannot import.
_NO_MODULES = ("__main__", "__mp_main__")


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Function of the user's, and the arguments to call it with."""

    #: Either package.module:function, or the name of an entry point.
    name: str
    #: Group of an entry point; None: `name` is a function.
    group: str | None
    #: Directory that holds the module, the same on all nodes; None: it is installed.
    path: str | None
    #: JSON of the keyword arguments.
    arguments: Json
    #: True for Oobleck's own code, which needs no permission.
    ours: bool = False

    @property
    def module(self) -> str:
        """Module that has the function, where the code is a function."""
        return self.name.partition(":")[0]


def is_allowed(code: Code, prefixes: Collection[str]) -> bool:
    """Return whether an agent that allows these packages and directories lets its workers load the
    function. Paths are compared as they are written."""
    if code.group is not None or code.ours:
        return True
    if code.path is not None:
        above = {code.path, *map(str, PurePath(code.path).parents)}
        return any(prefix == ANY or prefix in above for prefix in prefixes)
    return code.module == TORCH_OPTIM or any(
        prefix == ANY or f"{code.module}.".startswith(f"{prefix}.") for prefix in prefixes
    )


class CodePolicy(Struct, frozen=True, kw_only=True):
    """Jobs' code that a node runs, by its agent's flags."""

    #: True if it accepts wheels of jobs.
    accepts: bool = False
    #: Packages and directories whose functions jobs may load; *: any.
    allows: tuple[str, ...] = ()

    def why_not(self, functions: Iterable[Code], *, brought: bool) -> str:
        """Return why the node does not run these functions of a job, and the flag to give; empty:
        it does, or its workers decide. `brought`: the job has a wheel, for functions without a
        path."""
        if brought and not self.accepts:
            return (
                "no code that comes with a job runs there; start the agent with --accept-code "
                "(oobleck up HOSTS.txt -- --accept-code; oobleck local --accept-code)"
            )
        # A link on the node may lead from a path to a directory that it allows.
        maybe = any(prefix.startswith("/") for prefix in self.allows)
        for code in functions:
            runs = brought if code.path is None else maybe
            if not runs and not is_allowed(code, self.allows):
                return (
                    f"jobs may not load {code.name} there; start the agent with --allow-code "
                    f"{code.module if code.path is None else code.path}, or install the code as a "
                    "plugin (an entry point)"
                )
        return ""


def check_code(*, plugin: str | None, python: str | None, path: str | None) -> None:
    """Raise ValueError, beginning with the key at fault, where these cannot name code."""
    if plugin is not None and python is not None:
        raise ValueError("plugin: give one of plugin (an entry point) and python (a function)")
    if plugin is not None and not _PLUGIN.fullmatch(plugin):
        raise ValueError(f"plugin: {plugin!r} is no name of an entry point")
    if python is not None:
        if not _FUNCTION.fullmatch(python) or python.partition(":")[0].endswith(".py"):
            raise ValueError(f"python: {python!r} {_why_no_function(python)}")
        first = python.partition(":")[0].partition(".")[0]
        if first in _NO_MODULES:
            name = python.partition(":")[2]
            raise ValueError(
                f"python: {name} is in a notebook or script, which workers cannot import; write "
                f"it to a file, such as my_job.py, and give my_job:{name}"
            )
        if first in sys.stdlib_module_names or first in _NOT_THE_USERS:
            raise ValueError(
                f"python: {first} is not a module of yours; name a function that you wrote"
            )
    elif path is not None:
        raise ValueError("path: is where a python module lies; leave it out")


def _why_no_function(python: str) -> str:
    """Return the reason why a text is no package.module:name, and the fix."""
    module, colon, name = python.partition(":")
    if "<" in python:
        return (
            "has no name that workers could import, being a lambda or within another function; "
            "define it at the top of a module"
        )
    if colon and module.endswith(".py"):
        folder, _, file = module.rpartition("/")
        where = f", and {folder} as path" if folder else ""
        return f"names a file; write {file.removesuffix('.py')}:{name}{where}"
    if colon and "." in name:
        return "is not at the top of its module; give a function that is, as package.module:name"
    head, _, last = python.rpartition(".")
    if not colon and _FUNCTION.fullmatch(f"{head}:{last}"):
        return f"has no colon; write {head}:{last}"
    return "is no class or function; write package.module:name"
