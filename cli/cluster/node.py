"""Commands that change nodes: drain, undrain and forget."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TextIO

import click

from oobleck.cli.client import MasterClient, Unreachable
from oobleck.cli.jobs.follow import Away, warn
from oobleck.cli.options import Seconds, master_option, nodes_argument
from oobleck.cli.output.progress import OneLine
from oobleck.cli.output.text import GONE
from oobleck.core.units import comma_separated
from oobleck.host.command import FAILED, INTERRUPTED, NO_SUCH_THING, USAGE, CommandFailed, Group
from oobleck.host.display import inline
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.proto import control_pb2 as pb

_POLL_S = 0.2
MOST_REASON = 500


@click.group(cls=Group)
def node() -> None:
    """Take a node out for maintenance, and back, or for good; 'oobleck nodes' lists them."""


@node.command(short_help="Move the work off nodes at a step boundary.")
@nodes_argument
@click.option("--reason", default="", metavar="TEXT", help="Shown by 'oobleck nodes'.")
@click.option("--wait", is_flag=True, help="Return when the nodes have no more work.")
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(),
    help="Longest wait, such as 10m; after it the exit code is 1, and the drain continues.  "
    "[default: for ever]",
)
@click.option(
    "--force",
    is_flag=True,
    help="Drain even if a job could then lose fewer nodes than its fault_tolerance, or cannot "
    "continue without the nodes: it then waits for nodes, and state held only by these is lost, "
    "except for a checkpoint that is taken first.",
)
@master_option
def drain(
    names: tuple[str, ...],
    reason: str,
    wait: bool,
    timeout_s: float | None,
    force: bool,
    master: Endpoint,
) -> None:
    """Move the work off each NODE at the next step boundary, and assign none until it is undrained.

    No step is lost or repeated. Nodes that are named together are judged together, and leave in one
    change. If a job cannot continue without one of them, or could then lose fewer nodes than its
    fault_tolerance, that one is kept until this changes, or until the drain is forced; the answer
    says so, and why. Repeating the command changes nothing.

    Exit codes: 0 the nodes are drained, or without --wait asked to be; 1 they are not within
    --timeout; 3 there is no such node, or it was lost and forgotten meanwhile; 130 Ctrl-C, and the
    drain goes on.
    """
    if len(reason) > MOST_REASON:
        raise CommandFailed(f"--reason: is longer than {MOST_REASON} characters", USAGE)
    if not reason.isprintable():
        raise CommandFailed("--reason: must be one line of printable characters", USAGE)
    if timeout_s is not None and not wait:
        raise CommandFailed("--timeout: requires --wait; give both, or neither", USAGE)
    with MasterClient(master) as connection:
        infos = connection.drain(*names, reason=reason, force=force)
        if not wait:
            for info in infos:
                click.echo(_told(info))
            return
        shown = _Shown(sys.stdout)
        try:
            _await_drained(connection, names, infos, shown, timeout_s)
        except KeyboardInterrupt:
            raise CommandFailed(
                f"the drain of {comma_separated(names)} goes on; watch it with 'oobleck nodes "
                f"--watch', undo it with 'oobleck node undrain {' '.join(names)}'",
                INTERRUPTED,
            ) from None
        finally:
            shown.line.finish()


class _Shown:
    """States of the nodes: a line for each change, and on a terminal one of progress below."""

    def __init__(self, out: TextIO) -> None:
        self.line = OneLine(out)
        self._began = time.monotonic()
        #: What the last line about each node says.
        self._told: dict[str, str] = {}

    def show(self, infos: Sequence[pb.NodeInfo]) -> list[str]:
        """Show the states; return those of nodes that are not drained yet."""
        told = {info.node: _told(info) for info in infos}
        if changed := [told[name] for name in told if told[name] != self._told.get(name)]:
            self.line.show("")
            for one in changed:
                click.echo(one)
        self._told = told
        pending = [info.node for info in infos if info.state not in ("drained", *GONE)]
        if pending and self.line.live:
            waited = f"{time.monotonic() - self._began:.0f} s"
            self.line.show(f"{waited}  waiting for {comma_separated(pending)}")
        return [told[name] for name in pending]


def _await_drained(
    connection: MasterClient,
    names: Sequence[str],
    infos: Sequence[pb.NodeInfo],
    shown: _Shown,
    timeout_s: float | None,
) -> None:
    """Show the nodes' states until all are drained or lost. Raise CommandFailed after `timeout_s`,
    and in the end where nodes are forgotten."""
    until = math.inf if timeout_s is None else time.monotonic() + timeout_s
    away = Away(partial(_above, shown.line), answered=True)
    while pending := shown.show(infos):
        why: Unreachable | None = None
        if time.monotonic() < until:
            time.sleep(_POLL_S)
            try:
                infos = [info for info in connection.nodes() if info.node in names]
                away.answered()
            except Unreachable as unreachable:
                why = unreachable
        if time.monotonic() >= until:
            raise CommandFailed(f"--timeout {timeout_s:g}s: {'; '.join(pending)}", FAILED) from why
        if why is not None:
            away.wait(why)
    known = {info.node for info in infos}
    if missing := [name for name in names if name not in known]:
        raise CommandFailed(
            f"node {comma_separated(missing)} was lost, and the master has forgotten it",
            NO_SUCH_THING,
        )


@node.command(short_help="Let nodes take part again.")
@nodes_argument
@master_option
def undrain(names: tuple[str, ...], master: Endpoint) -> None:
    """Let each NODE take part again.

    It may have been drained, be in quarantine, or be left out of the job.
    """
    with MasterClient(master) as connection:
        _each(names, lambda name: _told(connection.undrain(name)))


@node.command(short_help="Take nodes that are gone for good off the list.")
@nodes_argument
@master_option
def forget(names: tuple[str, ...], master: Endpoint) -> None:
    """Forget each NODE, which is gone for good: it is no longer listed.

    Its agent must have ended, and no job may need what it holds. If it comes back it is a new node,
    which nobody has drained.
    """

    def change(name: str) -> str:
        connection.forget(name)
        return f"{name} is forgotten"

    with MasterClient(master) as connection:
        _each(names, change)


def _each(names: Sequence[str], change: Callable[[str], str]) -> None:
    """Change each node and print its line. Raise CommandFailed after all if one is refused."""
    refused: CommandFailed | None = None
    for name in names:
        try:
            click.echo(change(name))
        except Unreachable:
            if refused is not None:
                warn(refused.format_message())
            raise
        except CommandFailed as failed:
            if refused is not None:
                warn(refused.format_message())
            refused = failed
    if refused is not None:
        raise refused


def _told(info: pb.NodeInfo) -> str:
    return f"{info.node} {info.state}" + (f": {inline(info.reason)}" if info.reason else "")


def _above(line: OneLine, text: str) -> None:
    line.finish()
    warn(text)
