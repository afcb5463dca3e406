"""Recovery of a worker to the agreed state, once the members of a generation are connected.

All announce their recovery states as they meet, and compute the same agreement (`rejoin`). Then a
worker applies a step that others have committed, determines which parts of the interrupted step
count, and fetches the layers that it lacks (`rejoin`). If no worker has a layer, all go back to a
checkpoint (`restore`). Must not know how training continues.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from oobleck.core.codec import decode, encode
from oobleck.core.ids import Generation, WorkerId
from oobleck.core.messages import Assign, Committed, Evaluated, Handed, PhaseReached, Restored
from oobleck.core.plan import Plan
from oobleck.core.routes import Shard
from oobleck.host.token_file import DataError
from oobleck.worker.checkpoint.restore import restore
from oobleck.worker.context import WorkerContext
from oobleck.worker.membership import handover_members
from oobleck.worker.recovery.rejoin import (
    Agreement,
    Held,
    RecoveryState,
    agree,
    fetch_layers,
    is_whole,
    transfers_to,
)
from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.errors import LayersGone, TransportError
from oobleck.worker.runtime.records import Records
from oobleck.worker.state.layer_state import LayerState
from oobleck.worker.state.layout import layer_sizes
from oobleck.worker.state.progress import Missed, Omissions, Position, parameters_of
from oobleck.worker.step import vote
from oobleck.worker.step.salvage import NO_ATTEMPT, Attempt, Contribution, Salvage, plan_salvage
from oobleck.worker.step.vote import commit, make_record
from oobleck.worker.transport.connect import Moving
from oobleck.worker.transport.transport import Transport
from oobleck.worker.transport.tree import joined, parts

log = logging.getLogger(__name__)

#: Most records in one message to the agent.
_HANDED_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Standing:
    """Inputs and recovery state that a worker announces at a meeting.

    Separate from its `Attempt`, because many workers announce the same.
    """

    #: Fingerprint, in hexadecimal, of the data and the initial weights that it reads.
    inputs: str
    state: RecoveryState


@dataclass(frozen=True, slots=True)
class Announcements:
    """States and attempts announced by all members. Equal states are one object."""

    states: Mapping[WorkerId, RecoveryState]
    #: Encoded `Attempt`s.
    attempts: Mapping[WorkerId, bytes]


class Recovery:
    """Recovery of one worker: its part in every agreement on the step to resume from."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._worker = context.worker
        self._job = context.job
        self._state = context.state
        self._progress = context.progress
        self._control = context.control

    def standing(self, plan: Plan) -> bytes:
        """Return this worker's announcement for the meeting; it must hold until all have agreed."""
        self._state.drop_partial()
        inputs, state = self._context.inputs.hex(), self._recovery_state(plan.layer_count)
        return joined([encode(Standing(inputs, state)), encode(self._attempt(plan))])

    def run(
        self,
        assign: Assign,
        transport: Transport,
        standings: Sequence[bytes],
        *,
        received: int = 0,
        fed: int = 0,
    ) -> Salvage | None:
        """Agree on the step to resume from, move to it, and fetch missing layers.

        Return the usable parts of the next step. `standings`: announcements of all, by rank.
        `received`: bytes received in advance, of which `fed` arrived while training went on.

        Raise TransportError if a peer is lost, and DataError if nodes read different data. Raise
        JobError or NodeError if no checkpoint is usable as the plan requires. Raise LayersGone if a
        layer has no holder and there is no checkpoint.
        """
        plan, progress = assign.plan, self._progress
        self._context.faults.reached(
            "before:agree", generation=plan.generation, step=progress.committed
        )
        with self._context.timeline.phase("agree"):
            announced = read_standings(plan.workers, standings)
            agreement = agree(announced.states)
            begins = [announced.states[worker].recorded_from for worker in plan.workers]
            progress.recorder = begins.index(min(begins))
        if self._restore(assign, agreement, transport):
            return None
        rolled_forward = self._worker in agreement.roll_forward
        ballot: torch.Tensor | None = None
        if agreement.vote_holder is not None:
            with self._context.timeline.phase("roll forward"):
                ballot = self._learn_vote(plan.workers, agreement, transport)
        with self._context.timeline.phase("salvage"):
            salvage = self._salvage(plan, agreement, announced)
        self._control.report(
            PhaseReached(
                generation=plan.generation,
                phase="joined",
                committed_step=agreement.step,
                rolled_forward=rolled_forward,
                redo=progress.begun == agreement.step + 1,
                salvaged_microbatches=0 if salvage is None else salvage.microbatches,
            )
        )
        with self._context.timeline.phase("transfer"):
            received += fetch_layers(self._context, plan, plan.workers, agreement, transport)
        self._join(agreement, plan.generation, ballot)
        self._control.report(
            PhaseReached(
                generation=plan.generation,
                phase="transferred",
                received_bytes=received,
                fed_bytes=fed,
            )
        )
        return salvage

    def moving(self, plan: Plan, standings: Sequence[bytes]) -> Moving:
        """Return the state that moves after the plan's workers have met, from all announcements.

        If these are wrong, no state moves, and `run` raises the error.
        """
        try:
            agreement = agree(read_standings(plan.workers, standings).states)
            transfers = transfers_to(self._job, agreement, plan) if agreement.step > 0 else ()
        except (DataError, TransportError, LayersGone):
            transfers = ()
        width = self._state.bytes_per_number
        sizes = layer_sizes(self._job.model, self._job.training.optimizer.no_decay)
        return Moving(plan.workers, transfers, [size * width for size in sizes])

    def hand_over(self, assign: Assign, transport: Transport, standings: Sequence[bytes]) -> int:
        """Fetch the plan's layers, also from workers that leave; return the bytes received.

        Layers that none of them holds are left to the plan's own meeting. Raise what `run` raises.
        """
        plan, members = assign.plan, handover_members(assign)
        agreement = agree(read_standings(members, standings).states)
        if not is_whole(agreement.held, plan.layer_count):
            return 0
        ballot: torch.Tensor | None = None
        if agreement.vote_holder is not None:
            ballot = self._learn_vote(members, agreement, transport)
        received = fetch_layers(self._context, plan, members, agreement, transport)
        self._join(agreement, plan.generation, ballot)
        self.tell_received(plan, received)
        # Workers that leave may end now: all state has arrived.
        transport.all_gather(torch.zeros(1))
        return received

    def tell_received(self, plan: Plan, count: int) -> None:
        """Report to the master that this worker holds layers, if `count` bytes have arrived.

        Their senders may be gone before all have met in the plan.
        """
        held = {state.shard for state in self._state.layers.values()}
        layers = tuple(sorted(s.layer for s in held & plan.shards.get(self._worker, frozenset())))
        if count > 0 and layers:
            self._control.report(
                PhaseReached(generation=plan.generation, phase="received", layers=layers)
            )

    def _join(
        self, agreement: Agreement, generation: Generation, ballot: torch.Tensor | None
    ) -> None:
        """Move to the agreed step, and record its vote if there is one (`ballot`).

        Others may have to roll forward to the step, so whoever has committed it must know the vote.
        """
        missed = agreement.missed
        if ballot is not None and agreement.missed_step < agreement.step:
            used = vote.count(ballot, self._job.training, workers=1).used
            unused = parameters_of(self._job).unused(used)
            missed = Omissions(unused=unused, missed=missed).after()
        self._context.records.go_back(agreement.step)
        self._progress.join(
            agreement.step, agreement.lineage, agreement.skipped, missed, generation
        )
        if ballot is not None:
            self._progress.learn(agreement.step, agreement.voted_generation, ballot)

    def _restore(self, assign: Assign, agreement: Agreement, transport: Transport) -> bool:
        """Resume from a checkpoint if state is missing, or begin anew; return whether it was done.

        Training begins anew if there is no checkpoint and the master knows of none.
        """
        spec = self._job.checkpoint
        if spec is None and not assign.anew:
            return False
        fresh = agreement.step == 0 and not any(agreement.held.values())
        lost = agreement.step > 0 and not is_whole(agreement.held, assign.plan.layer_count)
        if not (assign.restore or fresh or lost):
            return False
        restored: Restored | None = None
        missed: Missed = {}
        records: Records | None = None
        if spec is not None:
            with self._context.timeline.phase("restore"), pulse.FILES:
                restored, missed, records = restore(
                    self._context,
                    spec,
                    assign,
                    transport,
                    resume=fresh and not assign.restore,
                    needed=assign.restore and not assign.anew,
                )
        if restored is None and assign.anew:
            restored = self._begin_anew(assign.plan)
        if restored is None:
            return False
        generation, step = restored.generation, restored.step
        self._context.records.go_back(step, records or Records())
        self._progress.restart(step, generation, missed, 0 if records is not None else step)
        log.info("restored", extra={"step": step, "path": restored.path})
        for message in (
            restored,
            *_handed(generation, records or Records()),
            PhaseReached(generation=generation, phase="joined", committed_step=step),
            PhaseReached(generation=generation, phase="transferred"),
        ):
            self._control.report(message)
        return True

    def _begin_anew(self, plan: Plan) -> Restored:
        """Initialise the plan's layers, as before the first step."""
        self._state.keep_only(())
        for shard in sorted(plan.shards[self._worker]):
            self._state.initialise(shard.layer, part=shard.part, parts=shard.parts)
        return Restored(generation=plan.generation, step=0, path="")

    def _recovery_state(self, layer_count: int) -> RecoveryState:
        position = {part.name: getattr(self._progress, part.name) for part in fields(Position)}
        return RecoveryState(
            **position,
            layer_count=layer_count,
            layers=_held(self._state.layers),
            former=_held(self._state.former),
        )

    def _attempt(self, plan: Plan) -> Attempt:
        """Return this worker's results of a step that it has begun but not committed."""
        progress = self._progress
        wanted = plan.shards.get(self._worker)
        if progress.begun <= progress.committed or wanted is None:
            return NO_ATTEMPT
        layers, size = self._state.layers.items(), self._job.training.microbatch
        # It may have had only some rows of a micro-batch.
        counts = Counter(position // size for position in progress.row_digests)
        return Attempt.of(
            added={layer: state.added for layer, state in layers if state.shard in wanted},
            losses=progress.losses,
            digests=[m for m, count in counts.items() if count == size],
            microbatches=self._job.training.microbatches,
        )

    def _salvage(
        self, plan: Plan, agreement: Agreement, announced: Announcements
    ) -> Salvage | None:
        """Return the usable results of the interrupted step; None if there are none."""
        if not agreement.begun:
            return None
        layers, microbatches = plan.layer_count, self._job.training.microbatches
        contributions = dict.fromkeys(plan.workers, Contribution.nothing(layers, microbatches))
        for member in agreement.begun:
            wanted = plan.shards[member] & agreement.held[member]
            counting = {
                layer
                for layer, held in announced.states[member].layers.items()
                if Shard(layer, held.part, held.parts) in wanted
            }
            try:
                attempt = decode(Attempt, announced.attempts[member])
                contributions[member] = Contribution.of(attempt, counting, layers, microbatches)
            except ValueError as error:
                raise TransportError(f"invalid attempt from {member}: {error}") from error
        salvage = plan_salvage(contributions, plan)
        if not any(salvage.counted.values()):
            return None
        log.info("salvaged", extra={"step": agreement.step + 1, "count": salvage.microbatches})
        return salvage

    def _learn_vote(
        self,
        members: Sequence[WorkerId],
        agreement: Agreement,
        transport: Transport,
    ) -> torch.Tensor:
        """Broadcast the vote on the newest committed step, and apply that step if still due.

        Return the vote.
        """
        assert agreement.vote_holder is not None, "only called when someone holds the vote"
        progress = self._progress
        root = members.index(agreement.vote_holder)
        if self._worker == agreement.vote_holder:
            assert progress.ballot is not None, "a voted step keeps its ballot"
            vector = progress.ballot
        else:
            count = len(parameters_of(self._job).keys)
            length = vote.ballot_length(self._job.training.global_batch, count)
            vector = torch.zeros(length, dtype=torch.float64)
        transport.broadcast(vector, root)
        if self._worker not in agreement.roll_forward:
            return vector
        # The number of workers matters only for a switch that this vote may announce, and a newer
        # plan has replaced that switch.
        result = vote.count(vector, self._job.training, workers=1)
        progress.learn(agreement.step, agreement.voted_generation, vector)
        commit(self._state, self._job, progress, result, agreement.step)
        log.info("rolled forward", extra={"step": agreement.step})
        # Record the generation that voted. A record of the new one would mean that its transfers
        # are done.
        record = make_record(self._job, progress.voted_generation, progress, result)
        self._context.records.add(record)
        self._control.report(Committed(record=record))
        return vector


def _handed(generation: Generation, records: Records) -> Iterator[Handed | Evaluated]:
    """Yield the records of a checkpoint, as reports to the agent."""
    for first in range(0, len(records.steps), _HANDED_AT_ONCE):
        some = records.steps[first : first + _HANDED_AT_ONCE]
        yield Handed(generation=generation, records=some)
    for evaluation in records.evaluations:
        yield Evaluated(record=evaluation, restored_in=generation)


def read_standings(members: Sequence[WorkerId], standings: Sequence[bytes]) -> Announcements:
    """Decode the standings of `members`; both are in rank order.

    Raise DataError if members read different inputs, TransportError if a standing is invalid.
    """
    known: dict[bytes, Standing] = {}
    states: dict[WorkerId, RecoveryState] = {}
    attempts: dict[WorkerId, bytes] = {}
    first: Standing | None = None
    for member, word in zip(members, standings, strict=True):
        text, attempts[member] = parts(word, 2)
        if (standing := known.get(text)) is None:
            try:
                standing = known[text] = decode(Standing, text)
            except ValueError as error:
                raise TransportError(f"invalid standing from {member}: {error}") from error
        first = first or standing
        if standing.inputs != first.inputs:
            raise DataError(
                f"data: {member.node} and {members[0].node} see different files "
                "under the same paths; give every node the same data (and model.weights)"
            )
        states[member] = standing.state
    return Announcements(states, attempts)


def _held(states: Mapping[int, LayerState]) -> dict[int, Held]:
    return {
        layer: Held(state.version, state.shard.part, state.shard.parts)
        for layer, state in sorted(states.items())
    }
