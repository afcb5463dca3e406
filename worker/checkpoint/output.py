"""Final weights on disk: one safetensors file per layer, and a manifest that names them.

One holder of each layer writes it. The manifest is written last, so it proves that the set is
complete. A failed write is retried for a minute, because the result may exist nowhere else.
Also collects whole layers from the shares of a stage.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
from safetensors.numpy import save
from torch import Tensor

from oobleck.core.checkpoint import MANIFEST, RECORDS, RecordsFile, layer_file
from oobleck.core.codec import encode
from oobleck.core.ids import Generation, WorkerId
from oobleck.core.job.model import AnyModel
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import SaveFailed
from oobleck.core.plan import Plan
from oobleck.core.routes import Shard
from oobleck.host.storage.folder import LocalFolder
from oobleck.worker.context import WorkerContext
from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.control import Control
from oobleck.worker.runtime.errors import JobError
from oobleck.worker.runtime.records import describe_file
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.transport.transport import Transport

log = logging.getLogger(__name__)

_PROBE_BYTES = 65_536
#: Pause between two attempts to write, and the time after which attempts stop.
_RETRY_S, _LONGEST_S = 5.0, 60.0


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Manifest of an output directory."""

    format: int = 1
    job: str
    #: Training steps applied.
    step: int
    model: AnyModel
    #: One file per layer, in layer order.
    files: tuple[str, ...]
    #: As in a checkpoint's manifest.
    records: RecordsFile | None = None


def check_writable(directory: str | Path) -> None:
    """Raise JobError if `directory` cannot be written, before the training rather than after it."""
    probe = f".writable.{os.getpid()}"
    _write(directory, probe, b"\0" * _PROBE_BYTES)  # an empty file fits on a full disk
    with contextlib.suppress(OSError):
        LocalFolder(directory).remove(probe)


def _unwritable(directory: str | Path, error: OSError) -> JobError:
    if Path(directory).is_symlink() and not Path(directory).exists():
        return JobError(
            f"output: {directory} is a link to {os.readlink(directory)}, which does not exist on "
            "this machine; make that directory, or name another one"
        )
    return JobError(
        f"output: cannot write to {directory} on this machine: {error.strerror}; make room there, "
        "make it writable, or name another directory"
    )


def write_layers(directory: str | Path, state: ModelState, layers: Iterable[int]) -> None:
    """Write the weights of `layers`, under the names of their parameters."""
    for layer in layers:
        tensors = {name: weight.cpu().numpy() for name, weight in state.weights(layer)}
        metadata = {"layer": str(layer), "step": str(state.layers[layer].version)}
        _write(directory, layer_file(layer), save(tensors, metadata=metadata))


def write_records(directory: str | Path, lines: Sequence[bytes]) -> RecordsFile:
    """Write the records that the master may not have."""
    _write(directory, RECORDS, b"".join(lines))
    return describe_file(lines)


def write_manifest(
    directory: str | Path,
    job: JobSpec,
    job_id: str,
    step: int,
    records: RecordsFile | None = None,
) -> None:
    """Write the manifest of a complete output, after all layers."""
    files = tuple(layer_file(layer) for layer in range(job.model.layer_count))
    manifest = Manifest(job=job_id, step=step, model=job.model, files=files, records=records)
    _write(directory, MANIFEST, msgspec.json.format(encode(manifest), indent=2) + b"\n")


