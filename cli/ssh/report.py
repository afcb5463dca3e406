"""Concurrent work on many hosts, and a line for each result. Must not know the work."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import click

from oobleck.cli.options import FAILED
from oobleck.cli.ssh.connection import HostFailed
from oobleck.cli.ssh.hosts import Host
from oobleck.core.units import count
from oobleck.host.display import inline

#: Returns the changes in words; empty: the host was up to date. Raises HostFailed.
Work = Callable[[Host], Awaitable[Sequence[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    host: Host
    done: Sequence[str]
    #: Empty: no problem.
    problem: str
    seconds: float

    @property
    def told(self) -> str:
        took = f" in {self.seconds:.1f} s" if self.done else ""
        text = f"FAILED: {self.problem}" if self.problem else ", ".join(self.done) or "as it was"
        return f"{text}{took}" if not self.problem else text


async def on_each(
    hosts: Sequence[Host], work: Work, *, parallel: int, as_json: bool
) -> list[Outcome]:
    """Do the work on each host; return the outcomes in the hosts' order.

    Without `as_json`, print each as it ends.
    """
    began = time.monotonic()
    turns = asyncio.Semaphore(parallel)
    width = max(len(host.name) for host in hosts)

    async def one(host: Host) -> Outcome:
        async with turns:
            start = time.monotonic()
            done: Sequence[str] = ()
            problem = ""
            try:
                done = await work(host)
            except HostFailed as failed:
                problem = str(failed)
            outcome = Outcome(
                host=host, done=done, problem=problem, seconds=time.monotonic() - start
            )
        if not as_json:
            click.echo(inline(f"{host.name:<{width}}  {host}  {outcome.told}"))
        return outcome

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(host)) for host in hosts]
    outcomes = [task.result() for task in running]
    summarise(outcomes, time.monotonic() - began, as_json=as_json)
    return outcomes


def summarise(outcomes: Sequence[Outcome], seconds: float, *, as_json: bool) -> None:
    if as_json:
        found = [
            {
                "name": outcome.host.name,
                "host": str(outcome.host),
                "line": outcome.host.line,
                "ok": not outcome.problem,
                "done": list(outcome.done),
                "problem": outcome.problem,
                "seconds": round(outcome.seconds, 3),
            }
            for outcome in outcomes
        ]
        click.echo(json.dumps({"hosts": found, "seconds": round(seconds, 3)}, indent=2))
        return
    failed = sum(bool(outcome.problem) for outcome in outcomes)
    told = f", {failed} failed" if failed else ""
    click.echo(f"{count(len(outcomes), 'host')}{told}, in {seconds:.1f} s")


def exit_code(outcomes: Sequence[Outcome]) -> int:
    return FAILED if any(outcome.problem for outcome in outcomes) else 0
