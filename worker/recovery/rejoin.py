"""Agreement of a new generation's workers, before they train, on the step that each resumes from.

Pure. Each worker announces its `RecoveryState`. From the same table every worker computes the same
`Agreement`: the step to resume from, the workers that must still apply that step, and the workers
whose layers count.

A step is committed once any worker holds the result of its vote. The vote completes for a worker
only after every worker has contributed, and each contributes only with every reduced gradient in
hand. So if any worker has committed step s, those behind hold the reduced gradients of s and roll
forward. If no survivor has, no live worker has changed a weight, and step s is repeated.

A worker that was away may return with s committed in an earlier generation. The agreement that the
others reached without it holds, with two exceptions: all of them can still roll forward; or they
have lost a layer since, and the workers with s have all layers.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

from oobleck.core.errors import LayerLost
from oobleck.core.ids import Generation, WorkerId
from oobleck.core.routes import Shard, ShardTable, require_holders
from oobleck.worker.runtime.errors import InvariantViolation
from oobleck.worker.state.progress import Missed, Position


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
    #: Number of steps that left out each parameter (see `usage`), and the last step counted:
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
