"""Agreement of a new generation's workers, before they train, on where each of them stands.

Pure. Each worker tells its `RecoveryState`; from the same table every worker draws the same
`Agreement`: the step from which training goes on, the workers that must still apply that step, and
the workers whose layers count.

A step is committed once any worker holds the result of its vote. The vote completes for one only
after every worker has put in its share, and it puts it in only with every reduced gradient in hand.
So if any worker has committed step s, those behind hold the reduced gradients of s and roll
forward. If no survivor has, no live worker has changed a weight, and step s is done again.

A worker that was away meanwhile may come back and have committed s in a generation before. The
agreement that the others reached without it holds, except in two cases: all of them can still roll
forward, or they have lost a layer since and those with s have all."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

from oobleck.core.errors import LayerLost
from oobleck.core.ids import Generation, WorkerId
from oobleck.core.routes import Shard, ShardTable, require_holders
from oobleck.worker.runtime.errors import InvariantViolation
from oobleck.worker.state.progress import Position
from oobleck.worker.state.usage import Missed


@dataclass(frozen=True, slots=True)
class Held:
    """A layer, or a share of it, at some version."""

    version: int
    part: int = 0
    parts: int = 1


@dataclass(slots=True, kw_only=True)
class RecoveryState(Position):
    """State of one worker as it arrives in a new generation."""

    #: Of the whole model.
    layer_count: int
    #: What it holds, by layer, and what another share has taken the place of since the last commit,
    #: whose gradients are not those of `reduced`.
    layers: Mapping[int, Held]
    former: Mapping[int, Held]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Conclusions that every worker draws from the states of all."""

    #: That of the workers whose state counts.
    lineage: int
    #: The last committed step; training goes on with the next one.
    step: int
    #: Workers that apply `step` now, from the reduced gradients they hold.
    roll_forward: frozenset[WorkerId]
    #: A worker that can tell the result of `step`'s vote; None when nobody needs it.
    vote_holder: WorkerId | None
    #: The generation of that vote; 0: nobody knows it.
    voted_generation: Generation
    #: What each worker holds at version `step` (after the roll-forward).
    held: ShardTable
    #: Steps in a row up to `step` that were skipped, as far as those know who have committed it.
    skipped: int
    #: Number of steps that left out each parameter (see `usage`), and the last step counted: `step`
    #: or, if nobody has applied that yet, the one before.
    missed: Missed
    missed_step: int
    #: Workers that have begun the step after `step`, which is done again: they may have some of it.
    begun: frozenset[WorkerId]


def agree(states: Mapping[WorkerId, RecoveryState]) -> Agreement:
    """Draw the agreement; the same on every worker because the table is the same.

    Of workers whose states are one object the first stands for the others: however many hold the
    same layers at the same step, they are looked at once.
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
    # Since the others went back to a checkpoint, what a worker has that did not is of no use.
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
    """Return the shards that workers hold at the newest step, including those that must roll
    forward to it. A worker that is missing was left behind by an older generation: its layers are
    worthless."""
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
    """Return the newest committed step. A worker that has seen a vote counts as having committed
    it: it can apply it alone."""
    return max(max(s.committed, s.voted) for s in states.values())


def _newest_vote(step: int, states: Iterable[RecoveryState]) -> int:
    """Return the newest generation in which one of them voted on the step; 0 if none did."""
    return max((state.voted_generation for state in states if state.voted == step), default=0)


def _outrun(states: Mapping[WorkerId, RecoveryState]) -> frozenset[WorkerId]:
    """Return the workers that have committed the newest step, and without which others have begun
    it again since. Those others lack the gradients to follow, or have committed it in another
    vote."""
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
    """Return whether the worker has applied the step that was voted on in `generation`, or can."""
    return max(state.committed, state.voted) >= step or _rolls_forward(state, step, generation)


def _rolls_forward(state: RecoveryState, step: int, generation: int) -> bool:
    of = (state.committed, state.reduced, state.reduced_generation)
    return of == (step - 1, step, generation)


def _followers(
    states: Mapping[WorkerId, RecoveryState], outrun: Set[WorkerId]
) -> dict[WorkerId, RecoveryState]:
    """Return the workers in `outrun`, and those that can roll forward to the newest step by
    `outrun`'s newest vote on it."""
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
    """Return the states without the last vote of the workers in `outrun`. Those of them that have
    applied the newest step are left out: they have nothing left."""
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
