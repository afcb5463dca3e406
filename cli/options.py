"""Options and arguments that commands share, and completion by shells.

Names of jobs and nodes come from the master named earlier on the command line. If it does not
answer within a second, there are none. Must import nothing heavy.
"""

import functools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem, get_completion_class

from oobleck.core.units import parse_seconds
from oobleck.host.address import split_address, split_addresses
from oobleck.host.display import inline
from oobleck.host.ipc.endpoint import DEFAULT_MASTER, Endpoint, choose_endpoint
from oobleck.host.security.credentials import Credentials

if TYPE_CHECKING:
    from oobleck.cli.client import MasterClient


_CREDENTIALS = "oobleck.credentials"
_INSECURE = "oobleck.insecure"

F = TypeVar("F", bound=Callable[..., Any])


class Seconds(click.ParamType):  # type: ignore[type-arg]  # older releases are not generic at run time
    """Type of options for a time like 30s, 10m or 2h, in seconds."""

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


MASTERS = "HOST:PORT[,HOST:PORT...]"


def check_master(addresses: str) -> None:
    """Raise ValueError unless masters may be at these addresses."""
    for address in split_addresses(addresses):
        _, port = split_address(address)
        if port == 0:
            raise ValueError(f"{address!r}: no master has port 0")


def endpoint(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Endpoint | None:
    """Return the master to ask, with the credentials to present; None: no value. Raise a usage
    error."""
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
        found = choose_endpoint(value, credentials, insecure=insecure)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if found.credentials is not None and not ctx.resilient_parsing:
        _warn(found.credentials)
    return found


def _warn(credentials: Credentials) -> None:
    """Say on standard error that the certificate ends soon."""
    from oobleck.host.security.validity import warning

    if told := warning(credentials, time.time()):
        click.echo(f"warning: {inline(told)}", err=True)


def endpoint_again(ctx: click.Context, found: Endpoint) -> Callable[[], Endpoint]:
    """Return a function that gives `found` with the current credentials of their folder.

    It is for commands that run long. It raises ValueError if there are no valid credentials.
    """
    if found.credentials is None:
        return lambda: found
    folder = ctx.meta.get(_CREDENTIALS)

    def again() -> Endpoint:
        now = choose_endpoint(str(found), folder, insecure=False)
        return found if now.credentials is None else now  # if this user's own master is down

    return again


def _note(key: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    """Return a callback that stores the option's value for `endpoint`."""

    def note(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
        ctx.meta[key] = value

    return note


def credential_options(function: F) -> F:
    """Add the options that `endpoint` needs besides the address."""
    function = click.option(
        "--insecure",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_note(_INSECURE),
        help="Call a master on this host in the clear; this is the default unless it is your own.",
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
        help="Folder of your certificate.  [default: the operator's, if the master is your own "
        "and on this host]",
    )(function)


def master_option(function: F) -> F:
    """Add the option `master`: the Endpoint of --master, --credentials and --insecure."""
    return click.option(
        "--master",
        envvar="OOBLECK_MASTER",
        default=DEFAULT_MASTER,
        show_default=True,
        show_envvar=True,
        metavar=MASTERS,
        callback=endpoint,
        help="The master to ask. Of several addresses, the first that answers is used.",
    )(credential_options(function))


def set_option(function: F) -> F:
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Replace a value of the job file, such as training.microbatch=4; null removes a "
        "section such as resources or checkpoint. May be repeated.",
    )(function)


def pack_option(function: F) -> F:
    return click.option(
        "--pack/--no-pack",
        default=True,
        show_default=True,
        help="Whether code beside the job file goes with the job. Without, nodes read it at the "
        "same path.",
    )(function)


def json_option(help_text: str) -> Callable[[F], F]:
    return click.option("--json", "as_json", is_flag=True, help=help_text)


def form_options(json_help: str) -> Callable[[F], F]:
    """Add the option `form`, an `oobleck.cli.output.text.Form`, for --json, --wide and --output."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, as_json: bool, wide: bool, output: str | None, **others: Any) -> Any:
            asked = "json" if as_json else "wide" if wide else None
            if output is not None and asked not in (None, output):
                flag = "--json" if as_json else "--wide"
                raise click.UsageError(f"--output {output} and {flag} differ; leave one out")
            return function(*args, form=output or asked or "table", **others)

        for option in (
            click.option(
                "-o",
                "--output",
                type=click.Choice(["wide", "json", "yaml"]),
                help="wide: all columns, even if they exceed the terminal.",
            ),
            click.option("--wide", is_flag=True, help="The same as --output wide."),
            click.option("--json", "as_json", is_flag=True, help=json_help),
        ):
            call = option(call)
        return call  # type: ignore[return-value]  # click calls it by keywords

    return decorate


def follow_option(help_text: str) -> Callable[[F], F]:
    """Add the option `follow`, also named --watch: for growing output the two are the same."""
    return click.option("-f", "--follow", "-w", "--watch", "follow", is_flag=True, help=help_text)


# ---- watching

#: Default interval of watching.
_WATCH = "2s"
_LEAST_WATCH_S = 0.1
_WATCH_FLAGS = ("-w", "--watch")


class WatchCommand(click.Command):
    """Command whose `--watch` takes an optional time.

    The next word is the time only if it is one, so that `--watch JOB` names a job.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given: list[str] = []
        for at, argument in enumerate(args):
            if argument == "--":
                return super().parse_args(ctx, [*given, *args[at:]])
            alone = argument in _WATCH_FLAGS and not _is_time(args[at + 1 : at + 2])
            given.append(f"{_WATCH_FLAGS[1]}={_WATCH}" if alone else argument)
        return super().parse_args(ctx, given)


def _is_time(following: list[str]) -> bool:
    try:
        parse_seconds("".join(following))
    except ValueError:
        return False
    return True


def _check_watch(ctx: click.Context, parameter: click.Parameter, value: Any) -> float | None:
    if value is not None and value < _LEAST_WATCH_S:
        raise click.BadParameter(f"is too often for a master; use {_LEAST_WATCH_S:g}s or more")
    return None if value is None else float(value)


def watch_option(function: F) -> F:
    """Add the option `watch_s` of a `WatchCommand`."""
    return click.option(
        *_WATCH_FLAGS,
        "watch_s",
        type=Seconds(),
        callback=_check_watch,
        metavar="[TIME]",
        help=f"Refresh every TIME (default {_WATCH}) until Ctrl-C.",
    )(function)


# ---- completion


#: The shell is blocked meanwhile.
_PATIENCE_S = 1.0
_VARIABLE = "_OOBLECK_COMPLETE"

_EPILOG = """\b
Examples:
  oobleck completion bash > ~/.local/share/bash-completion/completions/oobleck
  oobleck completion zsh > ~/.zfunc/_oobleck      # with ~/.zfunc in fpath
  oobleck completion fish > ~/.config/fish/completions/oobleck.fish"""


@click.command(epilog=_EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script with which SHELL completes commands, options and names."""
    made = get_completion_class(shell)
    assert made is not None, "click has these"
    root = click.get_current_context().find_root()
    click.echo(made(root.command, {}, "oobleck", _VARIABLE).source())


def job_argument(*, required: bool = True) -> Callable[[F], F]:
    """Add the argument `job_id`, a job that the master knows."""
    metavar = "JOB" if required else "[JOB]"
    return click.argument("job_id", metavar=metavar, required=required, shell_complete=_job_names)


def nodes_argument(function: F) -> F:
    """Add the argument `names`, nodes that the master knows."""
    return click.argument(
        "names",
        metavar="NODE...",
        nargs=-1,
        required=True,
        shell_complete=node_names,
        callback=lambda _context, _parameter, names: tuple(dict.fromkeys(names)),
    )(function)


def _job_names(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    def ask(master: "MasterClient") -> Iterable[tuple[str, str]]:
        return ((job.job_id, job.state) for job in master.jobs(_PATIENCE_S))

    return _names(ctx, ask, incomplete)


def node_names(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    def ask(master: "MasterClient") -> Iterable[tuple[str, str]]:
        return ((node.node, node.state) for node in master.nodes(_PATIENCE_S))

    return _names(ctx, ask, incomplete)


def _names(
    ctx: click.Context,
    ask: Callable[["MasterClient"], Iterable[tuple[str, str]]],
    incomplete: str,
) -> list[CompletionItem]:
    """Return completions: names that begin with `incomplete`, with a word for shells that show one.
    Empty if the master cannot be asked."""
    from oobleck.cli.client import MasterClient
    from oobleck.host.command import CommandFailed

    endpoint = ctx.params.get("master")
    if endpoint is None:  # it is invalid, or its credentials are
        return []
    try:
        with MasterClient(endpoint) as master:
            found = list(ask(master))
    except CommandFailed:
        return []
    return [CompletionItem(name, help=word) for name, word in found if name.startswith(incomplete)]
