"""Has the ledger take what two nodes tell alike, and tells of what differs.

`oobleck.master.clients.witnesses` decides what counts; this is what then follows for the job's
files and state. Called in iterations of the loop.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from oobleck.core.ids import Generation, JobId, NodeName
from oobleck.core.messages import EvaluationRecord, Restored, StepRecord
from oobleck.master.clients.witnesses import Differs, Witnesses
from oobleck.master.events.jobs import RecordsDiffer
from oobleck.master.events.reports import EvaluationReceived, RecordsReceived, RestoreReceived
from oobleck.master.state.job import NO_GENERATION, Job
from oobleck.master.storage.ledger import Ledger

log = logging.getLogger(__name__)

#: So often all that waits for another node is looked at.
_LOOK_S = 0.2


@dataclass(slots=True)
class _Claims:
    """Gathers what nodes have told of one job."""

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
        """Take what a node tells of steps. Returns why some of the records do not count.
        `restored_in`: see `Witnesses.tell`."""
        claims, refused = self._of(job_id), []
        for record in records:
            reason = "of a step that there is not"
            if record.step <= claims.job.spec.training.steps:
                reason = claims.records.tell(claims.job, node, record, now, restored_in)
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
        """Take what a node tells of an evaluation. Returns why that does not count, if so."""
        claims = self._of(job_id)
        reason = claims.evaluations.tell(claims.job, node, record, now, restored_in)
        self._settle_evaluations(claims, now, (record,))
        return reason and f"an evaluation {reason}"

    def restore(self, job_id: JobId, node: NodeName, restored: Restored, now: float) -> str:
        """Take what a node tells of a return to a checkpoint, likewise."""
        claims = self._of(job_id)
        reason = claims.restores.tell(claims.job, node, restored, now)
        self._settle_restores(claims, now, (restored,))
        return reason and f"a restore {reason}"

    def begin_again(self, node: NodeName) -> None:
        """Know that a new session of its agent tells all that it keeps, from the oldest on."""
        for claims in self._claims.values():
            for witnesses in (claims.records, claims.evaluations, claims.restores):
                witnesses.begin_again(node)

    def wait_long(self, job_id: JobId, now: float) -> bool:
        """Return whether records wait for somebody who is slow, or gone."""
        claims = self._claims.get(job_id)
        return claims is not None and claims.records.wait_long(claims.job, now)

    def look(self, now: float) -> list[NodeName]:
        """Look at all that waits: others may be lost by now, or have told of later steps. Returns
        the nodes that are to tell again what was left of their words."""
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
        words = [msgspec.structs.replace(word, told_by=by) for word, by in verdict.words]
        if words:
            new = archive.take_records(job_id, tuple(words))
            if new:
                self._ledger.observe(RecordsReceived(job_id=job_id, records=new), now)
            claims.records.settle_through(archive.metrics(job_id).through_step)
        self._note_differences(job_id, "step", verdict.differ)

    def _settle_evaluations(
        self, claims: _Claims, now: float, about: Iterable[EvaluationRecord] | None = None
    ) -> None:
        job_id = claims.job.id
        verdict = claims.evaluations.judge(self._ledger.state, claims.job, now, about)
        for word, by in verdict.words:
            record = msgspec.structs.replace(word, told_by=by)
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
        for restored, _ in verdict.words:
            self._ledger.observe(RestoreReceived(job_id=job_id, restored=restored), now)
            claims.restores.settle_through(restored.generation)
        self._note_differences(job_id, "restore", verdict.differ)

    def _note_differences(
        self,
        job_id: JobId,
        record: Literal["step", "evaluation", "restore"],
        found: Iterable[Differs],
    ) -> None:
        for one in found:
            log.warning(
                "two nodes tell different things of what all workers should tell alike; one of "
                "them is broken, or lies: drain it",
                extra={"job": job_id, "nodes": one.nodes, "step": one.step, "fields": one.fields},
            )
            differ = RecordsDiffer(
                job_id=job_id, record=record, step=one.step, nodes=one.nodes, fields=one.fields
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
