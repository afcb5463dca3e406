"""Options and codes that the commands share. Must import nothing heavy."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from oobleck.host.address import split_address

DEFAULT_MASTER = "127.0.0.1:4600"

FAILED = 1
USAGE = 2
NO_SUCH_THING = 3
UNREACHABLE = 4
DENIED = 5

F = TypeVar("F", bound=Callable[..., Any])


def check_address(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    """HOST:PORT, or a usage error that says so."""
    try:
        _, port = split_address(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    if port == 0:
        raise click.BadParameter(f"{value!r}: no master has port 0")
    return value


def master_option(function: F) -> F:
    return click.option(
        "--master",
        envvar="OOBLECK_MASTER",
        default=DEFAULT_MASTER,
        show_default=True,
        show_envvar=True,
        metavar="HOST:PORT",
        callback=check_address,
        help="The master to ask.",
    )(function)


def set_option(function: F) -> F:
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Replace a value of the job file, such as training.microbatch=4. May be repeated.",
    )(function)


def json_option(help_text: str) -> Callable[[F], F]:
    return click.option("--json", "as_json", is_flag=True, help=help_text)
