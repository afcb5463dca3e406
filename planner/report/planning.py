"""Inputs of a running job's plans, for whoever asks the planner about it elsewhere.

Must not know how plans are made.
"""

from dataclasses import dataclass

from oobleck.core.ids import NodeName
from oobleck.core.job.spec import RecoveryPolicy
from oobleck.core.plan import Plan, WorkerRate
from oobleck.core.profile import Profile
from oobleck.core.ties import Ties


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """Inputs of a job's plans, and the plan that it has."""

    plan: Plan
    #: The newest plan of templates; the same, unless micro-batches take other routes since.
    base: Plan
    #: With the memory that there is.
    profile: Profile
    #: Templates are for so many nodes, and up to so many.
    least_nodes: int
    most_nodes: int
    fault_tolerance: int
    tied: Ties = False
    schedule_named: bool = False
    shadows: bool = False
    policy: RecoveryPolicy = "auto"
    #: All that may take part.
    nodes: tuple[NodeName, ...]
    #: Of slow workers.
    rates: tuple[WorkerRate, ...] = ()
