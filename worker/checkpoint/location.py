"""The place of a job's checkpoints: whether all workers of a generation can use it, what is in it.

The first worker that sees any checkpoint says which ones there are. Where some cannot use the
place, their nodes or the job are at fault (`findings`). Must not know what a checkpoint holds.
"""

import contextlib
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from oobleck.core.checkpoint import misfit, step_of, why_not_begin
from oobleck.core.ids import NodeName
from oobleck.core.job.spec import CheckpointSpec
from oobleck.core.messages import Assign
from oobleck.host.display import inline
from oobleck.host.storage.checkpoints import StoredCheckpoint, list_checkpoints
from oobleck.host.storage.folder import Folder, open_folder
from oobleck.worker.checkpoint.findings import Finding, at_fault, distinct_reasons
from oobleck.worker.context import WorkerContext
from oobleck.worker.runtime.errors import JobError, NodeError, TransportError
from oobleck.worker.transport.tell_all import tell_all
from oobleck.worker.transport.transport import Transport

log = logging.getLogger(__name__)

#: Checkpoints that are tried, newest first; and characters of a reason.
_MOST_TRIED = 16
_MOST_REASON = 200
_PROBE_BYTES = 65_536
#: How often checkpoints that cannot be listed are looked for, and how long between two looks: less
#: than what is taken for a hang.
_PATIENCE = 5
_RETRY_S = 5.0

#: Step and identity of each checkpoint, newest first.
Candidates = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Seen:
    """View that one worker has of the place."""

    candidates: Candidates
    #: Whether there are damaged ones.
    damaged: bool


def check_place(spec: CheckpointSpec) -> None:
    """Raises JobError where nobody can be told of the place, and NodeError where
    this node cannot speak to it at all."""
    if why := spec.why_untold():
        raise JobError(f"checkpoint.path: {why}; name another place")
    try:
        open_folder(spec.path)
    except ValueError as error:
        raise NodeError(f"checkpoint.path: {error}") from error


