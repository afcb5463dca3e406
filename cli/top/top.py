"""`oobleck top`: a page on the terminal. Owns the checks before the page is shown."""

import os
import sys
from importlib.util import find_spec

import click

from oobleck.cli import options
from oobleck.cli.options import job_argument
from oobleck.host.command import FAILED, USAGE, CommandFailed
from oobleck.host.ipc.endpoint import Endpoint

_EPILOG = """\b
Keys:
  arrows, Tab   move in a list, and from list to list; n: the list of nodes
  Enter         details of the node or the incident
  d, u          drain the node, or let it take part again
  c             cancel the job
  [ and ]       the job submitted before, or after
  i, e, l       incidents, events, or output of workers
  z             losses of all steps, or of the newest
  q             end

Exit codes: 0 after q, 3 no such job, 4 no master answers at the start, 5 denied."""


@click.command(epilog=_EPILOG)
@job_argument(required=False)
@options.master_option
def top(job_id: str | None, master: Endpoint) -> int:
    """Watch nodes, the job JOB (default: the one that trains) and its events on one page.

    Needs a terminal, and the package textual: pip install 'oobleck-cluster[top]'.
    """
    _check_terminal()
    if find_spec("textual") is None:
        raise CommandFailed(
            "this page needs the package textual: pip install 'oobleck-cluster[top]'",
            FAILED,
        )
    if not os.environ.get("NO_COLOR"):  # an empty one has no effect
        os.environ.pop("NO_COLOR", None)
    from oobleck.cli.top.feed import Feed
    from oobleck.cli.top.page import Page

    with Feed(master, job_id) as feed:
        return Page(feed, str(master)).run() or 0


def _check_terminal() -> None:
    """Raise CommandFailed unless there is a terminal."""
    instead = "'oobleck status --watch' needs none"
    if os.environ.get("TERM", "dumb") == "dumb":
        raise CommandFailed(f"this TERM cannot show a page; {instead}", USAGE)
    # The page is drawn on standard error and reads keys from standard input.
    if not all(stream and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise CommandFailed(
            f"standard input, output and error must be a terminal; {instead}", USAGE
        )
