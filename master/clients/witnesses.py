"""Confirmation of reports that all workers make alike: they count when a second node agrees.

Every worker makes the record of every step and evaluation, and reports every return to a
checkpoint, so one lying agent changes nothing. A single node's report counts only where no other
can report: the plan has one node, or the others are lost or have reported something later. The line
in the job's file then names that node. If two reports differ, the operator is informed, and a third
report decides.

Nothing outlives the master's process: agents keep reports that are not on disk, and repeat them.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Generic, Literal, TypeVar

import msgspec

from oobleck.core.ids import Generation, JobId, NodeName
from oobleck.core.messages import EvaluationRecord, Restored, StepRecord
from oobleck.master.events.jobs import RecordsDiffer
from oobleck.master.events.unions import EvaluationReceived, RecordsReceived, RestoreReceived
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import NO_GENERATION, Job
from oobleck.master.state.senders import committing_nodes
from oobleck.master.storage.ledger import Ledger

log = logging.getLogger(__name__)


W = TypeVar("W", StepRecord, EvaluationRecord, Restored)
#: Most unconfirmed reports kept per node; its agent repeats further ones later.
MOST_WAITING = 8192
#: Seconds after which a report counts unconfirmed, if training has passed its step: the other nodes
#: have lost theirs.
LOST_S = 30.0
#: Missed heartbeats after which a node is not waited for.
SILENT = 4
#: Reports that wait longer than this wait for a slow or lost node.
_LONG_S = 1.0
#: Waiting reports examined per iteration.
_LOOKED_AT = 256
#: Most generations whose nodes are cached.
_KNOWN_GENERATIONS = 8
#: Fields that may differ: each worker measures or finds them for itself.
_OWN = frozenset({"step_seconds", "seconds", "time", "passed_over", "told_by", "records_problem"})
#: Interval at which all waiting reports are examined.
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Differs:
    """Difference between the reports of two nodes about the same step."""

    step: int
    nodes: tuple[NodeName, NodeName]
    fields: tuple[str, ...]


@dataclass(slots=True)
class Verdict(Generic[W]):
    """Result of judging: reports that count from now on, in order, and differences."""

    #: Each with the node whose report alone it rests on; empty: several nodes agree.
    settled: list[tuple[W, str]] = field(default_factory=list)
    differ: list[Differs] = field(default_factory=list)


@dataclass(slots=True)
class _Claim(Generic[W]):
    """Reports of nodes about one step, or about one return to a checkpoint."""

    since: float
    #: In the order of arrival.
    reports: dict[NodeName, W] = field(default_factory=dict)
    #: Generation by whose plan each node may report it.
    by: dict[NodeName, Generation] = field(default_factory=dict)


class Witnesses(Generic[W]):
    """Witnesses of one kind of report in one job: the reports that are not settled yet."""

    def __init__(self, number_of: Callable[[W], int], heartbeat_s: float, settled: int = 0) -> None:
        """Settle all up to `settled`. `number_of`: returns a report's step or generation; agents
        report in that order."""
        self._silent_s = SILENT * heartbeat_s
        self._number_of: Callable[[W], int] = number_of
        self._settled = settled
        self._claims: dict[int, _Claim[W]] = {}
        #: By node, the number of waiting reports, and the last number reported.
        self._waiting: Counter[NodeName] = Counter()
        self._last_reported: dict[NodeName, int] = {}
        #: Nodes with reports that were dropped because too many wait.
        self._dropped: set[NodeName] = set()
        self._members: dict[Generation, frozenset[NodeName]] = {}
        #: The last settled step and its generation: generations do not fall as steps rise.
        self._last: tuple[int, Generation] = settled, Generation(0)
        #: Pairs of nodes whose differences were reported.
        self._differing: set[tuple[NodeName, NodeName]] = set()

    def take(
        self,
        job: Job,
        node: NodeName,
        report: W,
        now: float,
        restored_in: Generation = NO_GENERATION,
    ) -> str:
        """Take a node's report. Return why it is refused; empty: it counts, or is known.
        `restored_in`: the generation that found it beside a checkpoint; 0: none. The nodes of that
        generation may report it, even if others trained it."""
        number, by = self._number_of(report), restored_in or report.generation
        allowed = self._of_generation(job, by)
        if allowed is None and not job.seen.inherited:
            return "of a generation that there is not"
        if allowed is not None and node not in allowed:
            return "of a node that had no part in it"
        if not self._is_in_order(number, by) or (restored_in and report.generation >= restored_in):
            return "of a generation that it cannot be of"
        self._last_reported[node] = max(number, self._last_reported.get(node, 0))
        claim = self._claims.get(number)
        before = None if claim is None else claim.reports.get(node)
        if number <= self._settled or (before and before.generation >= report.generation):
            return ""
        if before is None and self._waiting[node] >= MOST_WAITING:
            self._dropped.add(node)
            return ""
        if claim is None:
            claim = self._claims[number] = _Claim(now)
        claim.reports[node], claim.by[node] = report, by
        self._waiting[node] += before is None
        return ""

    def begin_again(self, node: NodeName) -> None:
        """Note that the agent's new session repeats all its reports, from the oldest on."""
        self._last_reported.pop(node, None)

    def settle_through(self, number: int) -> None:
        """Forget all reports up to `number`: they are known."""
        self._settled = max(self._settled, number)
        for known in [known for known in self._claims if known <= self._settled]:
            self._forget(known)

    def ask_again(self) -> list[NodeName]:
        """Return, once, the nodes whose reports were dropped and of which none waits any more."""
        nodes = [node for node in self._dropped if not self._waiting[node]]
        self._dropped.difference_update(nodes)
        return nodes

    def wait_long(self, job: Job, now: float) -> bool:
        """Return whether a report has waited for longer than reports usually take."""
        known: dict[Generation, bool] = {}
        for claim in self._claims.values():
            if now <= claim.since + _LONG_S:
                continue
            for by in claim.by.values():
                if by not in known:
                    known[by] = self._of_generation(job, by) is not None
                if known[by]:
                    return True
        return False

    def judge(
        self, state: ClusterState, job: Job, now: float, about: Iterable[W] | None = None
    ) -> Verdict[W]:
        """Return newly settled reports, and forget them. `about`: judge only steps that these
        reports are about; None: the oldest that wait."""
        verdict = Verdict[W]()
        if about is None:
            numbers = nsmallest(_LOOKED_AT, self._claims)
        else:
            numbers = sorted({self._number_of(report) for report in about} & self._claims.keys())
        for number in numbers:
            claim = self._claims[number]
            self._drop_vain(job, number, claim)
            if not claim.reports:
                self._forget(number)
                continue
            members = self._members_of(job, claim)
            verdict.differ += self._differences(number, claim, members)
            settled = self._settle(state, job, number, claim, members, now)
            if settled is not None:
                verdict.settled.append(settled)
                self._last = max(self._last, (number, settled[0].generation))
                self._forget(number)
        return verdict

    def _is_in_order(self, number: int, by: Generation) -> bool:
        """Return whether nodes of generation `by` can report the step. A node that left a plan
        cannot report later steps."""
        last, generation = self._last
        return by >= generation if number > last else True

    def _drop_vain(self, job: Job, number: int, claim: _Claim[W]) -> None:
        """Forget reports that could not be refused on arrival: meanwhile a newer generation has
        settled earlier steps, or their generation turned out not to exist or not to have the
        node."""
        for node, by in list(claim.by.items()):
            allowed = self._of_generation(job, by)
            may = job.seen.inherited if allowed is None else node in allowed
            if not may or not self._is_in_order(number, by):
                del claim.reports[node], claim.by[node]
                self._waiting[node] -= 1

    def _settle(
        self,
        state: ClusterState,
        job: Job,
        number: int,
        claim: _Claim[W],
        members: frozenset[NodeName],
        now: float,
    ) -> tuple[W, str] | None:
        by_content: dict[bytes, W] = {}
        counts = {
            node: report
            for node, report in claim.reports.items()
            if self._of_generation(job, claim.by[node]) is not None
        }
        for report in counts.values():
            if (same := _fingerprint(report)) in by_content:
                return by_content[same], ""
            by_content[same] = report
        if not by_content:
            return None
        # A step that one node committed alone, before it was lost, is done again.
        only, report = max(counts.items(), key=lambda one: one[1].generation)
        others = members - counts.keys()
        if any(self._may_still_report(state, job, node, number, claim, now) for node in others):
            lost = number <= job.seen.steps.furthest_step and now >= claim.since + LOST_S
            if not lost or isinstance(report, Restored):
                return None
        return report, only

    def _may_still_report(
        self,
        state: ClusterState,
        job: Job,
        node: NodeName,
        number: int,
        claim: _Claim[W],
        now: float,
    ) -> bool:
        """Return whether the node may still report this number, and has reported nothing later. A
        silent node is not waited for until it is lost: training may continue."""
        if node not in state.nodes or not state.nodes[node].registered:
            return False
        silent = state.nodes[node].seen.last_heard < claim.since
        here = not silent or now < claim.since + self._silent_s
        return (
            here and node not in job.lineage.emptied and self._last_reported.get(node, 0) < number
        )

    def _members_of(self, job: Job, claim: _Claim[W]) -> frozenset[NodeName]:
        """Return the nodes of every plan in which the step may have been committed. So no node can
        exclude others by naming a plan without them."""
        nodes = (self._of_generation(job, generation) for generation in claim.by.values())
        return frozenset[NodeName]().union(*filter(None, nodes))

    def _of_generation(self, job: Job, generation: Generation) -> frozenset[NodeName] | None:
        nodes = self._members.get(generation)
        if nodes is None and (nodes := committing_nodes(job, generation)) is not None:
            if len(self._members) >= _KNOWN_GENERATIONS:
                self._members.clear()
            self._members[generation] = nodes
        return nodes

    def _differences(
        self, number: int, claim: _Claim[W], members: frozenset[NodeName]
    ) -> Iterator[Differs]:
        nodes = [node for node in claim.reports if node in members]
        for other in nodes[1:]:
            pair = nodes[0], other
            fields = _unlike(claim.reports[pair[0]], claim.reports[other])
            if fields and pair not in self._differing:
                self._differing.add(pair)
                yield Differs(step=number, nodes=pair, fields=fields)

    def _forget(self, number: int) -> None:
        self._waiting.subtract(self._claims.pop(number).reports.keys())


