"""Going on from a checkpoint: which one all can read, and loading this worker's layers from it.

Rank 0 says which checkpoints there are; then, from the newest on, every worker loads and checks
the layers that it needs, and the first one that is whole for all is it. Must not know when a
checkpoint is wanted.
"""

import hashlib
import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from oobleck.host.checkpoints import (
    Damaged,
    Found,
    Listing,
    list_checkpoints,
    problem_of,
    read_layer,
    verify_layer,
)
from oobleck.host.folder import Folder, open_folder
from oobleck.host.messages import Assign
from oobleck.host.setaside import set_aside
from oobleck.planner.checkpoint import (
    MOST_LAYER_HEADER_BYTES,
    InvalidCheckpoint,
    misfit,
    step_of,
    why_not_begin,
)
from oobleck.planner.ids import Generation, NodeName, WorkerId
from oobleck.planner.job import CheckpointSpec, JobSpec
from oobleck.planner.redact import redact
from oobleck.planner.transfer import Shard, plan_shards
from oobleck.planner.units import listed
from oobleck.worker.control import Control
from oobleck.worker.errors import CheckpointError
from oobleck.worker.layerfile import moment_names, unpack
from oobleck.worker.layout import layout
from oobleck.worker.state import ModelState, state_dtype
from oobleck.worker.transport import Transport

log = logging.getLogger(__name__)

