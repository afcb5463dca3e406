"""The installed programs. Loading one takes a second or more, and Ctrl-C ends it quietly then too:
this module imports nothing slow, and loads the program by name."""

import importlib
import sys


def oobleck() -> None:
    _run("oobleck.cli.main")


def agent() -> None:
    _run("oobleck.agent.__main__")


def master() -> None:
    _run("oobleck.master.__main__")


def _run(module: str) -> None:
    try:
        importlib.import_module(module).main()
    except KeyboardInterrupt:
        sys.exit(130)
