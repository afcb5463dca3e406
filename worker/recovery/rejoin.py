"""Agreement of a new generation's workers on the step to resume from, and transfer of layers.

The agreement is pure. Each worker announces its `RecoveryState`. From the same table every worker
computes the same `Agreement`: the step to resume from, the workers that must still apply that step,
and the workers whose layers count.

A step is committed once any worker holds the result of its vote. The vote completes for a worker
only after every worker has contributed, and each contributes only with every reduced gradient in
hand. So if any worker has committed step s, those behind hold the reduced gradients of s and roll
forward. If no survivor has, no live worker has changed a weight, and step s is repeated.

A worker that was away may return with s committed in an earlier generation. The agreement that the
others reached without it holds, with two exceptions: all of them can still roll forward; or they
have lost a layer since, and the workers with s have all layers.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

import torch

from oobleck.core.ids import Generation, WorkerId
from oobleck.core.job.spec import JobSpec
from oobleck.core.plan import Plan
from oobleck.core.routes import LayerLost, Shard, ShardTable, require_holders
from oobleck.planner.programs.transfer import Transfer, plan_transfers
from oobleck.worker.context import WorkerContext
from oobleck.worker.runtime.errors import InvariantViolation, LayersGone
from oobleck.worker.state.layout import Numbers, layer_sizes
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.state.progress import Missed, Position
from oobleck.worker.transport.transport import Pending, Transport


@dataclass(frozen=True, slots=True)
class Held:
    """Version of a layer, or of a share of it, on one worker."""

    version: int
    part: int = 0
    parts: int = 1


@dataclass(slots=True, kw_only=True)
class RecoveryState(Position):
    """State of one worker as it enters a new generation."""

    #: Layers of the whole model.
    layer_count: int
    #: Layers that it holds, and shares replaced by others since the last commit. `reduced` does not
    #: cover gradients of the latter.
    layers: Mapping[int, Held]
    former: Mapping[int, Held]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreement that every worker computes from the states of all."""

    #: Lineage of the workers whose state counts.
    lineage: int
    #: Newest committed step; training resumes with the next one.
    step: int
    #: Workers that apply `step` now, from the reduced gradients that they hold.
    roll_forward: frozenset[WorkerId]
    #: Worker that broadcasts the result of `step`'s vote; None if nobody needs it.
    vote_holder: WorkerId | None
    #: Generation of that vote; 0: unknown.
    voted_generation: Generation
    #: Shards of each worker at version `step`, after the roll-forward.
    held: ShardTable
    #: Consecutive skipped steps up to `step`, as far as workers that committed it know.
    skipped: int
    #: Number of steps that left out each parameter (see `Omissions`), and the last step counted:
    #: `step`, or the previous one if no worker has applied `step` yet.
    missed: Missed
    missed_step: int
    #: Workers that have begun the step after `step`, which is repeated; they may have parts of it.
    begun: frozenset[WorkerId]


def agree(states: Mapping[WorkerId, RecoveryState]) -> Agreement:
    """Compute the agreement; it is equal on every worker because the table is.

    Workers with one state object are represented by the first of them, so the cost depends on the
    number of distinct states.
    """
    first: dict[int, WorkerId] = {}
    for worker in sorted(states):
        first.setdefault(id(states[worker]), worker)
    found = _agree({worker: states[worker] for worker in first.values()})
    if len(first) == len(states):
        return found
    stands_in = {worker: first[id(state)] for worker, state in states.items()}
    return replace(
        found,
        roll_forward=frozenset(w for w, other in stands_in.items() if other in found.roll_forward),
        held={worker: found.held[other] for worker, other in stands_in.items()},
        begun=frozenset(w for w, other in stands_in.items() if other in found.begun),
    )


def _agree(states: Mapping[WorkerId, RecoveryState]) -> Agreement:
    # After the others went back to a checkpoint, state from before it is useless.
    lineage = max(state.lineage for state in states.values())
    members, states = states, {w: s for w, s in states.items() if s.lineage == lineage}
    layer_count = max(state.layer_count for state in states.values())
    while outrun := _outrun(states):
        without, alone = _without_newest(states, outrun), _followers(states, outrun)
        whole = [is_whole(_held(some), layer_count) for some in (alone, without)]
        states = alone if whole == [True, False] else without
    step = _newest(states)
    holders = sorted(w for w, s in states.items() if s.voted == step and step > 0)
    generations = {states[w].voted_generation for w in holders}
    if len(generations) > 1:
        raise InvariantViolation(f"step {step} was voted on in generations {sorted(generations)}")
    held = _held(states)
    applied = max(s.committed for s in states.values())
    roll_forward = frozenset(worker for worker in held if states[worker].committed < step)
    return Agreement(
        lineage=lineage,
        step=step,
        roll_forward=roll_forward,
        vote_holder=holders[0] if holders and roll_forward else None,
        voted_generation=max(generations, default=Generation(0)),
        held={worker: held.get(worker, frozenset()) for worker in members},
        skipped=max((s.skipped for s in states.values() if s.committed == step), default=0),
        missed=next(s.missed for _, s in sorted(states.items()) if s.committed == applied),
        missed_step=applied,
        begun=frozenset(w for w, state in states.items() if state.begun == step + 1),
    )


