"""State of the cluster: nodes, jobs, credentials, and the history of its journal.

`ClusterState` has one owner, the loop, which changes it through
`oobleck.master.state.reducer.apply` alone. Everything in it follows from journaled events, except
the fields called `seen`. These are observed, live as long as this master process, and start anew
with `MasterStarted`. Must not know the clock, files, gRPC or how decisions are made.

A history is one journal and all copies of it. Each start of a head has a random id, and only that
head writes the events after it. So two journals share the events of the starts that both know; of
the last such start, as many as the shorter journal has. Each head that continues from a copy begins
a term, so that agents know which head to follow.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from oobleck.core.ids import JobId, NodeName, WorkerId
from oobleck.core.messages import Measure
from oobleck.core.profile import Profile
from oobleck.host.versions import Differences, differences
from oobleck.master.state.job import ENDED, MOST_GENERATION, Job
from oobleck.master.state.node import Build, Node
from oobleck.master.state.trust import Trust
from oobleck.planner.recovery.outlook import Losses
from oobleck.proto.assignments import MOST_TERM
from oobleck.proto.types import Assignment, Head

#: Length of random ids.
ID_BYTES = 16
#: Generations of a job per term. Terms must not share generations: agents skip a plan whose
#: generation is not above the last one's.
GENERATIONS_PER_TERM = 100_000
#: Starts that are remembered; an older one counts as unknown.
_KNOWN_STARTS = 256
#: Most terms that a reported term may be above this head's own: otherwise one false report would
#: use up all terms.
_MOST_AHEAD = 1000
#: Most remembered requests about nodes, by which a repeated one is recognised.
_KNOWN_REQUESTS = 4096


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """Term of a history: begun by its first head, and by each that continues from a copy."""

    number: int
    #: Random id of the head that began it, and the place of its state directory.
    begun_by: str
    place: str
    #: Number of the first event of the start that began it.
    since: int
    #: Why it began, for operators.
    reason: str = ""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Start of a head."""

    id: str
    #: Number of its first event.
    since: int


@dataclass(slots=True, kw_only=True)
class History:
    """History of the journal: its terms and starts of heads."""

    #: Both are empty until the first term begins.
    id: str = ""
    cluster: str = ""
    #: Ordered; the newest is the last one, here and below.
    terms: list[Term] = field(default_factory=list)
    #: Starts of heads, as far as they are remembered.
    starts: list[Start] = field(default_factory=list)

    @property
    def term(self) -> Term | None:
        """Term of this head; None: none has begun."""
        return self.terms[-1] if self.terms else None

    @property
    def first_generation(self) -> int:
        """Least generation that plans of this term may have."""
        return GENERATIONS_PER_TERM * (self.terms[-1].number - 1) if self.terms else 0

    def head(self, sequence: int) -> Head | None:
        """Return this head, whose journal goes up to that event; None: no term has begun."""
        if (term := self.term) is None or not self.starts:
            return None
        return Head(
            cluster=self.cluster,
            history=self.id,
            term=term.number,
            begun_by=term.begun_by,
            start=self.starts[-1].id,
            sequence=sequence,
        )

    def start(self, start: str, sequence: int) -> None:
        """Note a start of a head, whose first event has number `sequence`."""
        self.starts = [*self.starts, Start(id=start, since=sequence)][-_KNOWN_STARTS:]

    def shared(self, other: Head, sequence: int) -> int:
        """Return the number of the last event that both journals share, up to `sequence`; -1: they
        are of different histories. If the other head's start is not in this journal, the number is
        an upper bound."""
        if other.history != self.id:
            return -1
        for index, start in enumerate(self.starts):
            if start.id == other.start:
                following = self.starts[index + 1 : index + 2]
                end = following[0].since - 1 if following else sequence
                return min(other.sequence, end)
        # Events of this start are not shared, nor those of terms that the other head lacks.
        theirs = other.term, other.begun_by
        own = (
            term.since
            for term in self.terms
            if term.number >= other.term and (term.number, term.begun_by) != theirs
        )
        return min(next(own, sequence + 1), self.starts[-1].since) - 1

    def lacks(self, other: Head, sequence: int) -> int:
        """Return a lower bound of the number of the other head's events that this journal, up to
        `sequence`, lacks."""
        known = any(start.id == other.start for start in self.starts)
        return max(other.sequence - self.shared(other, sequence), 0 if known else 1)

    def next_number(self, above: int = 0) -> int:
        """Return the number of a new term, above all terms of this history, and above `above`
        unless that is implausible."""
        newest = self.terms[-1].number if self.terms else 0
        if above > newest + _MOST_AHEAD:
            above = newest
        return min(max(newest, above) + 1, MOST_TERM)


