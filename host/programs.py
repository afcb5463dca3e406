"""The installed programs. Ctrl-C ends them quietly also while they are being loaded, which takes a
second or more: so they are loaded by name, by a module that itself imports nothing slow."""

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
