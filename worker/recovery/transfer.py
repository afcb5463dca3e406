"""Fetches, sends and drops layers, until a worker holds those of its plan at an agreed step.

Every worker plans the same transfers from the same table of who holds what, and does its own part.
A transfer that broke off leaves no layer. Must not know how the agreement came about.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from oobleck.planner.errors import LayerLost
from oobleck.planner.ids import WorkerId
from oobleck.planner.job.spec import JobSpec
from oobleck.planner.programs.plan import Plan
from oobleck.planner.programs.transfer import Transfer, plan_transfers
from oobleck.worker.context import WorkerContext
from oobleck.worker.recovery.rejoin import Agreement
from oobleck.worker.runtime.errors import LayersGone
from oobleck.worker.state.layout import layer_sizes
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
        transfers = _plan_transfers(context.job, agreement, plan)
    received = _carry_out(context, transfers, members, transport, probe)
    if step > 0:
        for shard in needed:
            state.complete(shard.layer)
    probe("after:transfer")
    return received


def _carry_out(
    context: WorkerContext,
    transfers: Iterable[Transfer],
    members: Sequence[WorkerId],
    transport: Transport,
    probe: Callable[..., None],
) -> int:
    """Send and receive; returns the bytes received."""
    state, worker = context.state, context.worker
    rank = {member: index for index, member in enumerate(members)}
    pending: list[Pending] = []
    received: list[tuple[Transfer, torch.Tensor]] = []
    sent = 0
    for transfer in transfers:
        piece = transfer.layer, transfer.start, transfer.stop
        if transfer.source == worker:
            probe("sending", microbatch=sent)
            sent += 1
            peer = rank[transfer.destination]
            pending.append(transport.send(state.read(*piece), peer, transfer.layer))
        elif transfer.destination == worker:
            probe("receiving", microbatch=len(received))
            room = state.room(*piece)
            received.append((transfer, room))
            pending.append(transport.receive(room, rank[transfer.source], transfer.layer))
    for operation in pending:
        operation.wait()
    for transfer, room in received:
        state.write(transfer.layer, transfer.start, transfer.stop, room)
    transport.complete()
    return sum(room.nbytes for _, room in received)


def _plan_transfers(job: JobSpec, agreement: Agreement, plan: Plan) -> tuple[Transfer, ...]:
    try:
        return plan_transfers(
            agreement.held,
            plan,
            state_bytes=layer_sizes(job.model, job.training.optimizer.no_decay),
        )
    except LayerLost as lost:
        raise LayersGone(f"at step {agreement.step} {lost}") from lost
