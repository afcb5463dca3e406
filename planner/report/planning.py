"""Inputs of a running job's plans, for questions to the planner elsewhere.

Must not know how plans are made.
"""

from dataclasses import dataclass, field

from oobleck.core.ids import NodeName
from oobleck.core.job.spec import RecoveryPolicy
from oobleck.core.plan import Plan, WorkerRate
from oobleck.core.profile import Profile
from oobleck.core.ties import Ties
from oobleck.planner.recovery.outlook import Outlook


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """Inputs of a job's plans, and its current plan."""

    plan: Plan
    #: Newest plan of templates; the same as `plan` unless micro-batches were re-routed since.
    base: Plan
    #: With the memory that the nodes have.
    profile: Profile
    #: Fewest and most nodes of a template.
    least_nodes: int
    most_nodes: int
    fault_tolerance: int
    tied: Ties = False
    schedule_named: bool = False
    shadows: bool = False
    policy: RecoveryPolicy = "auto"
    #: Expectations at the moment of the question, and labels of racks.
    outlook: Outlook = field(default_factory=Outlook)
    racks: tuple[tuple[NodeName, str], ...] = ()
    #: All nodes that may take part.
    nodes: tuple[NodeName, ...]
    #: Of slow workers.
    rates: tuple[WorkerRate, ...] = ()