class CheckpointLocation:
    """View that the workers of one generation have of the job's `checkpoint.path`."""

    def __init__(
        self, context: WorkerContext, spec: CheckpointSpec, assign: Assign, transport: Transport
    ) -> None:
        self.folder: Folder = open_folder(spec.path)
        #: The checkpoints that this worker sees, by identity.
        self.known: dict[int, StoredCheckpoint] = {}
        #: Folders of checkpoints that are damaged, each with the reason.
        self._damaged: dict[str, str] = {}
        self._job = context.job
        self._spec = spec
        self._worker = context.worker
        self._data, self._base = context.data.hex(), context.base.hex()
        self._control = context.control
        self._plan = assign.plan
        self._prefix = assign.rendezvous.prefix
        self._transport = transport

    def candidates_to_begin(self) -> Candidates:
        """Return what a job that has not trained yet may begin with, by its `checkpoint.resume`.
        Check that all workers can write, rather than fail at the first checkpoint.

        Raises JobError where the job must not begin so, and where nodes cannot use the place as
        `error_for` says.
        """
        attempt = hashlib.sha256(self._prefix.encode()).hexdigest()[:8]
        probes = [f".shared.{attempt}.{rank}" for rank in range(self._transport.size)]
        own = Finding(worker=self._worker)
        first = self._plan.workers[0]
        found: Sequence[StoredCheckpoint] = ()
        try:
            if self._worker == first:
                if problem := self._why_unusable(probes[0]):
                    raise JobError(
                        f"checkpoint.path: {problem}; make it a writable directory with room on "
                        f"{first.node}, or name another place"
                    )
                found = self._usable_to_begin()
            candidates, _ = self._agree_on_candidates(found)
            if self._worker != first:  # what is refused is not written to by many
                own = self._check_shared(probes[0], probes[self._transport.rank])
            self._require_all(own)
        finally:
            with contextlib.suppress(OSError):  # what stays is no checkpoint
                self.folder.remove(probes[self._transport.rank])
        return candidates

    def candidates_to_go_on(self, *, needed: bool) -> Candidates:
        """Return what a job that has trained may go on from. Raises JobError where there are only
        damaged ones, or none though one is `needed`, and what `error_for` makes."""
        self._require_all(self._list_patiently())
        candidates, damaged = self._agree_on_candidates(self._usable())
        if not candidates and (needed or damaged):
            what = "; ".join(self._damaged.values())
            raise JobError(
                f"checkpoint.path: no checkpoint in {self.folder.url} can be used: "
                f"{what or 'none of this training is there'}; see that its "
                "file system is mounted on all nodes, and submit the job again"
            )
        return candidates

    def newer_damaged(self, step: int) -> list[str]:
        """Return why each damaged checkpoint newer than that of `step` cannot be used."""
        return [why for name, why in self._damaged.items() if (step_of(name) or 0) > step]

    def share_findings(self, own: Finding) -> list[Finding]:
        """Share `own` with all workers; return the findings of all, in rank order."""
        some = replace(own, reason=inline(own.reason)[:_MOST_REASON])
        return tell_all(self._transport, some, Finding)

    def error_for(
        self, fault: frozenset[NodeName], what: str, fix: str
    ) -> JobError | NodeError | TransportError:
        """Return the error that this worker raises. `fault`: the nodes that the next generation
        does without; NodeError on these, TransportError on the others. Empty: the job is at fault;
        JobError."""
        if not fault:
            return JobError(f"checkpoint.path: {what}; {fix}")
        if self._worker.node not in fault:
            return TransportError(f"checkpoint.path: {what}")
        return NodeError(
            f"checkpoint.path: {what}; on other nodes it is right: mount the same there, make "
            "room, and make it writable"
        )

    def _require_all(self, own: Finding) -> None:
        """Raise unless every worker finds the place fine."""
        found = self.share_findings(own)
        if reasons := distinct_reasons(found):
            fix = "name a place that all nodes share and can write to"
            raise self.error_for(at_fault(found), "; ".join(reasons), fix)

    def _why_unusable(self, probe: str) -> str:
        """Why this node cannot use the place; empty: it can, has left a file there, and knows which
        checkpoints there are."""
        what = "write to"
        try:
            self.folder.write(probe, [b"\0" * _PROBE_BYTES])  # an empty file fits on a full disk
            what = "read"
            self._list()
        except OSError as error:
            return f"cannot {what} {self.folder.url}: {error.strerror or error}"
        return ""

    def _check_shared(self, theirs: str, own: str) -> Finding:
        """Check that the file `theirs` of the first worker appears here, and that this node can
        write `own`."""
        url = self.folder.url
        try:
            seen = self.folder.exists(theirs)
        except OSError as error:
            return self._unreadable(f"cannot read {url}: {error.strerror or error}")
        if problem := self._why_unusable(own):
            return self._unreadable(problem)
        if not seen:
            reason = f"what {self._plan.workers[0].node} writes to {url} does not appear"
            return Finding(worker=self._worker, kind="unseen", reason=reason)
        return Finding(worker=self._worker)

    def _unreadable(self, reason: str) -> Finding:
        return Finding(worker=self._worker, kind="unreadable", reason=reason)

    def _list_patiently(self) -> Finding:
        """List the checkpoints, in several attempts, because a storage that fails for a moment must
        not end a training."""
        reason = ""
        for attempt in range(_PATIENCE):
            if attempt:
                log.warning("checkpoints cannot be read; trying again", extra={"reason": reason})
                self._control.pause(self._plan.generation, _RETRY_S)
            try:
                self._list()
            except OSError as error:
                reason = f"cannot read {self.folder.url}: {error.strerror or error}"
            else:
                return Finding(worker=self._worker)
        return self._unreadable(reason)

    def _list(self) -> None:
        listing = list_checkpoints(self.folder)
        self.known = {found.identity: found for found in listing.checkpoints}
        self._damaged = listing.damaged

    def _usable(self) -> list[StoredCheckpoint]:
        job, data, base = self._job, self._data, self._base
        known = self.known.values()
        return [item for item in known if not misfit(item.manifest, job, data, base)]

    def _usable_to_begin(self) -> list[StoredCheckpoint]:
        """Return the checkpoints that the job may begin with; raises JobError where it may not
        begin."""
        newest = next(((found.name, found.manifest) for found in self.known.values()), None)
        damaged = tuple(self._damaged.values())
        refusal = why_not_begin(
            self._job, self._spec, newest, damaged=damaged, data=self._data, base=self._base
        )
        if refusal:
            raise JobError(refusal)
        return self._usable()

    def _agree_on_candidates(self, own: Sequence[StoredCheckpoint]) -> tuple[Candidates, bool]:
        """Return the candidates of the first worker that has any; and whether any worker knows of
        damaged ones."""
        some = [(item.manifest.step, item.identity) for item in own[:_MOST_TRIED]]
        seen = _Seen(some, bool(self._damaged))
        told = tell_all(self._transport, seen, _Seen)
        candidates = next((other.candidates for other in told if other.candidates), [])
        return candidates, any(other.damaged for other in told)
