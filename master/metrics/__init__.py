"""Registry of the master's metrics: all families, and one reading of them.

Read between two iterations of the loop, in the event loop, so that nothing changes meanwhile. The
cost of a reading grows with nodes and jobs alone. Reads, never writes.
"""

from collections.abc import Iterator

from oobleck.host.metrics import Reading, families_of
from oobleck.master.metrics import jobs, nodes, own
from oobleck.master.metrics.own import Parts
from oobleck.master.metrics.tally import Tally

FAMILIES = families_of(nodes, jobs, own)


class Collector:
    """Counts from its making on."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._tally = Tally()
        parts.master.watch(self._tally.note)

    def read(self) -> Iterator[Reading]:
        master, tally = self._parts.master, self._tally
        now, unix = master.now(), master.unix()
        yield from nodes.read(master.state, tally, now, unix)
        yield from jobs.read(master.state, tally, now, unix)
        yield from own.read(self._parts, tally)
