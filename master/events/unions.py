"""Everything that can happen to the cluster, as the master sees it.

Two kinds, told apart here and nowhere else:

*Journaled* events (`Journaled`) are durable facts: what operators asked for, who the nodes are,
and every decision of the master. They are on disk before anyone acts on them, and the durable
part of the state follows from them alone.

*Observed* events (`Observed`) are what the agents and the clock tell: streams, heartbeats,
reports. They are not journaled: a restarted master forgets them and is told again. Step records
are observed too; their durable copy is metrics.jsonl.

The shell stamps each event with the time of its arrival; events carry no clock of their own.
The tag of a journaled event is its class's name.

Owns the two unions, and the events of the master and its journal themselves.
"""

import msgspec

from oobleck.core.ids import JobId
from oobleck.master.events.jobs import JobEvent
from oobleck.master.events.nodes import NodeEvent, UnknownJobEnded
from oobleck.master.events.plans import PlanEvent
from oobleck.master.events.reports import Observed
from oobleck.master.events.trust import TrustChanged


class MasterStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A master has replayed the journal: whatever an earlier one observed is forgotten."""

    #: Random id of the process; empty: the journal is of a release before.
    start: str = ""


class JournalCut(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The journal was found with an end that is no whole event, or without events that had been
    acted on."""

    #: What was cut off, and the name of the file that has it.
    bytes: int
    kept_as: str
    #: Of jobs whose events.jsonl has more lines than the journal gives: how many it has.
    records: dict[JobId, int]


class TermBegan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: this master begins a term of its own, or names its journal for the first time."""

    cluster: str
    #: Id of the journal.
    history: str
    number: int
    #: Random id of the master that begins it.
    begun_by: str
    #: Where its state directory is.
    place: str
    #: For operators.
    reason: str


Journaled = (
    MasterStarted
    | TermBegan
    | JournalCut
    | NodeEvent
    | UnknownJobEnded
    | JobEvent
    | PlanEvent
    | TrustChanged
)
Event = Journaled | Observed
