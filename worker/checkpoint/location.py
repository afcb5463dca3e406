"""Place of a job's checkpoints: whether all workers can use it, and which checkpoints it has.

The first worker that sees checkpoints decides the list of candidates. If some workers cannot use
the place, their findings blame nodes or the job. Must not know what a checkpoint holds.
"""

import contextlib
import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from oobleck.core.checkpoint import misfit, step_of, why_not_begin
from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.job.spec import CheckpointSpec
from oobleck.core.messages import Assign
from oobleck.core.units import comma_separated
from oobleck.host.display import inline
from oobleck.host.storage.checkpoints import StoredCheckpoint, list_checkpoints
from oobleck.host.storage.folder import Folder, open_folder
from oobleck.worker.context import WorkerContext
from oobleck.worker.runtime.errors import JobError, NodeError, TransportError
from oobleck.worker.transport.transport import Transport, tell_all

#: - unseen: files that another worker sees do not appear here.
#: - unreadable: this node cannot read or write the place.
#: - damaged: a layer's file differs from what was written.
#: - unfit: no node can use it.
Kind = Literal["fine", "unseen", "unreadable", "damaged", "unfit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Finding of one worker."""

    worker: WorkerId
    kind: Kind = "fine"
    reason: str = ""
    #: Layer whose file is damaged.
    layer: int | None = None


def distinct_reasons(found: Iterable[Finding]) -> list[str]:
    """Return each reason with the nodes that reported it."""
    nodes: dict[str, set[NodeName]] = {}
    for finding in found:
        if finding.kind != "fine":
            nodes.setdefault(finding.reason, set()).add(finding.worker.node)
    return [f"{reason} (on {comma_separated(names)})" for reason, names in nodes.items()]


def at_fault(found: Sequence[Finding]) -> frozenset[NodeName]:
    """Return the nodes that the others should go on without.

    Empty if they are the majority. Also empty if two nodes see different things: nobody knows which
    of the two is right.
    """
    kinds = {finding.kind for finding in found}
    nodes = {finding.worker.node for finding in found}
    fault = {finding.worker.node for finding in found if finding.kind != "fine"}
    if not kinds <= {"fine", "unseen", "unreadable"} or 2 * len(fault) > len(nodes):
        return frozenset()
    if "unseen" in kinds and len(nodes) < 3:
        return frozenset()
    return frozenset(fault)


def second_readers(found: Sequence[Finding]) -> dict[int, WorkerId]:
    """Return, for each layer with a damaged file, the first worker on another node than its finder.

    That worker reads the file too, because the finder's node may be at fault.
    """
    finders: dict[int, NodeName] = {}
    for finding in found:
        if finding.layer is not None:
            finders.setdefault(finding.layer, finding.worker.node)
    workers = [finding.worker for finding in found]
    return {
        layer: others[0]
        for layer, node in finders.items()
        if (others := [worker for worker in workers if worker.node != node])
    }


log = logging.getLogger(__name__)

#: Most checkpoints to try, newest first.
_MOST_TRIED = 16
_MOST_REASON = 200
_PROBE_BYTES = 65_536
#: Attempts to list the checkpoints, and the pause between two. The pause is shorter than the time
#: that counts as a hang.
_PATIENCE = 5
_RETRY_S = 5.0

#: Step and identity of each checkpoint, newest first.
Candidates = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Seen:
    """Checkpoints that one worker sees at the place."""

    candidates: Candidates
    #: Whether damaged checkpoints exist.
    damaged: bool


def check_place(spec: CheckpointSpec) -> None:
    """Raise JobError if the place may not be reported, NodeError if this node cannot reach it."""
    if why := spec.why_not_reportable():
        raise JobError(f"checkpoint.path: {why}; name another place")
    try:
        open_folder(spec.path)
    except ValueError as error:
        raise NodeError(f"checkpoint.path: {error}") from error


class CheckpointLocation:
    """Place of a job's checkpoints, as the workers of one generation see it.

    Every worker calls the public methods that exchange findings, in the same order.
    """

    def __init__(
        self, context: WorkerContext, spec: CheckpointSpec, assign: Assign, transport: Transport
    ) -> None:
        self.folder: Folder = open_folder(spec.path)
        #: Checkpoints that this worker sees, by identity.
        self.known: dict[int, StoredCheckpoint] = {}
        #: Reason for each damaged checkpoint, by its folder's name.
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
        """Return the checkpoints that an untrained job may begin with, by its `checkpoint.resume`.

        Also check that all workers can write, rather than fail at the first checkpoint. Raise
        JobError if the job must not begin this way; if nodes cannot use the place, raise what
        `error_for` returns.
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
            if self._worker != first:  # do not let all workers write to a refused place
                own = self._check_shared(probes[0], probes[self._transport.rank])
            self._require_all(own)
        finally:
            with contextlib.suppress(OSError):  # a file left behind is no checkpoint
                self.folder.remove(probes[self._transport.rank])
        return candidates

    def candidates_to_go_on(self, *, needed: bool) -> Candidates:
        """Return the checkpoints from which a trained job may resume.

        Raise JobError if all are damaged, or if one is `needed` and none exists. If nodes cannot
        use the place, raise what `error_for` returns.
        """
        self._require_all(self._list_patiently())
        candidates, damaged = self._agree_on_candidates(self._usable())
        if not candidates and (needed or damaged):
            what = "; ".join(self._damaged.values())
            raise JobError(
                f"checkpoint.path: no checkpoint in {self.folder.url} can be used: "
                f"{what or 'none belongs to this training'}; check that its "
                "file system is mounted on all nodes, and submit the job again"
            )
        return candidates

    def newer_damaged(self, step: int) -> list[str]:
        """Return the reason for each damaged checkpoint that is newer than `step`."""
        return [why for name, why in self._damaged.items() if (step_of(name) or 0) > step]

    def share_findings(self, own: Finding) -> list[Finding]:
        """Exchange findings with all workers; return them in rank order."""
        some = replace(own, reason=inline(own.reason)[:_MOST_REASON])
        return tell_all(self._transport, some, Finding)

    def error_for(
        self, fault: frozenset[NodeName], what: str, fix: str
    ) -> JobError | NodeError | TransportError:
        """Return the error that this worker raises.

        `fault`: nodes that the next generation excludes: NodeError on these, TransportError on the
        others. If it is empty, the job is at fault: JobError.
        """
        if not fault:
            return JobError(f"checkpoint.path: {what}; {fix}")
        if self._worker.node not in fault:
            return TransportError(f"checkpoint.path: {what}")
        return NodeError(
            f"checkpoint.path: {what}; other nodes have no problem: mount the same place here, "
            "make room, and make it writable"
        )

    def _require_all(self, own: Finding) -> None:
        """Raise unless every worker finds the place fine."""
        found = self.share_findings(own)
        if reasons := distinct_reasons(found):
            fix = "name a place that all nodes share and can write to"
            raise self.error_for(at_fault(found), "; ".join(reasons), fix)

    def _why_unusable(self, probe: str) -> str:
        """Return why this node cannot use the place; empty if it can.

        If it can, the file `probe` is there and the checkpoints are listed.
        """
        what = "write to"
        try:
            self.folder.write(probe, [b"\0" * _PROBE_BYTES])  # an empty file fits on a full disk
            what = "read"
            self._list()
        except OSError as error:
            return f"cannot {what} {self.folder.url}: {error.strerror or error}"
        return ""

    def _check_shared(self, theirs: str, own: str) -> Finding:
        """Check that the first worker's file `theirs` appears here, and write the file `own`."""
        url = self.folder.url
        try:
            seen = self.folder.exists(theirs)
        except OSError as error:
            return self._unreadable(f"cannot read {url}: {error.strerror or error}")
        if problem := self._why_unusable(own):
            return self._unreadable(problem)
        if not seen:
            reason = f"files of {self._plan.workers[0].node} in {url} do not appear"
            return Finding(worker=self._worker, kind="unseen", reason=reason)
        return Finding(worker=self._worker)

    def _unreadable(self, reason: str) -> Finding:
        return Finding(worker=self._worker, kind="unreadable", reason=reason)

    def _list_patiently(self) -> Finding:
        """List the checkpoints, in several attempts.

        A brief failure of storage must not end a training.
        """
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
        """Return the checkpoints that the job may begin with. Raise JobError if it may not."""
        newest = next(((found.name, found.manifest) for found in self.known.values()), None)
        damaged = tuple(self._damaged.values())
        refusal = why_not_begin(
            self._job, self._spec, newest, damaged=damaged, data=self._data, base=self._base
        )
        if refusal:
            raise JobError(refusal)
        return self._usable()

    def _agree_on_candidates(self, own: Sequence[StoredCheckpoint]) -> tuple[Candidates, bool]:
        """Return the candidates of the first worker that has any, and whether any sees damage."""
        some = [(item.manifest.step, item.identity) for item in own[:_MOST_TRIED]]
        seen = _Seen(some, bool(self._damaged))
        seen_by_all = tell_all(self._transport, seen, _Seen)
        candidates = next((other.candidates for other in seen_by_all if other.candidates), [])
        return candidates, any(other.damaged for other in seen_by_all)
