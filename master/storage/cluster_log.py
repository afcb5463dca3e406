"""The cluster's newest events in memory, as JSON lines for operators. They follow from the journal
and are in its snapshots. Must not know what events mean."""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import takewhile

import msgspec

from oobleck.master.storage.incident_lines import EventLine

#: Most events kept: months of most clusters, or the losses and returns of a thousand nodes.
MOST_EVENTS = 2000
#: Number of the journal's event, and line.
Numbered = tuple[int, str]


class ClusterLog:
    def __init__(self, kept: Iterable[Numbered] = ()) -> None:
        self._lines = deque[Numbered](kept, MOST_EVENTS)

    @property
    def lines(self) -> Sequence[Numbered]:
        return tuple(self._lines)

    def add(self, number: int, line: EventLine, unix: float) -> None:
        """Add the line of the journal's event `number`."""
        text = msgspec.json.encode({"id": number, "time": unix, **line}).decode()
        self._lines.append((number, text))

    def read(self, after: int, last: int) -> Sequence[Numbered]:
        """Return the lines of the events behind `after`, up to `last`, oldest first."""
        newer = takewhile(lambda line: line[0] > after, reversed(self._lines))
        return [line for line in newer if line[0] <= last][::-1]
