"""Progress of one worker's training. Knows no layers, peers or programs."""

import time
from collections.abc import Container
from dataclasses import dataclass, field

import torch

from oobleck.core.ids import Generation
from oobleck.worker.state.usage import Missed

_NO_GENERATION = Generation(0)


@dataclass(slots=True, kw_only=True)
class Position:
    """Position of one worker in training, as the others are told. Steps count from 1; 0 is the
    start, or none."""

    #: Newest step whose update it has applied to all layers held.
    committed: int = 0
    #: Newest step that it has begun, of which it may have gradients.
    begun: int = 0
    #: Step whose reduced gradients it holds complete, and the generation and layers they are of: it
    #: may hold more layers, left from an earlier generation.
    reduced: int = 0
    reduced_generation: Generation = _NO_GENERATION
    reduced_layers: tuple[int, ...] = ()
    #: Newest step whose vote it has the result of, and the generation of that vote.
    voted: int = 0
    voted_generation: Generation = _NO_GENERATION
    #: Steps in a row up to `committed` that were skipped: their gradients were not finite.
    skipped: int = 0
    #: Number of steps up to `committed` that left out each parameter (see `usage`).
    missed: Missed = field(default_factory=dict)
    #: Newest generation in which all went back to the checkpoint that this state comes of.
    lineage: int = 0
    #: Newest generation in which it agreed with others on a step.
    joined: int = 0
    #: It has had the records of all steps after this one, of evaluations too.
    recorded_from: int = 0


@dataclass(slots=True, kw_only=True)
class TrainingProgress(Position):
    """Position of this worker in all generations, and what only it needs to know of that."""

    #: When `begun` was (monotonic seconds).
    begun_at: float = 0.0
    #: This worker's share of step `begun`: whole losses by micro-batch and parts of losses, each
    #: with its weight, (2,), and digests of token rows by position. Losses stay on the device until
    #: the vote.
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    loss_parts: list[torch.Tensor] = field(default_factory=list)
    row_digests: dict[int, bytes] = field(default_factory=dict)
    #: The vector of the vote on `voted`, for those who have not seen it.
    ballot: torch.Tensor | None = None
    #: Who writes the records beside the generation's checkpoints, by rank.
    recorder: int = 0

    def loss_sum(self) -> tuple[float, float]:
        """Return the sum of all losses and that of their weights, in one read from the device,
        which waits for what it computes."""
        known = [*self.losses.values(), *self.loss_parts]
        loss, weight = torch.stack(known).sum(dim=0).cpu().tolist() if known else (0.0, 0.0)
        return loss, weight

    def restart(self, step: int, lineage: int, missed: Missed, recorded_from: int) -> None:
        """Restart at a checkpoint's step: all layers held are the checkpoint's, and what is known
        of other steps is void."""
        self.committed, self.begun, self.reduced, self.voted = step, 0, 0, 0
        self.reduced_generation = self.voted_generation = _NO_GENERATION
        self.ballot = None
        self.losses.clear()
        self.row_digests.clear()
        self.skipped, self.lineage, self.joined = 0, lineage, lineage
        self.missed = missed
        self.recorded_from, self.recorder = recorded_from, 0

    def join(self, step: int, lineage: int, skipped: int, missed: Missed, generation: int) -> None:
        """Go on from the agreed `step`. `skipped`: steps in a row up to it that others know as
        skipped; `missed`: as of `step`."""
        stands_there = (self.committed, self.lineage) == (step, lineage)
        self.skipped = max(skipped, self.skipped if stands_there else 0)
        if self.committed < step:
            self.recorded_from = step
        self.committed, self.lineage, self.joined = step, lineage, generation
        self.missed = missed
        if self.voted > step:  # the others did not know of that vote, and hold another one
            self.voted, self.voted_generation, self.ballot = 0, _NO_GENERATION, None

    def learn(self, step: int, generation: Generation, ballot: torch.Tensor) -> None:
        """Learn the `ballot` of the vote on `step` that was held in `generation`."""
        self.voted, self.voted_generation, self.ballot = step, generation, ballot

    def discard(self) -> None:
        """Discard what this worker has computed of the step that it has begun."""
        self.begun = self.committed

    def begin(
        self, step: int, *, losses: Container[int] = (), positions: Container[int] = ()
    ) -> None:
        """Begin `step`. Of what is known of an earlier attempt at it, this worker answers for the
        losses of the micro-batches `losses` and the digests of the rows at `positions`."""
        self.begun, self.begun_at = step, time.monotonic()
        self.reduced = 0
        self.loss_parts = []
        self.losses = {m: loss for m, loss in self.losses.items() if m in losses}
        self.row_digests = {p: digest for p, digest in self.row_digests.items() if p in positions}
