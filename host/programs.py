"""The installed programs, and the start of any program.

Loading a program takes a second or more, and Ctrl-C must end it quietly even then. So this module
imports nothing slow, and loads the program by name.
"""

import gc
import importlib
import sys


def oobleck() -> None:
    run("oobleck.cli.main")


def agent() -> None:
    run("oobleck.agent.__main__")


def master() -> None:
    run("oobleck.master.__main__")


def run(module: str) -> None:
    """Load the module and call its `main`."""
    try:
        # Loaded objects stay: searching them for garbage takes a tenth of the time.
        gc.disable()
        main = importlib.import_module(module).main
        gc.freeze()
        gc.enable()
        main()
    except KeyboardInterrupt:
        sys.exit(130)
