"""Progress of one worker's training. Knows no layers, peers or programs.

Also owns which parameters had a gradient in which steps.
"""

import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain

import torch

from oobleck.core.ids import Generation
from oobleck.core.job.model import AnyModel, OwnModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.worker.state.layout import layout

# ---- Parameters that a step's update leaves out because, as in torch, they have no gradient.
#
# A parameter is used in a step if any micro-batch gave it a gradient, on any worker, in any of
# the layers that share it. The vote on the step lists the used ones, so every worker that commits
# the step knows them. The number of steps that left out each parameter is training state, because
# optimizers count the updates of each. Only a user's model can leave one out.


#: Number of committed steps that left a parameter out, by key; parameters never left out are
#: absent.
Missed = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Omissions:
    """Parameters that an update leaves out, and the counts of earlier omissions."""

    unused: frozenset[str] = frozenset()
    #: Counts before this update.
    missed: Missed = field(default_factory=dict)

    def after(self) -> Missed:
        """Return the counts after the update."""
        if not self.unused:
            return self.missed
        counted = {key: self.missed.get(key, 0) + 1 for key in self.unused}
        return dict(sorted({**self.missed, **counted}.items()))

    def of(self, key: str) -> tuple[bool, int]:
        """Return whether the update leaves the parameter out, and how many earlier ones did."""
        return key in self.unused, self.missed.get(key, 0)


NO_OMISSIONS = Omissions()


@dataclass(frozen=True, slots=True)
class Parameters:
    """Keys of a model's parameters: `LAYER.NAME`; a shared one is named after its first layer."""

    #: Keys of each layer, in its layout's order.
    by_layer: tuple[tuple[str, ...], ...]
    #: All keys once, in the order of votes.
    keys: tuple[str, ...]

    def unused(self, used: Iterable[bool]) -> frozenset[str]:
        """Return the keys that are not `used`, given in the order of `keys`."""
        return frozenset(key for key, one in zip(self.keys, used, strict=True) if not one)


def parameters_of(job: JobSpec) -> Parameters:
    """Return the parameters that a step of `job` may leave out; a built-in model has none."""
    return _parameters(job.model, job.training.optimizer.no_decay)


@lru_cache(maxsize=4)
def _parameters(model: AnyModel, no_decay: tuple[str, ...]) -> Parameters:
    if not isinstance(model, OwnModelSpec):
        return Parameters(((),) * model.layer_count, ())
    by_layer = []
    for layer in range(model.layer_count):
        shared = model.description.shared(layer)
        names = [
            span.name.removeprefix("module.") for span in layout(model, layer, no_decay).parameters
        ]
        places = [shared.get(name, (layer, name)) for name in names]
        by_layer.append(tuple(f"{first}.{name}" for first, name in places))
    return Parameters(tuple(by_layer), tuple(dict.fromkeys(chain.from_iterable(by_layer))))


_NO_GENERATION = Generation(0)


@dataclass(slots=True, kw_only=True)
class Position:
    """Position of one worker in training, as announced to the others.

    Steps count from 1; 0 is the start, or none.
    """

    #: Newest step whose update it has applied to all held layers.
    committed: int = 0
    #: Newest step that it has begun; it may have gradients of it.
    begun: int = 0
    #: Step of which it holds all reduced gradients, with their generation and layers. It may hold
    #: more layers, left from an earlier generation.
    reduced: int = 0
    reduced_generation: Generation = _NO_GENERATION
    reduced_layers: tuple[int, ...] = ()
    #: Newest step whose vote it has the result of, and the generation of that vote.
    voted: int = 0
    voted_generation: Generation = _NO_GENERATION
    #: Consecutive skipped steps up to `committed`: their gradients were not finite.
    skipped: int = 0
    #: Number of steps up to `committed` that left out each parameter (see `Omissions`).
    missed: Missed = field(default_factory=dict)
    #: Newest generation in which all went back to the checkpoint that this state stems from.
    lineage: int = 0
    #: Newest generation in which it agreed with others on a step.
    joined: int = 0
    #: It has the records of all steps after this one, including evaluations.
    recorded_from: int = 0


@dataclass(slots=True, kw_only=True)
class TrainingProgress(Position):
    """Position of this worker over all generations, and data that only the worker itself needs."""

    #: Time at which `begun` was (monotonic seconds).
    begun_at: float = 0.0
    #: This worker's share of step `begun`. Whole losses by micro-batch and parts of losses each
    #: have a weight, (2,), and stay on the device until the vote. Digests of token rows are by
    #: position.
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    loss_parts: list[torch.Tensor] = field(default_factory=list)
    row_digests: dict[int, bytes] = field(default_factory=dict)
    #: Vector of the vote on `voted`, for workers that have not seen it.
    ballot: torch.Tensor | None = None
    #: Rank of the worker that writes the records beside the generation's checkpoints.
    recorder: int = 0

    def loss_sum(self) -> tuple[float, float]:
        """Return the sum of all losses and that of their weights.

        It reads the device once, and waits for its work.
        """
        known = [*self.losses.values(), *self.loss_parts]
        loss, weight = torch.stack(known).sum(dim=0).cpu().tolist() if known else (0.0, 0.0)
        return loss, weight

    def restart(self, step: int, lineage: int, missed: Missed, recorded_from: int) -> None:
        """Restart at a checkpoint's step: all held layers are the checkpoint's.

        Knowledge of other steps becomes void.
        """
        self.committed, self.begun, self.reduced, self.voted = step, 0, 0, 0
        self.reduced_generation = self.voted_generation = _NO_GENERATION
        self.ballot = None
        self.losses.clear()
        self.row_digests.clear()
        self.skipped, self.lineage, self.joined = 0, lineage, lineage
        self.missed = missed
        self.recorded_from, self.recorder = recorded_from, 0

    def join(self, step: int, lineage: int, skipped: int, missed: Missed, generation: int) -> None:
        """Resume from the agreed `step`.

        `skipped`: consecutive skipped steps up to it, as others know. `missed`: counts as of
        `step`.
        """
        is_there = (self.committed, self.lineage) == (step, lineage)
        self.skipped = max(skipped, self.skipped if is_there else 0)
        if self.committed < step:
            self.recorded_from = step
        self.committed, self.lineage, self.joined = step, lineage, generation
        self.missed = missed
        if self.voted > step:  # the others do not know that vote, and hold another one
            self.voted, self.voted_generation, self.ballot = 0, _NO_GENERATION, None

    def learn(self, step: int, generation: Generation, ballot: torch.Tensor) -> None:
        """Learn the `ballot` of the vote on `step` that was held in `generation`."""
        self.voted, self.voted_generation, self.ballot = step, generation, ballot

    def discard(self) -> None:
        """Discard this worker's results of the step that it has begun."""
        self.begun = self.committed

    def begin(
        self, step: int, *, losses: Container[int] = (), positions: Container[int] = ()
    ) -> None:
        """Begin `step`.

        The worker keeps these results of an earlier attempt: losses of the micro-batches `losses`,
        and digests of the rows at `positions`.
        """
        self.begun, self.begun_at = step, time.monotonic()
        self.reduced = 0
        self.loss_parts = []
        self.losses = {m: loss for m, loss in self.losses.items() if m in losses}
        self.row_digests = {p: digest for p, digest in self.row_digests.items() if p in positions}