def version_pairs(differences: Differences) -> list[str]:
    """List each version that differs, in the form of `Lineage.mixed`."""
    return [
        f"{package} {version}" for package, versions in differences.items() for version in versions
    ]


def _most_common(values: Iterable[str]) -> str:
    """Return the most common value, the first one on a tie; empty values do not count."""
    counts = Counter(value for value in values if value)
    return counts.most_common(1)[0][0] if counts else ""


@dataclass(slots=True, kw_only=True)
class ClusterState:
    """State of the whole cluster."""

    #: Number of the last journaled event.
    sequence: int = 0
    nodes: dict[NodeName, Node] = field(default_factory=dict)
    #: In the order of submission.
    jobs: dict[JobId, Job] = field(default_factory=dict)
    requests: dict[str, JobId] = field(default_factory=dict)
    #: Number of all submissions.
    submissions: int = 0
    #: Ids of the last requests about nodes.
    node_requests: deque[str] = field(default_factory=lambda: deque(maxlen=_KNOWN_REQUESTS))
    #: Stored measurements by key; observed, since the files are the truth.
    profiles: dict[str, Profile] = field(default_factory=dict)
    unusable_profiles: dict[str, str] = field(default_factory=dict)
    active: JobId | None = None
    #: Workers per node and build that the nodes' desired states are for.
    asked_of_all: tuple[int | None, Build] = field(
        default=(None, Build()), repr=False, compare=False
    )
    #: Credentials with which agents and operators may call this master.
    trust: Trust = field(default_factory=Trust)
    #: Losses and returns of nodes, by the calendar.
    losses: Losses = field(default_factory=Losses)
    #: History of the journal that the state follows from.
    history: History = field(default_factory=History)
    #: True if the newest term began in this master's life and is not the first of its history.
    began_term: bool = False
    #: Largest number of events that an agent knows and this journal lacks, and the agent's node.
    behind: tuple[int, NodeName] | None = None
    #: Head that agents follow instead of this one, and the node that reported it last.
    superseded: tuple[Head, NodeName] | None = None

    def losses_until(self, unix: float) -> Losses:
        """Return the losses up to that time of the calendar."""
        losses = msgspec.structs.replace(self.losses)
        losses.pass_time(unix, sum(node.registered for node in self.nodes.values()))
        return losses

    @property
    def head(self) -> Head | None:
        """Identity of this master as agents receive it; None: before its first term."""
        return self.history.head(self.sequence)

    @property
    def held(self) -> dict[JobId, list[Node]]:
        """Nodes that train unknown or queued jobs, by job, sorted by name."""
        held: dict[JobId, list[Node]] = {}
        for _, node in sorted(self.nodes.items()):
            if node.held is not None:
                held.setdefault(node.held.job_id, []).append(node)
        return held

    @property
    def job(self) -> Job | None:
        """The active job."""
        return self.jobs[self.active] if self.active is not None else None

    def worker_slots(self, job: Job) -> int | None:
        """Return the job's workers per node: its plan's, before that the most common number."""
        if job.current.made is not None:
            return job.current.made.worker_slots
        counts = Counter(n.facts.worker_slots for n in self.nodes.values() if n.registered)
        return max(counts, key=lambda slots: (counts[slots], slots)) if counts else None

    def common_build(self, job: Job) -> Build:
        """Return the engine and series of torch for the job's plans: those of the newest plan while
        a node that could take part has them, else the most common ones among such nodes (on a tie,
        the first node's). Empty: any will do. A member that is to be drained still takes part."""
        slots, made = self.worker_slots(job), job.current.made
        mixed, engine = job.spec.allow_mixed_versions, ""
        if made is not None:
            here = (
                node.build
                for name, node in self.nodes.items()
                if job.current.has_member(name) or self._is_fit(node, job, slots)
            )
            before = Build(torch="" if mixed else made.torch, engine=made.engine)
            if any(build.has(before) for build in here):
                if before.torch or mixed:
                    return before
                engine = made.engine
        builds = [node.build for node in self.fit(job) if not node.refuses(job.spec)]
        engine = engine or _most_common(build.engine for build in builds)
        if mixed:
            return Build(engine=engine)
        torch = _most_common(build.torch for build in builds if build.engine == engine)
        return Build(torch=torch, engine=engine)

    def required_build(self, job: Job) -> Build:
        """Return the build that a node needs to get work of the job; any build before the first
        plan, which chooses it."""
        return self.common_build(job) if job.current.made is not None else Build()

    def candidates(self, job: Job) -> list[Node]:
        """Return the nodes that may get work of the job, by name."""
        wanted = self.required_build(job)
        return [node for node in self.fit(job) if not node.why_not_in(job.spec, wanted)]

    def fit(self, job: Job) -> list[Node]:
        """Return the nodes that could take part in the job, whatever their build is and whether or
        not they run its code, by name."""
        slots = self.worker_slots(job)
        nodes = (node for _, node in sorted(self.nodes.items()))
        return [node for node in nodes if self._is_fit(node, job, slots)]

    def alike(self, job: Job) -> tuple[list[Node], list[tuple[Node, str]]]:
        """Return the nodes that fit the job, have compatible builds and run its code, and the
        others with the reason."""
        wanted = self.common_build(job)
        reasons = [(node, node.why_not_in(job.spec, wanted)) for node in self.fit(job)]
        return [node for node, why in reasons if not why], [(n, why) for n, why in reasons if why]

    def versions_of(self, nodes: Iterable[NodeName]) -> Differences:
        """Return the versions of packages that differ between the nodes."""
        known = (self.nodes[name] for name in nodes if name in self.nodes)
        return differences((node.facts.node, node.facts.versions) for node in known)

    def is_candidate(self, node: Node, job: Job, slots: int | None, wanted: Build) -> bool:
        """Return whether the node may get work of the job, with its `slots` and `wanted` build."""
        return self._is_fit(node, job, slots) and not node.why_not_in(job.spec, wanted)

    def _is_fit(self, node: Node, job: Job, slots: int | None) -> bool:
        return (
            node.registered
            and node.is_clear
            and node.drain is None
            and node.facts.worker_slots == slots
            and node.facts.node not in job.left_out
        )

    def is_ready(self, node: Node, job: Job) -> bool:
        """Return whether a worker of the job is up in every slot of the node. Workers known to have
        exited do not count, even if the last status lists them."""
        status = node.seen.status
        up = [w for w in status.workers if w.card and not job.seen.is_gone(w.incarnation)]
        here = node.connected and node.held is None and status.job_id == job.id
        return here and len(up) == node.facts.worker_slots

    def lacks(self, running: Assignment | None) -> bool:
        """Return whether the journal may lack a plan that an agent reports. The plan's job must not
        have ended, and the plan must be newer than all plans of this master and its journal."""
        if running is None or running.assign is None or running.job_id not in self.jobs:
            return False
        job = self.jobs[running.job_id]
        return (
            job.seen.inherited
            and job.state not in ENDED
            and running.assign.plan.layer_count == job.spec.model.layer_count
            and job.newest_known < running.generation <= MOST_GENERATION
        )

    def data_of(self, node: Node) -> str:
        """Return the fingerprint of the data that the node's workers read."""
        return ", ".join(sorted({worker.data for worker in node.seen.status.workers} - {""}))

    def assignment(self, node: Node) -> Assignment:
        """Return the assignment that `node` should have now."""
        desired = node.desired
        if desired.job_id is None:
            return Assignment(version=desired.version, drained=desired.drained, head=self.head)
        job = self.jobs[desired.job_id]
        if desired.generation is None or job.current.made is None:
            return Assignment(
                version=desired.version,
                job_id=job.id,
                job=job.spec,
                measure=Measure(attempt=1, alone=True) if desired.alone else _wish(job),
                head=self.head,
            )
        processes, leaving = job.current.processes(), job.current.leaving_processes()
        workers = [WorkerId(node.facts.node, slot) for slot in range(job.current.made.worker_slots)]
        named = (processes.get(worker) or leaving.get(worker) for worker in workers)
        return Assignment(
            version=desired.version,
            job_id=job.id,
            job=job.spec,
            assign=job.current.made.assign,
            worker_incarnations=tuple(process for process in named if process is not None),
            save=desired.save,
            head=self.head,
        )


def _wish(job: Job) -> Measure | None:
    measuring = job.profiling.under_way
    return measuring.wish if measuring is not None else None
