"""Story of one job so far, of each kind no more than fits a page: however long the job trains and
the page is open, memory stays within bounds. Knows no master and no terminal."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from oobleck.cli.output.events import event_line
from oobleck.cli.view.series import Point, Series
from oobleck.proto import control_pb2 as pb

MOST_EVENTS = 500
MOST_INCIDENTS = 100
MOST_LINES = 1000
#: Of a line of output; what is longer is cut.
MOST_CHARACTERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A story as it is at a moment; newest last."""

    #: All steps that were read, several in a point where they are many; and the newest.
    whole: Sequence[Point] = ()
    recent: Sequence[Point] = ()
    #: Of the time since the first of these steps; None: there is none.
    goodput: float | None = None
    #: One line each.
    events: Sequence[str] = ()
    #: Records of those that are over.
    incidents: Sequence[dict[str, Any]] = ()
    logs: Sequence[pb.LogLine] = ()


@dataclass(slots=True)
class Story:
    steps: Series = field(default_factory=Series)
    events: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    incidents: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_INCIDENTS))
    logs: deque[pb.LogLine] = field(default_factory=lambda: deque(maxlen=MOST_LINES))

    def happened(self, record: dict[str, Any]) -> None:
        """Keep a record of events.jsonl."""
        self.events.append(event_line(record))
        if record["event"] == "incident":
            self.incidents.append(record)

    def printed(self, line: pb.LogLine) -> None:
        text = line.line[:MOST_CHARACTERS]
        self.logs.append(pb.LogLine(node=line.node, slot=line.slot, line=text, time=line.time))

    def told(self, until: float) -> Told:
        """`until`: Unix time that goodput counts to."""
        return Told(
            whole=self.steps.whole(),
            recent=self.steps.recent(),
            goodput=self.steps.goodput(until),
            events=tuple(self.events),
            incidents=tuple(self.incidents),
            logs=tuple(self.logs),
        )
