"""What a rule of `oobleck.master.reconcile` looks at, and what it answers."""

from collections.abc import Callable
from dataclasses import dataclass

from oobleck.host.detection import Detection
from oobleck.master.events import Journaled
from oobleck.master.state import ClusterState


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    #: To be recorded and applied, in this order.
    actions: tuple[Journaled, ...] = ()
    #: When to look again though nothing has happened; None: no need.
    wake_at: float | None = None
    #: Why this, or why nothing.
    reason: str = ""
    #: No later rule counts, though there is nothing to record yet.
    hold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    state: ClusterState
    now: float
    timing: Detection
    #: Unguessable text for the rendezvous of a plan made now.
    nonce: str


#: None: the rule does not apply.
Rule = Callable[[Look], Decision | None]
