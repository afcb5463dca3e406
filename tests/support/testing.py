"""A process of pytest-xdist's that is forked from `bench.support.preloaded`: what tests load is
there already, which takes each of them eight seconds of a core otherwise."""

import os
import shlex
import sys
from types import ModuleType

import anyio

from bench.support.preloaded import Preloaded
from oobleck.host.system.process import with_parent
from support.folders import SUPPORT


def python_of(preloaded: Preloaded) -> str:
    """The command that execnet is to start in the place of Python's."""
    own = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, (preloaded.python_path, str(SUPPORT.parent), own)))
    return shlex.join(["env", f"PYTHONPATH={path}", *with_parent(__name__)])


def main() -> None:
    """Run what execnet sends, as `python -c` would; nothing that it starts is forked too."""
    warm, tests, *own = os.environ.pop("PYTHONPATH").split(os.pathsep)
    if own:
        os.environ["PYTHONPATH"] = os.pathsep.join(own)
    for folder in (warm, tests):
        sys.path.remove(folder)
    # Has a plugin of pytest's, which rewrites its assertions as it is loaded, and else complains.
    anyio.__doc__ = "PYTEST_DONT_REWRITE"
    # Processes of multiprocessing's begin with the main module of the one that starts them.
    module = sys.modules["__main__"] = ModuleType("__main__")
    sys.argv = ["-c"]
    exec(eval(sys.stdin.readline()), vars(module))
