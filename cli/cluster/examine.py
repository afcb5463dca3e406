"""Output of `oobleck doctor`: findings about the cluster from the master, or about this host.

Owns how they are shown. Must not know how anything is checked.
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
    """Yield the findings about the cluster. Raise CommandFailed."""
    from oobleck.cli.client import MasterClient
    from oobleck.proto import control_pb2 as pb

    request = pb.ExamineRequest(
        nodes=question.nodes,
        data=[os.path.abspath(path) for path in question.data],
        checkpoints=[_absolute(path) for path in question.checkpoints],
        pairs=question.pairs,
    )
    with MasterClient(endpoint) as connection:
        connection.nodes()  # fails at once if there is no master
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
        what = getattr(answer, "reason", "the checking process gave another answer")
        fix = "check what occupies this host (top, dmesg)"
        return [Finding(check="doctor", level="fail", what=what, fix=fix)]

    yield from asyncio.run(look())


def show(found: Iterator[Finding], form: "Form") -> int:
    """Print findings as they arrive, and their number; return the exit code.

    Raise CommandFailed, and what `found` raises.
    """
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
    """Return whether a narrow listing shows the finding.

    Passed checks of nodes, of which there may be thousands, are only in a wide one.
    """
    return finding.level != "pass" or not finding.node


def counted(findings: Sequence[Finding]) -> str:
    return ", ".join(f"{sum(f.level == one for f in findings)} {one}" for one in LEVELS)
