"""Going on from a checkpoint: which one all can read, and loading this worker's layers from it.

From the newest on that the `place` has, every worker loads and checks the layers that it needs, and
the first checkpoint that is whole for all is it. Must not know when one is wanted.
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from oobleck.host.ipc.messages import Assign
from oobleck.host.storage.checkpoints import (
    Damaged,
    StoredCheckpoint,
    Unreadable,
    problem_of,
    read_layer,
    verify_layer,
)
from oobleck.host.storage.folder import Folder
from oobleck.host.storage.set_aside import set_aside
from oobleck.planner.ids import NodeName, WorkerId
from oobleck.planner.job.spec import CheckpointSpec, JobSpec
from oobleck.planner.programs.transfer import Shard, plan_shards
from oobleck.planner.recovery.checkpoint import MOST_LAYER_HEADER_BYTES, InvalidCheckpoint
from oobleck.worker.checkpoint.findings import Finding, Kind, at_fault, second_readers, told_once
from oobleck.worker.checkpoint.location import CheckpointLocation
from oobleck.worker.runtime.control import Control
from oobleck.worker.state.layer_file import moment_names, unpack
from oobleck.worker.state.layout import layout
from oobleck.worker.state.model_state import ModelState, state_dtype
from oobleck.worker.transport.transport import Transport

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What training goes on from."""

    step: int
    #: Folder or URL; empty: there is none, and all begin anew.
    path: str
    #: Newer ones that could not be used, and why.
    passed_over: tuple[str, ...]


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

    def run(
        self, assign: Assign, transport: Transport, *, resume: bool, needed: bool
    ) -> Checkpoint | None:
        """Hold the plan's layers as the newest checkpoint that is whole for all workers has them;
        None where there is none.

        `resume`: for a job that has not trained yet, by its `checkpoint.resume`. `needed`: there
        must be one. Raises CheckpointError where what is there is of another training or damaged,
        or lacks though it must not; where the others can go on without this node,
        LocationUnreachable here and TransportError there; Superseded.
        """
        place = CheckpointLocation(
            job=self._job,
            spec=self._spec,
            worker=self._worker,
            data=self._data,
            control=self._control,
            assign=assign,
            transport=transport,
        )
        candidates = place.begin() if resume else place.look(needed=needed)
        shards = sorted(plan_shards(assign.plan)[self._worker])
        passed_over: list[str] = []
        fault: frozenset[NodeName] = frozenset()
        for step, identity in candidates:
            found = self._try(place, step, identity, shards)
            reasons = told_once(found)
            if not reasons:
                path = f"{place.folder.url.rstrip('/')}/{place.known[identity].name}"
                passed_over += place.newer_damaged(step)
                return Checkpoint(step=step, path=path, passed_over=tuple(passed_over))
            passed_over.append("; ".join(reasons))
            log.warning("checkpoint passed over", extra={"step": step, "reason": reasons})
            fault = fault or at_fault(found)
        if not passed_over:
            return None
        what = f"no checkpoint in {place.folder.url} can be read: {' | '.join(passed_over)}"
        fix = "see that all nodes share it; or remove them to begin anew, or name another path"
        raise place.failure(fault, what, fix)

    def _try(
        self, place: CheckpointLocation, step: int, identity: int, shards: Iterable[Shard]
    ) -> list[Finding]:
        """Load the layers from one checkpoint; what all workers find of it."""
        mine = place.known.get(identity)
        found = place.tell(self._loaded(place.folder, mine, step, shards))
        if told_once(found):
            self._state.keep_only(())
        for layer, reader in second_readers(found).items():
            if reader == self._worker and mine is not None:
                self._confirm(place.folder, mine, layer)
        return found

    def _loaded(
        self, folder: Folder, found: StoredCheckpoint | None, step: int, shards: Iterable[Shard]
    ) -> Finding:
        if found is None:
            return Finding(worker=self._worker, kind="unseen", reason=f"step {step}: is not seen")
        kind: Kind = "fine"
        reason, layer = "", None
        try:
            self._load(folder, found, step, shards)
        except InvalidCheckpoint as error:
            kind, reason = "unfit", f"step {step}: {error}"
            if isinstance(error, Damaged):
                file = str(error).partition(": ")[0]
                layer = [file.name for file in found.manifest.files].index(file)
                kind = "damaged"
            elif isinstance(error, Unreadable):
                kind = "unreadable"
        return Finding(worker=self._worker, kind=kind, reason=reason, layer=layer)

    def _confirm(self, folder: Folder, found: StoredCheckpoint, layer: int) -> None:
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

    def _load(
        self, folder: Folder, found: StoredCheckpoint, step: int, shards: Iterable[Shard]
    ) -> None:
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
