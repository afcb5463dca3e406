"""Journaled events of plans: a generation is made or found, has come to its first step, and what
was to follow it does not.

Owns the words for what a plan answers (`Cause`) and for how the way into a generation went
(`ReconfigurationStats`). Must not know what the events change.
"""

from typing import Literal, get_args

import msgspec

from oobleck.core.ids import Generation, Incarnation, JobId, NodeName, WorkerId
from oobleck.core.messages import Assign
from oobleck.core.plan import Plan, WorkerRate
from oobleck.host.versions import FIRST_ENGINE
from oobleck.master.events.nodes import Evidence
from oobleck.planner.recovery.rules import OF_OTHER_NODES, Next

#: Of the way into a generation, in order: the loss is found out, no plan is found and none can be
#: made until nodes come, the workers leave the generation before, meet, move layers, and train.
Phase = Literal["detect", "plan", "waiting", "abort", "rendezvous", "transfer", "first_step"]
PHASES: tuple[Phase, ...] = get_args(Phase)

#: What a plan answers.
Cause = Literal[
    "start",
    "node lost",
    "worker lost",
    "peers lost",
    "no progress",
    "node joined",
    "node returned",
    "node left out",
    "node drained",
    "put back",
    "journal cut",
    "re-routed",
    "few holders",
    "worker slow",
    "worker well",
]


class ReconfigurationStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the transition into a generation, as far as it went."""

    #: By `Phase`; they add up to `total_s`.
    phases: dict[str, float]
    total_s: float
    #: Step that was begun and is done again; None: none.
    redo_step: int | None
    rolled_forward: bool
    received_bytes: int
    #: Of these, what came while the generation before trained on.
    fed_bytes: int = 0
    #: For how long no step was committed, less one step of the generation before; None: not known.
    stall_s: float | None = None
    #: Micro-batches of the step that is done again which did not have to be.
    salvaged_microbatches: int = 0
    #: Where it did not come to a step: who had not left the generation before.
    unanswered: tuple[WorkerId, ...] = ()
    #: The phases inside were not observed because the master restarted meanwhile.
    master_restarted: bool


class StandByFor(msgspec.Struct, frozen=True, kw_only=True):
    """A slow worker is put to stand by; for so long nothing that it measures makes it better."""

    worker: WorkerId
    incarnation: Incarnation
    seconds: float


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """Expectation of a plan by the planner, computed from the job's profile."""

    step_s: float
    #: How long the state that moves takes.
    stall_s: float


class PlanMade(Assign, frozen=True, kw_only=True, tag=True):
    """The next generation: every node of the plan is to enter it as `Assign` says."""

    job_id: JobId
    #: The processes that the plan counts on, in rank order.
    incarnations: tuple[Incarnation, ...]
    cause: Cause
    rule: str
    reason: str
    nodes_lost: tuple[NodeName, ...]
    workers_lost: tuple[WorkerId, ...]
    nodes_joined: tuple[NodeName, ...]
    can_lose: int
    worker_slots: int
    detect_s: float
    #: The processes of those that leave.
    leaving_incarnations: tuple[Incarnation, ...] = ()
    #: Those of its workers whose processes were not up yet.
    starting: tuple[WorkerId, ...] = ()
    #: The series of torch that its nodes have; empty: more than one, or not known.
    torch: str = ""
    #: Their engine (`oobleck.host.versions`).
    engine: str = FIRST_ENGINE
    #: Whose plan it is (`oobleck.planner.recovery.policies`).
    policy: str = "templates"
    #: Whose plan is to follow at a step boundary; empty: nobody's.
    then: Next | Literal[""] = ""
    #: None: it was not asked for, as of the first plan.
    expected: Expected | None = None
    #: Nobody had entered the plan before, which was for a step boundary: this one comes from the
    #: one that was trained in.
    passes_over: bool = False
    #: Slow workers of nodes that stand by, and how slow they were then.
    standing_by: tuple[WorkerRate, ...] = ()
    #: Those of them that had a part in the plan before.
    stand_by_for: tuple[StandByFor, ...] = ()
    #: Of the generation before, where it did not come to its first step.
    overtaken: ReconfigurationStats | None = None
    #: What was seen of failures since the last event that carries such.
    evidence: tuple[Evidence, ...] = msgspec.field(name="sightings", default=())

    @property
    def assign(self) -> Assign:
        """Assignment as agents and workers receive it."""
        return Assign(**{name: getattr(self, name) for name in Assign.__struct_fields__})

    @property
    def is_base(self) -> bool:
        """Return whether later plans start from this plan's pipelines rather than from an earlier
        plan's."""
        return self.policy == "templates" or self.rule in {"recut", *OF_OTHER_NODES}


class PlanFound(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Agents have a plan that the journal does not have, and not all of them are there that are in
    it. It tells which layers their workers hold."""

    job_id: JobId
    plan: Plan


class FirstStepCommitted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The newest generation has committed its first step."""

    job_id: JobId
    generation: Generation
    step: int
    transition: ReconfigurationStats
    #: As in PlanMade.
    evidence: tuple[Evidence, ...] = msgspec.field(name="sightings", default=())
    #: Unix time of the last step of a generation before, by the calendar of a worker's host; 0: not
    #: known.
    trained_until: float = 0.0


class FollowUpDropped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: no follow-up plan replaces the newest one, since no change is worth it or planning
    failed."""

    job_id: JobId
    generation: Generation
    reason: str


PlanEvent = PlanMade | PlanFound | FirstStepCommitted | FollowUpDropped
