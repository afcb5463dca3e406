"""What one worker does in a step: its program, and what of the step is there already.

The step is a whole one, or the rest of one that was cut off. Computes and sends nothing itself.
"""

from collections.abc import Container, Mapping

from oobleck.planner.ids import WorkerId
from oobleck.planner.programs.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    LoadTokens,
    Program,
)
from oobleck.worker.step.mailbox import Mailbox
from oobleck.worker.step.salvage import Salvage
from oobleck.worker.step.stage import EVERY_LAYER


class StepPlan:
    """One worker's part in a step."""

    def __init__(
        self,
        worker: WorkerId,
        layers: range,
        program: Program,
        mailbox: Mailbox,
        salvage: Salvage | None = None,
    ) -> None:
        """`layers`: that the worker holds; `salvage`: where it is the rest of a step."""
        self.program = program
        self.mailbox = mailbox
        #: Micro-batches whose tokens are needed, in this order.
        self.loads = [step.microbatch for step in program if isinstance(step, LoadTokens)]
        backwards = [s.microbatch for s in program if isinstance(s, Backward | BackwardInput)]
        #: The micro-batch whose backward is the last one; None: there is none.
        self.last = backwards[-1] if backwards else None
        #: Micro-batches whose backward comes in two parts.
        self.split = frozenset(s.microbatch for s in program if isinstance(s, BackwardWeight))
        self._worker = worker
        self._layers = layers
        self._salvage = salvage
        #: How many micro-batches each layer's gradient gets.
        self.due = dict.fromkeys(layers, 0)
        for step in program:
            if isinstance(step, Backward | BackwardInput):
                adding = self.adding(step.microbatch)
                for layer in layers:
                    self.due[layer] += layer in adding

    def adding(self, microbatch: int) -> Container[int]:
        """The layers whose gradients are to get it."""
        if self._salvage is None:
            return EVERY_LAYER
        return self._salvage.adding(microbatch, self._layers)

    def lowest(self, microbatch: int) -> int:
        """The lowest layer of the model that needs its backward."""
        return 0 if self._salvage is None else self._salvage.work.lowest[microbatch]

    @property
    def counted(self) -> frozenset[int]:
        """Layers whose gradients have a part of the step already."""
        return frozenset() if self._salvage is None else self._salvage.counted[self._worker]

    @property
    def losses(self) -> frozenset[int]:
        """Micro-batches that are not done again, whose loss this worker answers for."""
        return frozenset() if self._salvage is None else self._own(self._salvage.loss_holder)

    @property
    def digests(self) -> frozenset[int]:
        """The same of the digests of their rows."""
        return frozenset() if self._salvage is None else self._own(self._salvage.digest_holder)

    def _own(self, holders: Mapping[int, WorkerId]) -> frozenset[int]:
        return frozenset(m for m, worker in holders.items() if worker == self._worker)
