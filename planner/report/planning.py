"""Inputs of a running job's plans, for whoever asks the planner about it elsewhere.

Must not know how plans are made.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from oobleck.planner.ids import NodeName, WorkerId
from oobleck.planner.job.spec import RecoveryPolicy
from oobleck.planner.profile.profile import Profile
from oobleck.planner.programs.plan import Plan
from oobleck.planner.ties import Ties


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """Inputs of a job's plans, and the plan that it has."""

    plan: Plan
    #: The newest plan of templates; the same, unless micro-batches take other routes since.
    base: Plan
    #: With the memory that there is.
    profile: Profile
    #: Numbers of nodes that templates are for.
    sizes: range
    fault_tolerance: int
    tied: Ties = False
    schedule_named: bool = False
    shadows: bool = False
    policy: RecoveryPolicy = "auto"
    #: All that may take part.
    nodes: tuple[NodeName, ...]
    #: Of slow workers.
    rates: Mapping[WorkerId, float]