#: Checkpoints that are tried, newest first.
_MOST_TRIED = 16
#: Of a reason why a worker cannot use a checkpoint, in an exchange of fixed size.
_REASON_BYTES = 200
_PROBE_BYTES = 65_536
#: How often checkpoints that cannot be listed are looked for, and how long between two looks: less
#: than what is taken for a hang.
_PATIENCE = 5
_RETRY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What training goes on from."""

    step: int
    #: Folder or URL; empty: there is none, and all begin anew.
    path: str
    #: Newer ones that could not be used, and why.
    passed_over: tuple[str, ...]


def check_protocol(spec: CheckpointSpec) -> None:
    """Raises CheckpointError where this node cannot speak to the place at all."""
    try:
        open_folder(spec.path)
    except ValueError as error:
        raise CheckpointError(f"checkpoint.path: {error}") from error


def told_once(reasons: Iterable[tuple[NodeName, str]]) -> list[str]:
    """Each reason with the nodes that gave it; '' is none."""
    nodes: dict[str, set[NodeName]] = {}
    for node, reason in reasons:
        if reason:
            nodes.setdefault(reason, set()).add(node)
    return [f"{reason} (on {listed(names)})" for reason, names in nodes.items()]


def second_readers(
    accused: Sequence[tuple[WorkerId, int | None]],
) -> dict[int, WorkerId]:
    """By layer whose file a worker finds damaged: the first worker on another node, who reads it
    too. `accused`: by each worker at most one. What is wrong may be the node that reads; where all
    workers are on one node, nobody can tell."""
    found: dict[int, NodeName] = {}
    for worker, layer in accused:
        if layer is not None:
            found.setdefault(layer, worker.node)
    return {
        layer: others[0]
        for layer, node in found.items()
        if (others := [worker for worker, _ in accused if worker.node != node])
    }


def _check_writable(folder: Folder) -> None:
    """Fail before the training rather than at the first checkpoint. Raises CheckpointError."""
    probe = f".writable.{secrets.token_hex(4)}"
    try:
        folder.write(probe, [b"\0" * _PROBE_BYTES])  # an empty file fits on a full disk
        folder.remove(probe)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint.path: cannot write to {folder.url} on this node: "
            f"{error.strerror or error}; make room there, make it writable, or name another place"
        ) from error


class Restorer:
    """Loads a worker's layers from the checkpoints of its job's path."""

    def __init__(
        self,
        *,
        job: JobSpec,
        spec: CheckpointSpec,
        worker: WorkerId,
        state: ModelState,
        data: str,
        control: Control,
    ) -> None:
        """`data`: fingerprint of the data that this worker reads, hexadecimal."""
        self._job = job
        self._spec = spec
        self._worker = worker
        self._state = state
        self._data = data
        self._control = control
        self._known: dict[int, Found] = {}
        #: By folder.
        self._damaged: dict[str, str] = {}

    def run(
        self, assign: Assign, transport: Transport, *, resume: bool, needed: bool
    ) -> Checkpoint | None:
        """Hold the plan's layers as the newest checkpoint that is whole for all workers has them;
        None where there is none.

        `resume`: for a job that has not trained yet, by its `checkpoint.resume`. `needed`: there
        must be one. Raises CheckpointError where what is there is of another training or damaged,
        or lacks though it must not, TransportError, Superseded.
        """
        folder = open_folder(self._spec.path)
        probe = f".shared.{hashlib.sha256(assign.rendezvous.prefix.encode()).hexdigest()[:8]}"
        first = assign.plan.workers[0]
        # Only at first: later, what cannot be written must not keep training from going on.
        if resume and self._worker == first:
            _check_writable(folder)
        try:
            if resume and self._worker == first:
                folder.write(probe, [b"\n"])
            candidates = self._candidates(folder, assign, transport, resume=resume, needed=needed)
            if resume and self._worker != first:  # what is refused is not written to by many
                self._check_shared(folder, probe, first)
            shards = sorted(plan_shards(assign.plan)[self._worker])
            passed_over = []
            for step, identity in candidates:
                reasons = self._try(folder, step, identity, shards, assign, transport)
                if not reasons:
                    name = self._known[identity].name
                    path = f"{folder.url.rstrip('/')}/{name}"
                    passed_over += self._newer_damaged(step)
                    return Checkpoint(step=step, path=path, passed_over=tuple(passed_over))
                passed_over.append("; ".join(reasons))
                log.warning("checkpoint passed over", extra={"step": step, "reason": reasons})
            transport.all_gather(torch.zeros(1))  # all have seen the probe
        finally:
            if resume and self._worker == first:
                folder.remove(probe)
        if passed_over:
            raise CheckpointError(
                f"checkpoint.path: no checkpoint in {folder.url} can be read: "
                f"{' | '.join(passed_over)}; remove them to begin anew, or name another path"
            )
        return None

    def _newer_damaged(self, step: int) -> list[str]:
        """What was known to be damaged and would have come first."""
        return [why for name, why in self._damaged.items() if (step_of(name) or 0) > step]

    def _check_shared(self, folder: Folder, probe: str, first: WorkerId) -> None:
        """Raises CheckpointError where this node does not see or reach what `first` writes."""
        if not folder.exists(probe):
            raise CheckpointError(
                f"checkpoint.path: what {first.node} writes to {folder.url} does not "
                f"appear on {self._worker.node}; name a place that all nodes share"
            )
        _check_writable(folder)

    def _candidates(
        self, folder: Folder, assign: Assign, transport: Transport, *, resume: bool, needed: bool
    ) -> list[tuple[int, int]]:
        """Step and identity of each checkpoint, newest first, as rank 0 sees them."""
        listing = self._listing(folder, assign.plan.generation, patient=not resume)
        self._known = {found.identity: found for found in listing.checkpoints}
        self._damaged = listing.damaged
        table = torch.zeros(1 + _MOST_TRIED, 2, dtype=torch.int64)
        if self._worker == assign.plan.workers[0]:
            found = self._fitting(listing.checkpoints, resume=resume, needed=needed)
            table[0, 0] = len(found)
            for row, checkpoint in enumerate(found, start=1):
                table[row] = torch.tensor([checkpoint.manifest.step, checkpoint.identity])
        transport.broadcast(table, 0)
        rows = table[1 : 1 + int(table[0, 0])].tolist()
        return [(step, identity) for step, identity in rows]

    def _listing(self, folder: Folder, generation: Generation, *, patient: bool) -> Listing:
        """What is in the folder. Raises CheckpointError where it cannot be read; `patient`: after
        some attempts, because a storage that fails for a moment must not end a training."""
        attempts = _PATIENCE if patient else 1
        while True:
            attempts -= 1
            try:
                return list_checkpoints(folder)
            except OSError as error:
                reason = error.strerror or str(error)
            if not attempts:
                raise CheckpointError(
                    f"checkpoint.path: cannot read {folder.url} on this node: {reason}; make it "
                    "the readable directory that it was, or name another place"
                )
            log.warning("checkpoints cannot be read; trying again", extra={"reason": reason})
            self._control.pause(generation, _RETRY_S)

    def _fitting(
        self, found: tuple[Found, ...], *, resume: bool, needed: bool
    ) -> tuple[Found, ...]:
        """What may be tried; raises CheckpointError where that is nothing, or not to be."""
        job, data, path = self._job, self._data, redact(self._spec.path)
        damaged = tuple(self._damaged.values())
        if resume:
            newest = (found[0].name, found[0].manifest) if found else None
            refusal = why_not_begin(job, self._spec, newest, damaged=damaged, data=data)
            if refusal:
                raise CheckpointError(refusal)
        fitting = [item for item in found if not misfit(item.manifest, job, data)]
        if not fitting and (needed or (damaged and not resume)):
            what = "; ".join(damaged) or "none of this training is there, though one was saved"
            raise CheckpointError(
                f"checkpoint.path: no checkpoint in {path} can be used: {what}; see that its file "
                "system is mounted on all nodes, and submit the job again"
            )
        return tuple(fitting[:_MOST_TRIED])

    def _try(
        self,
        folder: Folder,
        step: int,
        identity: int,
        shards: Iterable[Shard],
        assign: Assign,
        transport: Transport,
    ) -> list[str]:
        """Load the layers from one checkpoint; why that is not possible, on any worker."""
        told = torch.zeros(1 + _REASON_BYTES, dtype=torch.int64)
        try:
            self._load(folder, identity, step, shards)
        except InvalidCheckpoint as error:
            reason = f"step {step}: {error}".encode()[:_REASON_BYTES]
            told[1 : 1 + len(reason)] = torch.tensor(list(reason))
            if isinstance(error, Damaged):
                told[0] = 1 + self._layer_of(identity, error)
        rows = [row.tolist() for row in transport.all_gather(told)]
        workers = assign.plan.workers
        reasons = told_once(
            (worker.node, bytes(row[1:]).rstrip(bytes(1)).decode(errors="replace"))
            for worker, row in zip(workers, rows, strict=True)
        )
        if reasons:
            self._state.keep_only(())
        accused = [
            (worker, row[0] - 1 if row[0] else None)
            for worker, row in zip(workers, rows, strict=True)
        ]
        for layer, reader in second_readers(accused).items():
            if reader == self._worker and identity in self._known:
                self._confirm(folder, self._known[identity], layer)
        return reasons

    def _layer_of(self, identity: int, error: Damaged) -> int:
        file = str(error).partition(": ")[0]
        return [file.name for file in self._known[identity].manifest.files].index(file)

    def _confirm(self, folder: Folder, found: Found, layer: int) -> None:
        """Set aside what another node finds damaged and this one too, so that it does not count as
        one that is kept, and is not tried again."""
        here, file = folder.below(found.name), found.manifest.files[layer]
        problem = verify_layer(here, file)
        if not isinstance(problem, Damaged):
            return
        try:
            set_aside(here, {file.name: problem_of(problem)}, time.time())
        except OSError as failure:
            reason = failure.strerror or str(failure)
            fields = {"checkpoint": found.name, "reason": reason}
            log.warning("checkpoint not set aside", extra=fields)

    def _load(self, folder: Folder, identity: int, step: int, shards: Iterable[Shard]) -> None:
        found = self._known.get(identity)
        if found is None:
            raise InvalidCheckpoint(f"is not seen on {self._worker.node}")
        here = folder.below(found.name)
        training = self._job.training
        moments = moment_names(training.optimizer)
        dtype = state_dtype(training.precision)
        self._state.keep_only(())
        for shard in shards:
            layer = shard.layer
            file = found.manifest.files[layer]
            flat = layout(self._job.model, layer)
            most = (1 + len(moments)) * flat.size * dtype.itemsize + MOST_LAYER_HEADER_BYTES + 8
            if file.bytes > most:
                raise InvalidCheckpoint(f"{file.name}: {file.bytes} bytes are more than a layer's")
            try:
                content = read_layer(here, file)
            except Damaged:  # what was cut short on its way is whole the second time
                content = read_layer(here, file)
            try:
                snapshot = unpack(content, flat, moments, dtype)
            except InvalidCheckpoint as error:
                raise InvalidCheckpoint(f"{file.name}: {error}") from error
            self._state.load(layer, snapshot, version=step, part=shard.part, parts=shard.parts)
