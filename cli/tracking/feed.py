"""All that is known of a job as one stream: its steps, evaluations and events, each in order and
exactly once, until the job ends."""

import json
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from oobleck.cli.client import MasterClient
from oobleck.cli.jobs.away import follow_events, follow_metrics
from oobleck.host.command import CommandFailed

Kind = Literal["step", "evaluation", "event"]
#: So many are read ahead of who writes them.
_AHEAD = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """How far a copy is."""

    step: int = 0
    #: Step of the last evaluation, and id of the last event.
    evaluation: int = 0
    event: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """One line of metrics.jsonl, evaluations.jsonl or events.jsonl."""

    kind: Kind
    record: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _End:
    kind: Kind
    error: CommandFailed | None


def feed(
    master: MasterClient, job_id: str, since: Written, tell: Callable[[str], None]
) -> Iterator[Item | None]:
    """What is not written yet; None where nothing more is there at the moment. An event comes
    behind the last step before it. `tell`: is told that the master is away, and back. Raises
    CommandFailed."""
    items: queue.Queue[Item | _End] = queue.Queue(_AHEAD)
    due = master.job(job_id).committed_step
    steps = follow_metrics(master, job_id, from_step=since.step + 1, tell=tell)
    evaluations = follow_metrics(
        master, job_id, from_step=since.evaluation + 1, evaluations=True, tell=_nobody
    )
    events = follow_events(master, job_id, answered=True, tell=_nobody)
    _pump("step", map(json.loads, steps), items)
    _pump("evaluation", map(json.loads, evaluations), items)
    _pump("event", (json.loads(event.json) for event in events), items)
    going = {"step", "evaluation", "event"}
    early: list[Item] = []
    at = since.step
    while going:
        if items.empty():
            # Steps of before come as fast as they are read, and events are put between them.
            if at >= due or "step" not in going:
                yield from early
                early = []
            yield None
        match items.get():
            case _End(error=CommandFailed() as error):
                raise error
            case _End(kind=kind):
                going.remove(kind)
            case Item(kind="event") as event:
                if event.record["id"] > since.event:
                    early.append(event)
            case Item(kind="step", record=record) as step:
                while early and early[0].record["time"] < record["time"]:
                    yield early.pop(0)
                at = record["step"]
                yield step
            case evaluation:
                yield evaluation
    yield from early


def _nobody(line: str) -> None:
    """One of the three says it."""


def _pump(kind: Kind, records: Iterable[dict[str, Any]], items: "queue.Queue[Item | _End]") -> None:
    def run() -> None:
        try:
            for record in records:
                items.put(Item(kind, record))
        except CommandFailed as error:
            items.put(_End(kind, error))
        else:
            items.put(_End(kind, None))

    threading.Thread(target=run, daemon=True).start()
