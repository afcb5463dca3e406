"""The exchange of standings: what every worker knows of training, told to all others.

Owns what of this worker's state makes its standing, and that all have read the same inputs. The
conclusion is `rejoin`'s. Must not know what becomes of it.
"""

from collections.abc import Mapping, Sequence

import torch

from oobleck.host.data.tokenfile import DataError
from oobleck.planner.ids import WorkerId
from oobleck.worker.recovery.rejoin import Agreement, Held, Standing, agree
from oobleck.worker.state.layerstate import LayerState
from oobleck.worker.state.state import ModelState
from oobleck.worker.step.commit import Progress
from oobleck.worker.transport.transport import Transport

#: 64-bit numbers of a fingerprint (SHA-256) in the exchange of standings.
_FINGERPRINT_WORDS = 4


def exchange(
    progress: Progress,
    state: ModelState,
    inputs: bytes,
    *,
    layer_count: int,
    members: Sequence[WorkerId],
    transport: Transport,
) -> Agreement:
    """Tell `members`, who are in rank order, and hear of them; the same conclusion on all.

    `inputs`: 32 bytes, a fingerprint of all that must be the same on every node. Raises DataError
    where they differ, TransportError when a peer is lost.
    """
    standing = Standing(
        committed=progress.committed,
        reduced=progress.reduced,
        reduced_generation=progress.reduced_generation,
        reduced_layers=progress.reduced_layers,
        voted=progress.voted,
        voted_generation=progress.voted_generation,
        lineage=progress.lineage,
        begun=progress.begun,
        skipped=progress.skipped,
        joined=progress.joined,
        layers=_told(state.layers, layer_count),
        former=_told(state.former, layer_count),
    )
    fingerprint = torch.frombuffer(bytearray(inputs), dtype=torch.int64)
    row = torch.cat([torch.tensor(standing.to_row(), dtype=torch.int64), fingerprint])
    rows = transport.all_gather(row)
    others = [other[-_FINGERPRINT_WORDS:] for other in rows]
    for member, other in zip(members, others, strict=True):
        if not torch.equal(other, others[0]):
            raise DataError(
                f"data: {member.node} and {members[0].node} see different files "
                "under the same paths; give every node the same data (and model.weights)"
            )
    return agree(
        {
            member: Standing.from_row(other[:-_FINGERPRINT_WORDS].tolist())
            for member, other in zip(members, rows, strict=True)
        }
    )


def _told(states: Mapping[int, LayerState], count: int) -> tuple[Held, ...]:
    """Of each of `count` layers what of it there is."""
    return tuple(
        Held(states[layer].version, states[layer].shard.part, states[layer].shard.parts)
        if layer in states
        else Held()
        for layer in range(count)
    )
