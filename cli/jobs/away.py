"""Retries of commands that follow a job, while the master is away, as in a restart.

They ask again, and neither omit nor repeat anything. A command waits only for a master that has
answered once; a wrong address is reported at once.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import click

from oobleck.cli.client import MasterClient, Unreachable
from oobleck.proto import control_pb2 as pb

#: Longest absence of a master before its follower ends.
AWAY_S = 60.0
#: Pause between two attempts.
_AGAIN_S = 0.5


def warn(line: str) -> None:
    click.echo(f"oobleck: {line}", err=True)


class Away:
    """Waiting for one master, with one message."""

    def __init__(self, tell: Callable[[str], None] = warn, *, patience_s: float = AWAY_S) -> None:
        self._tell = tell
        self._patience_s = patience_s
        self._since: float | None = None
        self._known = False

    def answered(self) -> None:
        if self._since is not None:
            self._tell("the master is back")
        self._since, self._known = None, True

    def wait(self, unreachable: Unreachable) -> None:
        """Sleep before the next attempt.

        Raise `unreachable` if the master has never answered, or was away for too long.
        """
        now = time.monotonic()
        if not self._known or now - (self._since or now) >= self._patience_s:
            raise unreachable
        if self._since is None:
            self._since = now
            self._tell("the master is away; running jobs continue without it")
        time.sleep(_AGAIN_S)


def follow_events(
    master: MasterClient,
    job_id: str,
    *,
    answered: bool = False,
    tell: Callable[[str], None] = warn,
) -> Iterator[pb.EventRecord]:
    """Yield all records of the job until it ends.

    `answered`: this master has answered before. Raise CommandFailed.
    """
    away, told = Away(tell), 0
    if answered:
        away.answered()
    while True:
        try:
            for record in master.events(job_id, follow=True):
                away.answered()
                number = int(json.loads(record.json)["id"])
                if number > told:
                    told = number
                    yield record
            return
        except Unreachable as unreachable:
            away.wait(unreachable)


def follow_metrics(
    master: MasterClient,
    job_id: str,
    *,
    from_step: int = 1,
    evaluations: bool = False,
    tell: Callable[[str], None] = warn,
) -> Iterator[str]:
    """Yield the lines of the job's steps, or of its evaluations, until it ends.

    The master has answered before. Raise CommandFailed.
    """
    away, step = Away(tell), from_step
    away.answered()
    while True:
        try:
            for line in master.metrics(
                job_id, follow=True, from_step=step, evaluations=evaluations
            ):
                away.answered()
                # After a power loss the master may lack lines that were shown already.
                if (found := int(json.loads(line)["step"])) >= step:
                    step = found + 1
                    yield line
            return
        except Unreachable as unreachable:
            away.wait(unreachable)


@dataclass(slots=True)
class LogPosition:
    """Position in a job's output, up to which it was shown."""

    #: Time of the newest line, and the number of shown lines of that time.
    time: str = ""
    lines: int = 0

    def told(self, line: pb.LogLine) -> None:
        if line.time != self.time:
            self.time, self.lines = line.time, 0
        self.lines += 1


def follow_logs(
    master: MasterClient, job_id: str, *, node: str | None, rank: int | None, behind: LogPosition
) -> Iterator[pb.LogLine]:
    """Yield the workers' lines after `behind`, and new ones until the job ends.

    The position is updated. Raise CommandFailed.
    """
    away = Away()
    away.answered()
    while True:
        since, known = behind.time, behind.lines
        try:
            for line in master.logs(job_id, follow=True, node=node, rank=rank, since=since):
                away.answered()
                if line.time == since and known:
                    known -= 1
                    continue
                behind.told(line)
                yield line
            return
        except Unreachable as unreachable:
            away.wait(unreachable)
