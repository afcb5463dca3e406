"""Resuming from a checkpoint: the newest one that all workers can read, and its layers.

Every worker loads and checks the layers that it needs, newest checkpoint first. The first one that
is whole for all workers is used. Must not know when a restore is wanted.
"""

import logging
import time
from collections.abc import Iterable

from oobleck.core.checkpoint import MOST_LAYER_HEADER_BYTES, InvalidCheckpoint, Manifest
from oobleck.core.ids import NodeName
from oobleck.core.job.spec import CheckpointSpec
from oobleck.core.messages import Assign, Restored
from oobleck.core.routes import Shard
from oobleck.host.display import inline
from oobleck.host.storage.checkpoints import (
    Damaged,
    StoredCheckpoint,
    Unreadable,
    read_layer,
    read_records,
    set_aside,
    verify_layer,
)
from oobleck.host.storage.folder import Folder
from oobleck.worker.checkpoint.location import (
    CheckpointLocation,
    Finding,
    Kind,
    at_fault,
    distinct_reasons,
    second_readers,
)
from oobleck.worker.context import WorkerContext
from oobleck.worker.runtime.records import Records, read_lines
from oobleck.worker.state.layout import layout, unpack
from oobleck.worker.state.precision import state_dtype
from oobleck.worker.state.progress import Missed
from oobleck.worker.transport.transport import Transport

log = logging.getLogger(__name__)

#: Longest problem that is reported to the master, in characters.
_MOST_PROBLEM = 200


def restore(
    context: WorkerContext,
    spec: CheckpointSpec,
    assign: Assign,
    transport: Transport,
    *,
    resume: bool,
    needed: bool,
) -> tuple[Restored | None, Missed, Records | None]:
    """Load the plan's layers from the newest checkpoint that is complete for all workers.

    Return that checkpoint (None: there is none), its `missed` counts, and its records (None: none
    are usable). `resume`: the job is untrained, and `checkpoint.resume` decides. `needed`: one must
    exist.

    Raise JobError if none is usable, Superseded if a newer generation is wanted. If the others
    resume without this node, raise NodeError here and TransportError there.
    """
    location = CheckpointLocation(context, spec, assign, transport)
    candidates = (
        location.candidates_to_begin() if resume else location.candidates_to_go_on(needed=needed)
    )
    shards = sorted(assign.plan.shards[context.worker])
    passed_over: list[str] = []
    fault: frozenset[NodeName] = frozenset()
    for step, identity in candidates:
        found = _try(context, location, step, identity, shards)
        reasons = distinct_reasons(found)
        if not reasons:
            used = location.known[identity]
            path = f"{location.folder.url.rstrip('/')}/{used.name}"
            records, problem = _records(context, location.folder.below(used.name), used.manifest)
            passed_over += location.newer_damaged(step)
            restored = Restored(
                generation=assign.plan.generation,
                step=step,
                path=path,
                passed_over=tuple(passed_over),
                job=used.manifest.job,
                records_problem=problem,
            )
            return restored, used.manifest.missed, records
        passed_over.append("; ".join(reasons))
        log.warning("checkpoint passed over", extra={"step": step, "reason": reasons})
        fault = fault or at_fault(found)
    if not passed_over:
        return None, {}, None
    what = f"no checkpoint in {location.folder.url} can be read: {' | '.join(passed_over)}"
    fix = "check that all nodes share it; to begin anew, remove them or name another path"
    raise location.error_for(fault, what, fix)


def _records(
    context: WorkerContext, folder: Folder, manifest: Manifest
) -> tuple[Records | None, str]:
    """Return the records of a checkpoint of this job, and why they cannot be used.

    Unusable records do not invalidate the state; the master reports that they are lost.
    """
    if manifest.records is None or manifest.job != context.job_id:
        return None, ""
    try:
        text = read_records(folder, manifest.records)
        return read_lines(text, manifest.step), ""
    except InvalidCheckpoint as error:
        log.warning("records not restored", extra={"step": manifest.step, "reason": str(error)})
        return None, inline(str(error))[:_MOST_PROBLEM]


def _try(
    context: WorkerContext,
    location: CheckpointLocation,
    step: int,
    identity: int,
    shards: Iterable[Shard],
) -> list[Finding]:
    """Try to load the layers from one checkpoint; return the findings of all workers."""
    mine = location.known.get(identity)
    found = location.share_findings(_load(context, location.folder, mine, step, shards))
    if distinct_reasons(found):
        context.state.keep_only(())
    for layer, reader in second_readers(found).items():
        if reader == context.worker and mine is not None:
            _confirm_damage(location.folder, mine, layer)
    return found


def _load(
    context: WorkerContext,
    folder: Folder,
    found: StoredCheckpoint | None,
    step: int,
    shards: Iterable[Shard],
) -> Finding:
    """Load this worker's layers from one checkpoint; return the finding."""
    worker = context.worker
    if found is None:
        return Finding(worker=worker, kind="unseen", reason=f"step {step}: it does not appear here")
    context.state.keep_only(())
    try:
        for shard in shards:
            _load_layer(context, folder.below(found.name), found.manifest, step, shard)
    except Damaged as error:
        reason = f"step {step}: {error}"
        return Finding(worker=worker, kind="damaged", reason=reason, layer=error.layer)
    except InvalidCheckpoint as error:
        kind: Kind = "unreadable" if isinstance(error, Unreadable) else "unfit"
        return Finding(worker=worker, kind=kind, reason=f"step {step}: {error}")
    return Finding(worker=worker)


def _load_layer(
    context: WorkerContext, folder: Folder, manifest: Manifest, step: int, shard: Shard
) -> None:
    """Load one shard of a layer. Raise InvalidCheckpoint."""
    training = context.job.training
    moments, dtype = training.optimizer.state, state_dtype(training.precision)
    layer = shard.layer
    file, flat = (
        manifest.files[layer],
        layout(context.job.model, layer, training.optimizer.no_decay),
    )
    most = (1 + len(moments)) * flat.size * dtype.itemsize + MOST_LAYER_HEADER_BYTES + 8
    if file.bytes > most:
        raise InvalidCheckpoint(f"{file.name}: {file.bytes} bytes exceed the size of a layer")
    try:
        content = read_layer(folder, file)
    except Damaged:  # a truncated transfer may succeed the second time
        content = read_layer(folder, file)
    try:
        snapshot = unpack(content, flat, moments, dtype)
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(f"{file.name}: {error}") from error
    context.state.load(layer, snapshot, version=step, part=shard.part, parts=shard.parts)


def _confirm_damage(folder: Folder, found: StoredCheckpoint, layer: int) -> None:
    """Set a checkpoint aside if this node, too, finds the layer's file damaged.

    Then it does not count as kept, and it is not tried again.
    """
    here, file = folder.below(found.name), found.manifest.files[layer]
    problem = verify_layer(here, file)
    if not isinstance(problem, Damaged):
        return
    try:
        set_aside(here, {file.name: problem.what}, time.time())
    except OSError as failure:
        reason = failure.strerror or str(failure)
        fields = {"checkpoint": found.name, "reason": reason}
        log.warning("checkpoint not set aside", extra=fields)