def _unlike(first: W, other: W) -> tuple[str, ...]:
    """Return the fields that all workers should report alike, and did not."""
    if first.generation != other.generation:  # one of them did it again
        return ()
    shared = (name for name in first.__struct_fields__ if name not in _OWN)
    return tuple(name for name in shared if getattr(first, name) != getattr(other, name))


def _fingerprint(report: W) -> bytes:
    """Return a key that is equal for reports with the same content."""
    shared = [getattr(report, name) for name in report.__struct_fields__ if name not in _OWN]
    return msgspec.json.encode(shared, order="sorted")


@dataclass(slots=True)
class _Claims:
    """Reports of one job's nodes."""

    job: Job
    records: Witnesses[StepRecord]
    evaluations: Witnesses[EvaluationRecord]
    restores: Witnesses[Restored]


class Confirmations:
    def __init__(self, ledger: Ledger, heartbeat_s: float) -> None:
        self._ledger = ledger
        self._heartbeat_s = heartbeat_s
        self._claims: dict[JobId, _Claims] = {}
        self._looked_at = 0.0

    def records(
        self,
        job_id: JobId,
        node: NodeName,
        records: tuple[StepRecord, ...],
        now: float,
        restored_in: Generation = NO_GENERATION,
    ) -> list[str]:
        """Take a node's records of steps. Return why some of them do not count. `restored_in`: see
        `Witnesses.take`."""
        claims, refused = self._of(job_id), []
        for record in records:
            reason = "of a step that there is not"
            if record.step <= claims.job.spec.training.steps:
                reason = claims.records.take(claims.job, node, record, now, restored_in)
            if reason:
                refused.append(f"a step's record {reason}")
        self._settle_records(claims, now, records)
        return refused

    def evaluation(
        self,
        job_id: JobId,
        node: NodeName,
        record: EvaluationRecord,
        now: float,
        restored_in: Generation = NO_GENERATION,
    ) -> str:
        """Take a node's report of an evaluation. Return why it is refused; empty: it is not."""
        claims = self._of(job_id)
        reason = claims.evaluations.take(claims.job, node, record, now, restored_in)
        self._settle_evaluations(claims, now, (record,))
        return reason and f"an evaluation {reason}"

    def restore(self, job_id: JobId, node: NodeName, restored: Restored, now: float) -> str:
        """Take a node's report of a return to a checkpoint. Return why it is refused; empty: it is
        not."""
        claims = self._of(job_id)
        reason = claims.restores.take(claims.job, node, restored, now)
        self._settle_restores(claims, now, (restored,))
        return reason and f"a restore {reason}"

    def begin_again(self, node: NodeName) -> None:
        """Note that the agent's new session repeats all its reports, from the oldest on."""
        for claims in self._claims.values():
            for witnesses in (claims.records, claims.evaluations, claims.restores):
                witnesses.begin_again(node)

    def wait_long(self, job_id: JobId, now: float) -> bool:
        """Return whether records wait for a slow or lost node."""
        claims = self._claims.get(job_id)
        return claims is not None and claims.records.wait_long(claims.job, now)

    def look(self, now: float) -> list[NodeName]:
        """Examine all waiting reports: others may be lost, or have reported later steps. Return the
        nodes that are to repeat dropped reports."""
        if 0 <= now - self._looked_at < _LOOK_S:
            return []
        self._looked_at, again = now, []
        for job_id, claims in list(self._claims.items()):
            if job_id not in self._ledger.state.jobs:
                del self._claims[job_id]
                continue
            self._settle_records(claims, now)
            self._settle_evaluations(claims, now)
            self._settle_restores(claims, now)
            again += claims.records.ask_again()
        return again

    def _settle_records(
        self, claims: _Claims, now: float, about: Iterable[StepRecord] | None = None
    ) -> None:
        archive, job_id = self._ledger.archive, claims.job.id
        verdict = claims.records.judge(self._ledger.state, claims.job, now, about)
        records = [msgspec.structs.replace(record, told_by=by) for record, by in verdict.settled]
        if records:
            new = archive.take_records(job_id, tuple(records))
            through = archive.metrics(job_id).through_step
            ahead = tuple(record for record in records if record.step > through)
            if new or ahead:
                received = RecordsReceived(job_id=job_id, records=new, ahead=ahead)
                self._ledger.observe(received, now)
            claims.records.settle_through(through)
        self._note_differences(job_id, "step", verdict.differ)

    def _settle_evaluations(
        self, claims: _Claims, now: float, about: Iterable[EvaluationRecord] | None = None
    ) -> None:
        job_id = claims.job.id
        verdict = claims.evaluations.judge(self._ledger.state, claims.job, now, about)
        for report, by in verdict.settled:
            record = msgspec.structs.replace(report, told_by=by)
            if self._ledger.archive.take_evaluation(job_id, record):
                received = EvaluationReceived(job_id=job_id, record=record)
                self._ledger.observe(received, now)
            claims.evaluations.settle_through(record.step)
        self._note_differences(job_id, "evaluation", verdict.differ)

    def _settle_restores(
        self, claims: _Claims, now: float, about: Iterable[Restored] | None = None
    ) -> None:
        job_id = claims.job.id
        verdict = claims.restores.judge(self._ledger.state, claims.job, now, about)
        for restored, _ in verdict.settled:
            self._ledger.observe(RestoreReceived(job_id=job_id, restored=restored), now)
            claims.restores.settle_through(restored.generation)
        self._note_differences(job_id, "restore", verdict.differ)

    def _note_differences(
        self,
        job_id: JobId,
        record: Literal["step", "evaluation", "restore"],
        differences: Iterable[Differs],
    ) -> None:
        for each in differences:
            log.warning(
                "two nodes reported different results of a step that all workers share; one of "
                "them is broken, or lies: drain it",
                extra={
                    "job": job_id,
                    "nodes": each.nodes,
                    "step": each.step,
                    "fields": each.fields,
                },
            )
            differ = RecordsDiffer(
                job_id=job_id, record=record, step=each.step, nodes=each.nodes, fields=each.fields
            )
            self._ledger.journal(differ)

    def _of(self, job_id: JobId) -> _Claims:
        if job_id not in self._claims:
            archive, beat_s = self._ledger.archive, self._heartbeat_s
            self._claims[job_id] = _Claims(
                job=self._ledger.state.jobs[job_id],
                records=Witnesses(
                    lambda record: record.step, beat_s, archive.metrics(job_id).through_step
                ),
                evaluations=Witnesses(
                    lambda record: record.step, beat_s, archive.evaluations(job_id).stored_step
                ),
                restores=Witnesses(lambda restored: restored.generation, beat_s),
            )
        return self._claims[job_id]
