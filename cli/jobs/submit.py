"""Commands that change jobs: submit, cancel and adopt."""

import json
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import click

from oobleck.cli.client import MasterClient
from oobleck.cli.jobs.checkpoint import take
from oobleck.cli.jobs.checks import all_here, check_checkpoints, check_inputs
from oobleck.cli.jobs.follow import follow_events, follow_status, ignore, merged
from oobleck.cli.jobs.job_file import folder_of, read_job, read_profile
from oobleck.cli.jobs.own_code import sent_text, tell
from oobleck.cli.jobs.packing import packed
from oobleck.cli.options import job_argument, master_option, pack_option, set_option
from oobleck.cli.output.events import event_line
from oobleck.cli.output.text import ENDED, progress_line
from oobleck.core.job.spec import JobSpec
from oobleck.host.command import FAILED, INTERRUPTED, NO_OUTPUT, CommandFailed, OutputFailed
from oobleck.host.display import inline
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.proto import control_pb2 as pb

#: States of a job in which its workers can take a checkpoint between steps.
_TRAINS = ("running", "reconfiguring")


@click.command(epilog="Exit codes: see 'oobleck --help'.")
@click.argument("job_file", metavar="JOB.yaml", type=click.Path(dir_okay=False, path_type=Path))
@set_option
@click.option("--follow", "following", is_flag=True, help="Show progress until the job has ended.")
@pack_option
@master_option
def submit(
    job_file: Path, overrides: tuple[str, ...], following: bool, pack: bool, master: Endpoint
) -> int:
    """Queue the job that JOB.yaml (- for standard input) describes and print its id.

    Relative paths in it start from its folder; its data is needed only on the nodes. The code
    beside it goes along, unless all nodes are on this machine. With --follow the exit code is 1 if
    the job fails or is cancelled; Ctrl-C stops following, not the job.
    """
    job = read_job(job_file, overrides)
    profile = read_profile(job)
    with MasterClient(master) as connection:
        reply = send(connection, job, profile, folder_of(job_file), pack=pack)
        _tell_id(reply.job_id)
        if reply.warning:
            click.echo(inline(f"oobleck: warning: {reply.warning}"), err=True)
        return _follow(connection, reply.job_id) if following else 0


def send(
    connection: MasterClient,
    job: JobSpec,
    profile: str,
    base: Path,
    *,
    pack: bool,
    say: Callable[[str], None] = tell,
) -> pb.SubmitReply:
    """Submit a job, with its code where nodes need that. Raise CommandFailed.

    `profile`: text of the profile file that it names. `base`: folder of its file.
    """
    nodes = connection.nodes()
    if all_here(nodes):
        for doubt in check_inputs(job):
            tell(f"warning: {doubt}")
        check_checkpoints(job)
    with packed(job, base, nodes, pack=pack, say=say) as sent:
        text = sent_text(connection, sent)
    return connection.submit(text, secrets.token_hex(16), profile=profile)


def _tell_id(job_id: str) -> None:
    """Print the job's id, or raise CommandFailed with it: otherwise users would submit again."""
    try:
        click.echo(job_id)
    except OutputFailed as error:
        raise CommandFailed(f"submitted {job_id}, but {error}", NO_OUTPUT) from error


def _follow(connection: MasterClient, job_id: str) -> int:
    try:
        state, why = follow(connection, job_id, sys.stdout)
    except KeyboardInterrupt:
        raise CommandFailed(
            f"{job_id} continues; watch it with 'oobleck status {job_id} --watch', end it with "
            f"'oobleck cancel {job_id}'",
            INTERRUPTED,
        ) from None
    if state == "succeeded":
        return 0
    raise CommandFailed(f"{job_id} {state}" + (f": {why}" if why else ""), FAILED)


@click.command()
@job_argument()
@click.option(
    "--checkpoint", "save_first", is_flag=True, help="Take a checkpoint first, and wait for it."
)
@click.option(
    "--unknown",
    is_flag=True,
    help="End the workers of a job that nodes train and the master does not know.",
)
@master_option
def cancel(job_id: str, save_first: bool, unknown: bool, master: Endpoint) -> None:
    """End a job, and show its newest checkpoint. A job that has ended is not changed.

    With --checkpoint, a job that cannot take one now continues.
    """
    if unknown and save_first:
        raise click.UsageError("--checkpoint: the master cannot ask an unknown job for one")
    with MasterClient(master) as connection:
        if unknown:
            nodes = connection.cancel_unknown(job_id)
            click.echo(inline(f"{job_id} ends on {', '.join(nodes)}"))
            return
        if save_first:
            _save(connection, job_id)
        job = connection.cancel(job_id)
    ended_before = job.state in ENDED and job.state != "cancelled"
    told = f"had {job.state} before; there is nothing to cancel" if ended_before else job.state
    click.echo(f"{job_id} {told}")
    if job.checkpoint:
        click.echo(inline(f"newest checkpoint: step {job.checkpoint_step}  {job.checkpoint}"))
    elif job.checkpoint_path:
        click.echo("no checkpoint was taken")


