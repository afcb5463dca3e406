"""Running a click command the way users are promised: one line per error, a documented exit code.

Must not know what the commands do.
"""

import os
import sys
from collections.abc import Sequence

import click

from oobleck.host.display import one_line


class CommandFailed(click.ClickException):
    """Ends the command with one line on standard error and `exit_code`."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it from the instance too


def run(command: click.Command, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run `command` as the program `name`; the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            click.echo(f"{name}: the argument {argument!a} is not UTF-8 text", err=True)
            return 2
    try:
        result = command.main(arguments, prog_name=name, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else name
        message = f"{error.format_message().rstrip('.')} (see '{path} --help')"
        click.echo(f"{name}: {one_line(message)}", err=True)
        return 2
    except click.ClickException as error:
        click.echo(f"{name}: {one_line(error.format_message())}", err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # The reader (head, less) has seen enough; do not complain again at the last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return result if isinstance(result, int) else 0


def nearest(name: str, known: Sequence[str]) -> str:
    """What `name` may have been meant for; empty where nothing is like it."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, known, n=1)), "")


def no_command(name: str, known: Sequence[str], ctx: click.Context) -> click.UsageError:
    near = nearest(name, known)
    hint = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}"
    return click.UsageError(f"no command {name!r}; {hint}", ctx)