def _held(states: Mapping[WorkerId, RecoveryState]) -> dict[WorkerId, frozenset[Shard]]:
    """Return the shards that workers hold at the newest step, or roll forward to.

    A worker that is missing in the result was left behind by an older generation; its layers are
    useless.
    """
    step = _newest(states)
    votes = {s.voted_generation for s in states.values() if s.voted == step and step > 0}
    held: dict[WorkerId, frozenset[Shard]] = {}
    for worker, state in states.items():
        if state.committed == step:
            held[worker] = _at(step, state.layers) | _at(step, state.former)
        elif any(_rolls_forward(state, step, generation) for generation in votes):
            held[worker] = frozenset(
                shard
                for shard in _at(step - 1, state.layers)
                if shard.layer in state.reduced_layers
            )
    return held


def is_whole(held: ShardTable, layer_count: int) -> bool:
    """Return whether each layer of the model has a holder."""
    try:
        require_holders(held, layer_count)
    except LayerLost:
        return False
    return True


def _newest(states: Mapping[WorkerId, RecoveryState]) -> int:
    """Return the newest committed step.

    A worker that has the result of a vote counts as having committed the step: it can apply it
    alone.
    """
    return max(max(s.committed, s.voted) for s in states.values())


def _newest_vote(step: int, states: Iterable[RecoveryState]) -> int:
    """Return the newest generation in which one of them voted on the step; 0 if none did."""
    return max((state.voted_generation for state in states if state.voted == step), default=0)


def _outrun(states: Mapping[WorkerId, RecoveryState]) -> frozenset[WorkerId]:
    """Return the workers whose newest step is outdated: others have begun it again without them.

    Those others lack the gradients to follow, or have committed the step in another vote.
    """
    step = _newest(states)
    ahead = {w: s for w, s in states.items() if max(s.committed, s.voted) == step}
    joined = max(s.joined for s in ahead.values())
    voted = _newest_vote(step, ahead.values())
    if any(s.joined > joined and not _follows(s, step, voted) for s in states.values()):
        return frozenset(ahead)
    return frozenset(
        w for w, s in ahead.items() if s.voted == step and max(s.voted_generation, s.joined) < voted
    )


def _follows(state: RecoveryState, step: int, generation: int) -> bool:
    """Return whether the worker has applied, or can apply, the step voted on in `generation`."""
    return max(state.committed, state.voted) >= step or _rolls_forward(state, step, generation)


def _rolls_forward(state: RecoveryState, step: int, generation: int) -> bool:
    of = (state.committed, state.reduced, state.reduced_generation)
    return of == (step - 1, step, generation)


def _followers(
    states: Mapping[WorkerId, RecoveryState], outrun: Set[WorkerId]
) -> dict[WorkerId, RecoveryState]:
    """Return the workers in `outrun`, and those that can roll forward by its newest vote."""
    step = _newest(states)
    voted = _newest_vote(step, [states[worker] for worker in outrun])
    return {
        worker: state
        for worker, state in states.items()
        if worker in outrun
        or (_rolls_forward(state, step, voted) and _newest_vote(step, [state]) in (0, voted))
    }


def _without_newest(
    states: Mapping[WorkerId, RecoveryState], outrun: Set[WorkerId]
) -> dict[WorkerId, RecoveryState]:
    """Return the states without the last vote of the workers in `outrun`.

    Workers of these that have applied the newest step are left out: none of their state is usable.
    """
    step = _newest(states)
    return {
        worker: replace(state, voted=0, voted_generation=Generation(0))
        if worker in outrun
        else state
        for worker, state in states.items()
        if not (worker in outrun and state.committed == step)
    }


def _at(version: int, layers: Mapping[int, Held]) -> frozenset[Shard]:
    return frozenset(
        Shard(layer, held.part, held.parts)
        for layer, held in layers.items()
        if held.version == version
    )


# ---- Transfer of layers, until a worker holds those of its plan at an agreed step.
#
# Every worker plans the same transfers from the same table of holders, and does its own part. An
# interrupted transfer leaves no layer.
#
# State moves in chunks, so that neither end has a second copy of more than a few of them. All
# workers process the chunks in one order, each only its own: the first chunk of every transfer,
# then the second, so that a worker receives from several at once. Before it begins a chunk, it
# waits until older ones with the same peer have at most `chunk_bytes`.
#
# No deadlock: consider the earliest chunk in the order that a worker waits for. Its other end has
# begun it too, or waits for an earlier one, which contradicts the choice.


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