@click.command()
@job_argument()
@master_option
def adopt(job_id: str, master: Endpoint) -> None:
    """Take over a job that nodes train and the master does not know.

    This is needed after the loss of the master's state directory. Training continues meanwhile. It
    is refused if the job's nodes disagree, or are not all connected. 'oobleck jobs' lists such
    jobs.
    """
    with MasterClient(master) as connection:
        lost = connection.adopt(job_id)
    click.echo(f"{job_id} is this master's now, and training continues; lost:")
    for line in lost:
        click.echo(inline(f"  {line}"))


def _save(connection: MasterClient, job_id: str) -> None:
    state = connection.job(job_id).state
    if state in ENDED:
        raise CommandFailed(
            f"no checkpoint: {job_id} is {state} and cannot take one; there is nothing to cancel",
            FAILED,
        )
    try:
        if state not in _TRAINS:
            raise CommandFailed(f"{job_id} is {state} and cannot take one", FAILED)
        take(connection, job_id, f"{job_id} is not cancelled; ")
    except CommandFailed as error:
        if error.exit_code == INTERRUPTED:
            raise
        text = f"no checkpoint: {error.format_message()}; {job_id} is not cancelled; leave"
        raise CommandFailed(
            f"{text} out --checkpoint to cancel it without one", error.exit_code
        ) from error


# ---- a live line of progress, with events above it


#: Interval of lines if the output is not a terminal.
LINE_EVERY_S = 1.0


class LiveLine:
    """Writer of progress: one live line on a terminal, else a line per second or change."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()
        self._drawn = ""
        self._state = ""
        self._printed_at = float("-inf")
        #: Threads that follow other streams print lines above.
        self._lock = threading.Lock()

    @property
    def width(self) -> int | None:
        """Width of a line, one column less than the terminal, which may scroll after its last.
        None: unlimited."""
        return shutil.get_terminal_size().columns - 1 if self._live else None

    def status(self, status: pb.JobStatus, now: float) -> None:
        line = progress_line(status, self.width)
        state = f"{status.state} {status.generation} {status.reason}"
        with self._lock:
            if self._live:
                self._rewrite(line)
            elif line != self._drawn and (
                state != self._state or now - self._printed_at >= LINE_EVERY_S
            ):
                self._print(line)
                self._printed_at = now
                self._drawn = line
            self._state = state

    def above(self, line: str) -> None:
        """Print a permanent line above the live line."""
        with self._lock:
            if not self._live:
                self._print(line)
                return
            drawn = self._drawn
            self._rewrite("")
            self._print(line)
            self._rewrite(drawn)

    def finish(self) -> None:
        if self._live and self._drawn:
            self._print("")

    def _print(self, line: str) -> None:
        self._out.write(line + "\n")
        self._out.flush()

    def _rewrite(self, line: str) -> None:
        self._out.write("\r\x1b[K" + line[: self.width])
        self._out.flush()
        self._drawn = line


def follow(master: MasterClient, job_id: str, out: TextIO = sys.stdout) -> tuple[str, str]:
    """Show progress until the job has ended; return its last state, and why it failed."""
    progress = LiveLine(out)
    last, why = pb.JobStatus(), ""
    statuses = follow_status(master, job_id, progress.above)
    # The stream of statuses reports an absence of the master.
    events = follow_events(master, job_id, answered=True, tell=ignore)
    try:
        for item in merged({"status": statuses, "event": events}):
            match item:
                case ("status", pb.JobStatus() as last) if last.state not in ENDED:
                    progress.status(last, time.monotonic())
                case ("event", pb.EventRecord(json=text)):
                    record = json.loads(text)
                    if of_failure := _why_failed(record):
                        why = why or of_failure
                    else:
                        progress.above(event_line(record, progress.width))
                case _:
                    pass
        why = why or last.reason
        last.reason = ""
        # The final state is drawn below all events, which may arrive after it.
        progress.status(last, time.monotonic())
        return last.state, why
    finally:
        progress.finish()


def _why_failed(record: dict[str, Any]) -> str:
    """Return the error by which the job failed, for the command's own; empty: another event."""
    match record:
        case {
            "event": "incident",
            "outcome": "failed",
            "root_cause": {"kind": "job error", "summary": summary},
        }:
            return str(summary)
        case {"event": "failed", "reason": reason}:
            return str(reason)
        case _:
            return ""
