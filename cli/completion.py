"""`oobleck completion`, and shell completion of job and node names.

Names come from the master named earlier on the command line. If it does not answer within a second,
there are none. Must import nothing heavy.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem, get_completion_class

if TYPE_CHECKING:
    from oobleck.cli.client import MasterClient

F = TypeVar("F", bound=Callable[..., Any])

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


def node_argument(function: F) -> F:
    """Add the argument `name`, a node that the master knows."""
    return click.argument("name", metavar="NODE", shell_complete=node_names)(function)


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

    Empty if the master cannot be asked.
    """
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