def write_result(
    context: WorkerContext, output: str, plan: Plan, transport: Transport, *, saved: bool
) -> None:
    """Write the committed state to the directory `output`, then the manifest.

    Each layer is written by its first owner. Every worker of `plan` calls it. `saved`: a checkpoint
    has that state.

    Raise JobError when it cannot be written, TransportError when a worker is lost, Superseded when
    a newer generation is wanted.
    """
    job, worker, step = context.job, context.worker, context.progress.committed
    kept = "; its checkpoint has them: make room, and submit the job again" if saved else ""
    lost = f"the weights of step {step} are not saved{kept}"
    insist = partial(_insist, context.control, plan.generation, step, lost)
    # One layer after the other, so that there is no more than one whole in host memory.
    for layer in range(plan.layer_count):
        writer = plan.owners(layer)[0]
        whole = collect(context.state, layer, transport, plan, worker=worker, writer=writer)
        if whole is not None:
            state = ModelState(job, torch.device("cpu"))
            state.load(layer, whole, version=step)
            insist(partial(write_layers, output, state, [layer]))
    transport.all_gather(torch.zeros(1))  # the manifest must not precede any layer
    if plan.workers[context.progress.recorder] == worker:
        lines = context.records.lines(step, timeout_s=0.0)

        def conclude() -> None:
            records = write_records(output, lines)
            write_manifest(output, job, context.job_id, step, records)

        insist(conclude)


def _insist(
    control: Control, generation: Generation, step: int, lost: str, write: Callable[[], None]
) -> None:
    """Retry `write` for `_LONGEST_S`; then raise JobError with `lost` in its message."""
    until = time.monotonic() + _LONGEST_S
    while True:
        try:
            with pulse.FILES:
                return write()
        except JobError as error:
            log.warning("the output cannot be written", extra={"reason": error})
            control.report(SaveFailed(what="output", step=step, reason=str(error)))
            if time.monotonic() >= until:
                raise JobError(f"{error}; {lost}") from error
            control.pause(generation, _RETRY_S)


def _write(directory: str | Path, name: str, content: bytes) -> None:
    """Replace a file atomically and durably."""
    try:
        LocalFolder(directory).write(name, [content])
    except OSError as error:
        raise _unwritable(directory, error) from error


# ---- Assembly of whole layers from the shares of a stage's workers, to be written once per
# layer.
#
# Owns the messages, which are those of one stage.


#: Tags of a layer's shares, beyond those of all others.
_FIRST_TAG = 1 << 30


#: Copies rows of the first tensor into the second one, which is in host memory.
Copy = Callable[[Tensor, Tensor], None]


def _copy(source: Tensor, into: Tensor) -> None:
    into.copy_(source)


def collect(
    state: ModelState,
    layer: int,
    transport: Transport,
    plan: Plan,
    *,
    worker: WorkerId,
    writer: WorkerId,
    copy: Copy = _copy,
) -> Tensor | None:
    """Return the whole state of `layer` (1 + moments, n) in host memory on `writer`, which holds it
    or a share of it; None on all others.

    `copy` puts rows of a tensor into host memory. All workers that share the layer with the writer
    call this for the same layers in the same order. Raises TransportError.
    """
    members = plan.hold_of(writer, layer).workers
    if worker not in members:
        return None
    if len(members) == 1:
        return state.snapshot(layer)
    tag = _FIRST_TAG + layer
    if worker != writer:
        transport.send(state.layers[layer].storage, plan.workers.index(writer), tag).wait()
        transport.complete()
        return None
    own = state.layers[layer]
    cuts = [own.layout.shard(Shard(layer, part, len(members))) for part in range(len(members))]
    pieces, pending = [], []
    for member, (tied, rest) in zip(members, cuts, strict=True):
        piece = own.storage
        if member != worker:
            piece = piece.new_empty(len(piece), len(tied) + len(rest))
            pending.append(transport.receive(piece, plan.workers.index(member), tag))
        pieces.append(piece)
    for operation in pending:
        operation.wait()
    transport.complete()
    whole = torch.zeros(len(own.storage), own.layout.size, dtype=own.storage.dtype)
    for (tied, rest), piece in zip(cuts, pieces, strict=True):
        copy(piece[:, : len(tied)], whole[:, tied.start : tied.stop])
        copy(piece[:, len(tied) :], whole[:, rest.start : rest.stop])
    return whole
