"""What the master wants of this node: a job to have workers for, and the plan to hand to them.

Must not know what the workers do, nor how the master's word came.
"""

from dataclasses import dataclass

from oobleck.host.ipc.messages import Measure, Rendezvous
from oobleck.planner.ids import Incarnation, JobId, WorkerId
from oobleck.planner.job.spec import JobSpec
from oobleck.planner.programs.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPart:
    """A plan, where its workers meet, and the processes that it counts on here (by slot)."""

    plan: Plan
    rendezvous: Rendezvous
    boundary: bool
    worker_incarnations: tuple[Incarnation, ...]
    #: See `Assign`.
    restore: bool = False
    anew: bool = False
    leaving: tuple[WorkerId, ...] = ()
    handover: bool = False
    #: Fingerprint of what its workers read; empty: of whatever they do.
    data: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """The job that every slot shall have a worker for, and the plan to hand to them."""

    job_id: JobId
    job: JobSpec
    #: None: have the workers ready, and wait.
    part: PlanPart | None
    #: While they wait for their first plan: what they shall measure.
    measure: Measure | None = None
    #: Number of the newest wish for a checkpoint; 0: none.
    save: int = 0
