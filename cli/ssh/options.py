"""Options of the commands that reach hosts by ssh. Loads nothing of ssh."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from oobleck.cli.options import F, json_option


def hosts_argument(function: F) -> F:
    return click.argument(
        "file", metavar="HOSTS.txt", type=click.Path(exists=True, dir_okay=False, path_type=Path)
    )(function)


def login_options(function: F) -> F:
    """Add the options `identity`, `known_hosts` and `python`."""
    key_file = click.Path(exists=True, dir_okay=False, path_type=Path)
    options: list[Callable[[Any], Any]] = [
        click.option(
            "--identity",
            type=key_file,
            metavar="FILE",
            help="Private key for ssh.  [default: the ssh-agent's, and ~/.ssh/id_*]",
        ),
        click.option(
            "--known-hosts",
            type=key_file,
            metavar="FILE",
            help="Host keys, which are always checked.  [default: ~/.ssh/known_hosts and "
            "/etc/ssh/ssh_known_hosts]",
        ),
        click.option(
            "--python",
            default="python3",
            show_default=True,
            metavar="PROGRAM",
            help="Python 3.11 or newer on the hosts.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def ssh_options(function: F) -> F:
    """Add the options of `login_options`, and `directory`, `parallel`, `as_json`."""
    options: list[Callable[[Any], Any]] = [
        click.option(
            "--directory",
            default="",
            metavar="DIR",
            help="Folder for all files on a host.  [default: ~/.oobleck/up; if root logs "
            "in, /opt/oobleck-up]",
        ),
        click.option(
            "--parallel",
            type=click.IntRange(1, 1000),
            default=32,
            show_default=True,
            metavar="N",
            help="How many hosts at a time.",
        ),
        json_option("One JSON object: hosts, each with what was done or the problem; and seconds."),
    ]
    for option in reversed(options):
        function = option(function)
    return login_options(function)
