"""Showing what the master says: once, or again and again with `--watch`.

Owns when it is asked and how the answers follow one another. Must not know what they are.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import click

from oobleck.cli.client import MasterClient, Unreachable
from oobleck.cli.jobs.away import Away, warn
from oobleck.cli.output import colour
from oobleck.cli.output.form import Form, document, entry, is_data
from oobleck.cli.output.screen import Screen
from oobleck.cli.output.text import moment
from oobleck.host.display import inline
from oobleck.host.ipc.endpoint import Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer of the master, for programs and for people."""

    data: object
    #: Made when it is shown: it depends on the terminal's width.
    text: Callable[[], str]
    #: There will never be another answer than this.
    last: bool = False


def show(
    endpoint: Endpoint, ask: Callable[[MasterClient], Answer], form: Form, watch_s: float | None
) -> None:
    """Print the answer; with `watch_s` ask again after so many seconds, until the last answer.
    Raises CommandFailed."""
    with MasterClient(endpoint) as connection:
        if watch_s is None:
            answer = ask(connection)
            _warn(connection.problem)
            click.echo(document(answer.data, form) if is_data(form) else _painted(answer.text()))
        elif colour.is_terminal() and not is_data(form):
            _redraw(connection, ask, watch_s)
        else:
            _append(connection, ask, form, watch_s)


def _redraw(
    connection: MasterClient, ask: Callable[[MasterClient], Answer], watch_s: float
) -> None:
    screen = Screen(sys.stdout, _painted)
    shown = ""

    def tell(line: str) -> None:
        screen.draw(f"{moment(time.time())}  {line}\n\n{shown}")

    try:
        for answer in _answers(connection, ask, watch_s, tell):
            warning = f"warning: {inline(connection.problem)}\n\n" if connection.problem else ""
            shown = f"{warning}{answer.text()}"
            screen.draw(f"{moment(time.time())}\n\n{shown}")
    finally:
        screen.finish()


def _append(
    connection: MasterClient, ask: Callable[[MasterClient], Answer], form: Form, watch_s: float
) -> None:
    """Each answer below the one before."""
    problem = ""
    for answer in _answers(connection, ask, watch_s, warn):
        if connection.problem != problem:
            problem = connection.problem
            _warn(problem)
        if is_data(form):
            click.echo(entry(answer.data, form))
        else:
            click.echo(f"{moment(time.time())}\n{_painted(answer.text())}\n")
        sys.stdout.flush()


def _answers(
    connection: MasterClient,
    ask: Callable[[MasterClient], Answer],
    watch_s: float,
    tell: Callable[[str], None],
) -> Iterator[Answer]:
    """The first one is there, or Unreachable is raised; later ones are waited for without end."""
    away = Away(tell, patience_s=math.inf)
    while True:
        due = time.monotonic() + watch_s
        try:
            answer = ask(connection)
        except Unreachable as unreachable:
            away.wait(unreachable)
            continue
        away.answered()
        yield answer
        if answer.last:
            return
        time.sleep(max(0.0, due - time.monotonic()))


def _painted(text: str) -> str:
    return colour.states(text) if colour.is_wanted() else text


def _warn(problem: str) -> None:
    """Print what ails the master itself, beside the answer, which programs may read."""
    if problem:
        click.echo(f"warning: {inline(problem)}", err=True)
