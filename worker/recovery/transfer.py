"""Fetches, sends and drops layers, until a worker holds those of its plan at an agreed step.

Every worker plans the same transfers from the same table of who holds what, and does its own part.
A transfer that broke off leaves no layer. Must not know how the agreement came about.

State goes in chunks, so neither end has a second copy of more than some of them. All workers go
over all chunks in one order, each over its own: the first of every transfer, then the second, so
that a worker receives from several at once. Before it begins one it waits for older ones with the
same peer while these have more than so many bytes. Nobody waits for ever: take the earliest chunk
in the order that somebody waits for. Its other end has begun it too, or waits for one that is
earlier still, which it is not.
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
    """Come to hold every layer of the plan at the agreed step; returns the bytes received.
    `members`: who takes part, in rank order. Raises TransportError, and LayersGone when nobody
    holds a layer."""
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
        # Initial weights are a function of the seed and the layer: nothing to fetch.
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
    """A chunk that was begun."""

    operation: Pending
    values: torch.Tensor
    #: Once it is there: puts it where it belongs.
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
    """Send and receive what `worker` takes part in, in the order that all have; returns the bytes
    received. Layers that come are allocated. `probe`: called before each chunk. Raises
    TransportError."""
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
    """Yield the numbers that each transfer moves, at most `most_bytes` at a time: the first chunks
    of all, then the second."""
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
    """Return the transfers that the plan needs. Raises LayersGone when no worker holds a layer."""
    try:
        return plan_transfers(
            agreement.held,
            plan,
            state_bytes=layer_sizes(job.model, job.training.optimizer.no_decay),
        )
    except LayerLost as lost:
        raise LayersGone(f"at step {agreement.step} {lost}") from lost
