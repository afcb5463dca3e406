"""Options and codes that the commands share. Must import nothing heavy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from oobleck.host.address import split_address
from oobleck.host.ipc.endpoint import Endpoint, choose_endpoint
from oobleck.planner.units import parse_seconds

DEFAULT_MASTER = "127.0.0.1:4600"

FAILED = 1
USAGE = 2
NO_SUCH_THING = 3
UNREACHABLE = 4
DENIED = 5

_CREDENTIALS = "oobleck.credentials"
_INSECURE = "oobleck.insecure"

F = TypeVar("F", bound=Callable[..., Any])


class Seconds(click.ParamType):  # type: ignore[type-arg]  # not at run time of older ones
    """A time like 30s, 10m or 2h, in seconds."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            return parse_seconds(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def time_option(flag: str, name: str, default: str, help_text: str) -> Callable[[F], F]:
    return click.option(
        flag, name, type=Seconds(), default=default, show_default=True, help=help_text
    )


def check_master(address: str) -> None:
    """Raises ValueError unless a master may be there."""
    _, port = split_address(address)
    if port == 0:
        raise ValueError(f"{address!r}: no master has port 0")


def endpoint(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Endpoint | None:
    """The master to ask and what to show there, or a usage error; None: no value."""
    if value is None:
        return None
    try:
        check_master(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    insecure = bool(ctx.meta.get(_INSECURE))
    credentials = ctx.meta.get(_CREDENTIALS)
    if insecure and ctx.get_parameter_source("credentials") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--insecure and --credentials exclude each other; leave one out")
    try:
        return choose_endpoint(value, credentials, insecure=insecure)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _note(key: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    """A callback that keeps the option's value for the one that makes the endpoint."""

    def note(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
        ctx.meta[key] = value

    return note


def credential_options(function: F) -> F:
    """What `endpoint` needs beside the address."""
    function = click.option(
        "--insecure",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_note(_INSECURE),
        help="Ask a master on this host in the clear, as is the default there.",
    )(function)
    return click.option(
        "--credentials",
        envvar="OOBLECK_CREDENTIALS",
        type=click.Path(file_okay=False, path_type=Path),
        show_envvar=True,
        metavar="DIR",
        is_eager=True,
        expose_value=False,
        callback=_note(_CREDENTIALS),
        help="Folder of your certificate, without which no master off this host answers.",
    )(function)


def master_option(function: F) -> F:
    """`master`: the Endpoint that --master, --credentials and --insecure name."""
    return click.option(
        "--master",
        envvar="OOBLECK_MASTER",
        default=DEFAULT_MASTER,
        show_default=True,
        show_envvar=True,
        metavar="HOST:PORT",
        callback=endpoint,
        help="The master to ask.",
    )(credential_options(function))


def set_option(function: F) -> F:
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Replace a value of the job file, such as training.microbatch=4; with null a section, "
        "such as resources or checkpoint, is as if it were not there. May be repeated.",
    )(function)


def json_option(help_text: str) -> Callable[[F], F]:
    return click.option("--json", "as_json", is_flag=True, help=help_text)


def wide_option(function: F) -> F:
    return click.option(
        "--wide", is_flag=True, help="All columns, also those that take more than the terminal."
    )(function)
