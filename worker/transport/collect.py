"""Assembly of whole layers from the shares of a stage's workers, to be written once per layer.

Owns the messages, which are those of one stage. Must not know the use of the layers.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from oobleck.core.ids import WorkerId
from oobleck.core.plan import Plan
from oobleck.core.routes import Shard
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.transport.transport import Transport

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
