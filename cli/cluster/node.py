"""Commands that change nodes: drain, undrain and forget."""

import math
import sys
import time
from functools import partial

import click

from oobleck.cli.client import MasterClient, Unreachable
from oobleck.cli.jobs.follow import Away, warn
from oobleck.cli.options import Seconds, master_option, node_argument
from oobleck.cli.output.progress import OneLine
from oobleck.cli.output.text import GONE
from oobleck.host.command import FAILED, NO_SUCH_THING, USAGE, CommandFailed
from oobleck.host.display import inline
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.proto import control_pb2 as pb

_POLL_S = 0.2
MOST_REASON = 500


@click.group()
def node() -> None:
    """Take a node out for maintenance, and back, or for good."""


@node.command(short_help="Move the work off NODE at a step boundary.")
@node_argument
@click.option("--reason", default="", metavar="TEXT", help="Shown by 'oobleck nodes'.")
@click.option("--wait", is_flag=True, help="Return when the node has no more work.")
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
    "continue without the node: it then waits for nodes, and state held only by the node is lost, "
    "except for a checkpoint that is taken first.",
)
@master_option
def drain(
    name: str, reason: str, wait: bool, timeout_s: float | None, force: bool, master: Endpoint
) -> None:
    """Move the work off NODE at the next step boundary, and assign none until it is undrained.

    No step is lost or repeated. If a job cannot continue without the node, or could then lose fewer
    nodes than its fault_tolerance, the node is kept until that changes, or until the drain is
    forced; the answer says so, and why. Repeating the command changes nothing.

    Exit codes: 0 the node is drained, or without --wait asked to be; 1 it is not within --timeout.
    """
    if len(reason) > MOST_REASON:
        raise CommandFailed(f"--reason: is longer than {MOST_REASON} characters", USAGE)
    if not reason.isprintable():
        raise CommandFailed("--reason: must be one line of printable characters", USAGE)
    if timeout_s is not None and not wait:
        raise CommandFailed("--timeout: requires --wait; give both, or neither", USAGE)
    with MasterClient(master) as connection:
        line = OneLine(sys.stdout)
        info = connection.drain(name, reason, force=force)
        line.show(_told(info))
        try:
            if wait:
                _await_drained(connection, info, line, timeout_s)
        finally:
            line.finish()


def _await_drained(
    connection: MasterClient, info: pb.NodeInfo, line: OneLine, timeout_s: float | None
) -> None:
    """Show the node's state until it is drained or lost. Raise CommandFailed after `timeout_s`."""
    began = time.monotonic()
    until = math.inf if timeout_s is None else began + timeout_s
    away = Away(partial(_above, line), answered=True)
    while True:
        told = _told(info)
        if info.state in ("drained", *GONE):
            line.show(told)
            return
        waited = f"{time.monotonic() - began:.0f} s  " if line.live else ""
        line.show(waited + told)
        if time.monotonic() >= until:
            raise CommandFailed(f"--timeout {timeout_s:g}s: {told}", FAILED)
        time.sleep(_POLL_S)
        try:
            info = _find(connection, info.node)
            away.answered()
        except Unreachable as unreachable:
            if time.monotonic() >= until:
                raise CommandFailed(f"--timeout {timeout_s:g}s: {told}", FAILED) from unreachable
            away.wait(unreachable)


@node.command()
@node_argument
@master_option
def undrain(name: str, master: Endpoint) -> None:
    """Let NODE take part again.

    It may have been drained, be in quarantine, or be left out of the job.
    """
    with MasterClient(master) as connection:
        click.echo(_told(connection.undrain(name)))


@node.command()
@node_argument
@master_option
def forget(name: str, master: Endpoint) -> None:
    """Forget NODE, which is gone for good: it is no longer listed.

    Its agent must have ended, and no job may need what it holds. If it comes back it is a new node,
    which nobody has drained.
    """
    with MasterClient(master) as connection:
        connection.forget(name)
    click.echo(f"{name} is forgotten")


def _find(connection: MasterClient, name: str) -> pb.NodeInfo:
    found = next((info for info in connection.nodes() if info.node == name), None)
    if found is None:
        raise CommandFailed(f"node {name} was lost, and the master has forgotten it", NO_SUCH_THING)
    return found


def _told(info: pb.NodeInfo) -> str:
    return f"{info.node} {info.state}" + (f": {inline(info.reason)}" if info.reason else "")


def _above(line: OneLine, text: str) -> None:
    line.finish()
    warn(text)
