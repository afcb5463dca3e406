"""Output of `oobleck doctor`: findings of the cluster as the master tells them, or of this host
alone.

Owns how they are shown. Must not know how anything is looked at.
"""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click
import msgspec

from oobleck.cli.options import FAILED
from oobleck.core.finding import Finding
from oobleck.host.display import inline
from oobleck.host.ipc.endpoint import Endpoint

if TYPE_CHECKING:
    from oobleck.cli.output.form import Form

LEVELS = ("pass", "slow", "warn", "fail")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    nodes: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()
    pairs: bool = False


def of_cluster(endpoint: Endpoint, question: Question) -> Iterator[Finding]:
    """Raises CommandFailed."""
    from oobleck.cli.client import MasterClient
    from oobleck.proto import control_pb2 as pb

    request = pb.ExamineRequest(
        nodes=question.nodes,
        data=[os.path.abspath(path) for path in question.data],
        checkpoints=[_absolute(path) for path in question.checkpoints],
        pairs=question.pairs,
    )
    with MasterClient(endpoint) as connection:
        connection.nodes()  # whether there is one, which takes it no time
        yield from connection.examine(request)


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)


def of_host(question: Question) -> Iterator[Finding]:
    """Yield the findings of this host, without a master."""
    from oobleck.core.orders import About, Look, Looked, Place
    from oobleck.host.doctor.process import Doctor

    own = [Place(path=os.environ.get("TMPDIR", "/tmp"), use="own")]
    own.append(Place(path=os.path.expanduser("~/.cache/oobleck"), use="own"))
    places = [Place(path=os.path.abspath(path), use="data") for path in question.data]
    places += [Place(path=_absolute(path), use="checkpoints") for path in question.checkpoints]
    about = About(places=tuple(own), variables=dict(os.environ))

    async def look() -> Sequence[Finding]:
        doctor = Doctor(lambda: about, None)
        try:
            answer = await doctor.ask(Look(places=tuple(places)))
        finally:
            await doctor.close()
        if isinstance(answer, Looked):
            return answer.findings
        what = getattr(answer, "reason", "the process that looks says something else")
        fix = "look at what this host is busy with (top, dmesg)"
        return [Finding(check="doctor", level="fail", what=what, fix=fix)]

    yield from asyncio.run(look())


def show(found: Iterator[Finding], form: "Form") -> int:
    """Print findings as they come, and how many there are; the exit code. Raises CommandFailed, and
    what `found` does."""
    from oobleck.cli.output.form import document, is_data

    began = time.monotonic()
    known = []
    for finding in found:
        known.append(finding)
        if not is_data(form) and (form == "wide" or is_told(finding)):
            click.echo(inline(str(finding)))
    spent_s = time.monotonic() - began
    if is_data(form):
        findings = [msgspec.to_builtins(finding) for finding in known]
        click.echo(document({"findings": findings, "seconds": round(spent_s, 1)}, form))
    else:
        click.echo(f"{counted(known)}, in {spent_s:.0f} s")
    return FAILED if any(finding.level == "fail" for finding in known) else 0


def is_told(finding: Finding) -> bool:
    """Return whether a narrow listing has the finding: of a thousand nodes, a pass is in a wide
    listing alone."""
    return finding.level != "pass" or not finding.node


def counted(findings: Sequence[Finding]) -> str:
    return ", ".join(f"{sum(f.level == one for f in findings)} {one}" for one in LEVELS)
