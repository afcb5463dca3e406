"""Runner of a click command, as users are promised: one line per error, a documented exit code.

Must not know the commands.
"""

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO, cast

import click

from oobleck.host.display import one_line

#: Exit codes of `oobleck`; 1 and 2 are those of the daemons too.
FAILED = 1
USAGE = 2
NO_SUCH_THING = 3
UNREACHABLE = 4
DENIED = 5
#: Standard output cannot be written; the requested action may be done.
NO_OUTPUT = 6
#: Ctrl-C.
INTERRUPTED = 130


class CommandFailed(click.ClickException):
    """Error that ends the command with one line on standard error and `exit_code`."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it from the instance too


class OutputFailed(Exception):
    """Error of writing to standard output; the text says why."""


class _Output:
    """Standard output whose failed writes raise OutputFailed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._failing():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._failing():
            self._stream.flush()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            problem = f"standard output cannot be written: {error.strerror}"
            raise OutputFailed(problem) from error


def run(command: click.Command, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run `command` as the program `name` and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if sys.stdout is None:  # else the next opened file would get descriptor 1, and our output
        return _report_error(
            name, "standard output is closed; to have none, send it to /dev/null", 2
        )
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            return _report_error(name, f"the argument {argument!a} is not UTF-8 text", 2)
    try:
        with contextlib.redirect_stdout(cast(TextIO, _Output(sys.stdout))):
            code = _outcome(command, name, arguments)
            if code == 0:  # no error was reported yet
                sys.stdout.flush()
    except OutputFailed as failed:
        broken = isinstance(failed.__cause__, BrokenPipeError)
        # The reader (head, less) of a pipe has seen enough.
        code = 0 if broken else _report_error(name, str(failed), NO_OUTPUT)
    _discard_unwritten()
    return code


def _outcome(command: click.Command, name: str, arguments: Sequence[str]) -> int:
    try:
        result = command.main(arguments, prog_name=name, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else name
        return _report_error(name, f"{error.format_message().rstrip('.')} (see '{path} --help')", 2)
    except click.ClickException as error:
        return _report_error(name, error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except FileNotFoundError:
        if _current_folder_exists():
            raise
        return _report_error(name, "the current folder is gone; change into one that exists", 2)
    return result if isinstance(result, int) else 0


def _report_error(name: str, text: str, code: int) -> int:
    click.echo(f"{name}: {one_line(text)}", err=True)
    return code


def _discard_unwritten() -> None:
    """Discard unwritten standard output, so that the last flush does not fail a second time."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _current_folder_exists() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def nearest(name: str, known: Sequence[str]) -> str:
    """Return the known name most like `name`; empty if none is like it."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, known, n=1)), "")


class Group(click.Group):
    """Group of commands that answers a wrong word with the line that may be meant."""

    #: Words of other tools, and the command for each.
    synonyms: Mapping[str, str] = {}

    def shown(self) -> list[str]:
        """Return what may be the first word."""
        return [name for name, one in self.commands.items() if not one.hidden]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = ctx.resilient_parsing or args[0] in self.list_commands(ctx)  # a shell completes
        if not known and not args[0].startswith("-"):
            raise self.no_command(ctx, args)
        return super().resolve_command(ctx, args)

    def no_command(self, ctx: click.Context, args: Sequence[str]) -> click.UsageError:
        """Return the error for a line whose first word is no command."""
        shown = self.shown()
        if meant := self.meant(args):
            hint = did_you_mean(ctx, meant)
        elif near := self.synonyms.get(args[0]) or nearest(args[0], shown):
            hint = f"did you mean {near!r}?"
        else:
            hint = f"there are {', '.join(shown)}"
        return click.UsageError(f"no command {args[0]!r}; {hint}", ctx)

    def meant(self, args: Sequence[str]) -> list[list[str]]:
        """Return lines that may be meant; by default, with a command that stands further behind."""
        word, *rest = args
        behind = next((one for one in rest if one in self.shown()), None)
        if behind is None:
            return []
        rest.remove(behind)
        # Names of jobs, nodes and files have a digit or a dot; else it is another tool's verb.
        return [[behind, *([word] if re.search(r"[\d.]", word) else []), *rest]]


def did_you_mean(ctx: click.Context, lines: Sequence[Sequence[str]]) -> str:
    """Return the question whether one of `lines`, after the command of `ctx`, is meant."""
    shown = (f"'{ctx.command_path} {shlex.join(line)}'" for line in lines)
    return f"did you mean {' or '.join(shown)}?"
