"""Transfer of layers, until a worker holds those of its plan at an agreed step.

Every worker plans the same transfers from the same table of holders, and does its own part. An
interrupted transfer leaves no layer. Must not know how the agreement was reached.

State moves in chunks, so that neither end has a second copy of more than a few of them. All workers
process the chunks in one order, each only its own: the first chunk of every transfer, then the
second, so that a worker receives from several at once. Before it begins a chunk, it waits until
older ones with the same peer have at most `chunk_bytes`.

No deadlock: consider the earliest chunk in the order that a worker waits for. Its other end has
begun it too, or waits for an earlier one, which contradicts the choice.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from oobleck.core.errors import LayerLost
from oobleck.core.ids import WorkerId
from oobleck.core.job.spec import JobSpec
from oobleck.core.plan import Plan
from oobleck.planner.programs.transfer import Transfer, plan_transfers
from oobleck.worker.context import WorkerContext
from oobleck.worker.recovery.rejoin import Agreement
from oobleck.worker.runtime.errors import LayersGone
from oobleck.worker.state.layout import Numbers, layer_sizes
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.transport.transport import Pending, Transport


def fetch_layers(
    context: WorkerContext,
    plan: Plan,
    members: Sequence[WorkerId],
    agreement: Agreement,
    transport: Transport,
) -> int:
    """Fetch every layer of the plan at the agreed step; return the bytes received.

    `members`: participants in rank order. Raise TransportError, or LayersGone if a layer has no
    holder.
    """
    step, state, worker = agreement.step, context.state, context.worker
    generation = plan.generation
    probe = partial(context.faults.reached, generation=generation, step=step)
    probe("before:transfer")
    current = agreement.held[worker]
    state.keep_only(current)
    wanted = plan.shards.get(worker, frozenset())
    needed = wanted - {s.shard for s in state.layers.values()}
    transfers: tuple[Transfer, ...] = ()
    for shard in sorted(needed):
        # Initial weights are a function of the seed and the layer; none is fetched.
        if step == 0:
            state.initialise(shard.layer, part=shard.part, parts=shard.parts)
        else:
            state.allocate(shard.layer, version=step, part=shard.part, parts=shard.parts)
            state.write_own(shard.layer)
    if step > 0:
        transfers = transfers_to(context.job, agreement, plan)
    rank = {member: index for index, member in enumerate(members)}
    own = [each for each in transfers if worker in (each.source, each.destination)]
    received = carry_out(own, worker, rank, state, transport, context.chunk_bytes, probe)
    if step > 0:
        for shard in needed:
            state.complete(shard.layer)
    transport.end_moving()
    probe("after:transfer")
    return received


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """Chunk in flight."""

    operation: Pending
    values: torch.Tensor
    #: Called on arrival: copies the chunk to its place.
    arrived: Callable[[], None] | None = None

    def finish(self) -> None:
        self.operation.wait()
        if self.arrived is not None:
            self.arrived()


def carry_out(
    own: Sequence[Transfer],
    worker: WorkerId,
    rank: Mapping[WorkerId, int],
    state: ModelState,
    transport: Transport,
    chunk_bytes: int,
    probe: Callable[..., object],
) -> int:
    """Send and receive the chunks of `worker`, in the common order; return the bytes received.

    Layers to receive are allocated. `probe`: called before each chunk. Raise TransportError.
    """
    under_way: defaultdict[int, deque[_UnderWay]] = defaultdict(deque)
    sent = received = count = 0
    for transfer, numbers in chunks_of(own, state, chunk_bytes):
        layer, sends = transfer.layer, transfer.source == worker
        peer = rank[transfer.destination if sends else transfer.source]
        older = under_way[peer]
        while sum(each.values.nbytes for each in older) > chunk_bytes:
            older.popleft().finish()
        if sends:
            probe("sending", microbatch=sent)
            sent += 1
            values = state.read(layer, numbers)
            older.append(_UnderWay(transport.send(values, peer, layer), values))
        else:
            probe("receiving", microbatch=count)
            count += 1
            room = state.room(layer, numbers)
            received += room.nbytes
            arrived = partial(state.write, layer, numbers, room)
            older.append(_UnderWay(transport.receive(room, peer, layer), room, arrived))
    for each in (each for chunks in under_way.values() for each in chunks):
        each.finish()
    transport.complete()
    return received


def chunks_of(
    transfers: Sequence[Transfer], state: ModelState, most_bytes: int
) -> Iterator[tuple[Transfer, Numbers]]:
    """Yield the numbers that each transfer moves, at most `most_bytes` at a time.

    The first chunks of all transfers come first, then the second ones.
    """
    most = max(1, most_bytes // state.bytes_per_number)
    shares = [state.share(each.layer, each.start, each.stop) for each in transfers]
    largest = max((sum(map(len, numbers)) for numbers in shares), default=0)
    for start in range(0, largest, most):
        for transfer, (tied, own) in zip(transfers, shares, strict=True):
            of_own = range(max(0, start - len(tied)), max(0, start + most - len(tied)))
            chunk = tied[start : start + most], own[of_own.start : of_own.stop]
            if any(chunk):
                yield transfer, chunk


def transfers_to(job: JobSpec, agreement: Agreement, plan: Plan) -> tuple[Transfer, ...]:
    """Return the transfers that the plan needs. Raise LayersGone if a layer has no holder."""
    try:
        return plan_transfers(
            agreement.held,
            plan,
            state_bytes=layer_sizes(job.model, job.training.optimizer.no_decay),
        )
    except LayerLost as lost:
        raise LayersGone(f"at step {agreement.step} {lost}") from lost
