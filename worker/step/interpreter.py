"""The interpreter: runs one worker's programs, of training steps and of evaluations alike.

Owns what is between the instructions (tokens, outputs, gradients on their way), and the worker's
part in its stage. Decides nothing: who does what when is in the program, what a layer computes is
in the stage, how tensors travel is in the mailbox. Whose samples are loaded, what becomes of losses
and what ends a step is said by the `Purpose` of the run.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from oobleck.planner.ids import WorkerId
from oobleck.planner.job.spec import JobSpec
from oobleck.planner.programs.instructions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    LoadTokens,
    OptimizerStep,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    Share,
    SyncGradient,
    Vote,
)
from oobleck.planner.programs.plan import Plan
from oobleck.worker.data.dataset import Tokens
from oobleck.worker.data.objective import inputs_and_targets
from oobleck.worker.runtime.control import Control
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.runtime.timeline import Timeline
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.step.exchange import Exchange, NoExchange, StageExchange
from oobleck.worker.step.mailbox import Mailbox, joined
from oobleck.worker.step.stage import StageRunner
from oobleck.worker.transport.transport import Transport

#: What an instruction is called in a timeline.
_SPANS: Mapping[type[Instruction], str] = {
    LoadTokens: "load",
    ReceiveActivation: "receive activation",
    Forward: "forward",
    SendActivation: "send activation",
    ReceiveGradient: "receive gradient",
    Backward: "backward",
    BackwardInput: "backward input",
    BackwardWeight: "backward weight",
    SendGradient: "send gradient",
    SyncGradient: "sync gradient",
    Vote: "vote",
    OptimizerStep: "optimizer",
}

#: What ends a training step.
StepEnd = SyncGradient | Vote | OptimizerStep


class Purpose(Protocol):
    """What a program is run for: where its samples come from, and where its results go."""

    def reached(self, when: str, instruction: Instruction) -> None:
        """`when`: before or after it. May not return; raises Superseded."""

    def keys(self, microbatch: int, rows: range) -> RowKeys:
        """Which samples `rows` of the micro-batch are."""

    def load(self, instruction: LoadTokens, rows: range) -> Tokens:
        """Those rows of the micro-batch (rows, sequence_length + 1). Raises DataError."""

    def forward(
        self,
        stage: StageRunner,
        microbatch: int,
        x: torch.Tensor,
        keys: RowKeys,
        targets: torch.Tensor | None,
    ) -> torch.Tensor:
        """Call the stage's, with what of the micro-batch is to be kept for a backward."""

    def take_loss(self, microbatch: int, loss: float, rows: range) -> None:
        """`loss`: what `rows` have in the micro-batch's mean."""

    def end(self, instruction: StepEnd) -> None:
        """Carry out what no micro-batch has a part in."""


class Interpreter:
    """Runs the programs of one generation on one worker."""

    def __init__(
        self,
        *,
        job: JobSpec,
        plan: Plan,
        worker: WorkerId,
        transport: Transport,
        state: ModelState,
        control: Control,
        device: torch.device,
        timeline: Timeline,
        on_added: Callable[[int], None],
    ) -> None:
        """`on_added`: told each time that a layer's gradient has got a micro-batch, wholly."""
        self.plan = plan
        self.worker = worker
        self.transport = transport
        self._job = job
        self._control = control
        self._timeline = timeline
        self._stage_count = [len(pipeline.stages) for pipeline in plan.pipelines]
        #: Of each worker of the plan in `transport`.
        self._rank = {member: index for index, member in enumerate(plan.workers)}
        stage = plan.stage_of(worker)
        part, parts = stage.workers.index(worker), len(stage.workers)
        self._share = Share(part, part + 1, parts)
        #: Which rows of a micro-batch are this worker's.
        self._rows = self._share.of_rows(job.training.microbatch)
        layers = plan.holdings()[worker]
        #: With the other workers of the stage.
        self.exchange: Exchange = NoExchange()
        if parts > 1:
            self.exchange = StageExchange(
                state,
                layers,
                transport,
                [self._rank[member] for member in stage.workers],
                resident=stage.resident,
                timeline=timeline,
            )
        self._stage = StageRunner(
            state,
            layers,
            job,
            device,
            on_added,
            timeline=timeline,
            exchange=self.exchange,
        )
        #: What a worker sends on that has no row of a micro-batch.
        self._no_rows = torch.empty(0)

    def mailbox(self, programs: Mapping[WorkerId, Program]) -> Mailbox:
        """For this worker's program among those of all workers of the plan."""
        return Mailbox(
            self.worker,
            programs,
            self.transport,
            rank=self._rank,
            stages=max(self._stage_count),
            shape=self._stage.activation_shape,
            own=self._share,
            dtype=self._stage.activation_dtype,
            device=self._stage.device,
        )

    def run(self, program: Program, mailbox: Mailbox, purpose: Purpose) -> None:
        """Run it once; `mailbox`, which has begun, is its own.

        Raises TransportError when a peer is lost, Superseded when a newer generation is wanted, and
        what `purpose` raises.
        """
        self._mailbox, self._purpose = mailbox, purpose
        self._tokens: dict[int, torch.Tensor] = {}
        self._targets: dict[int, torch.Tensor] = {}
        #: Rows of a micro-batch that have arrived, in order: from one neighbour or several.
        self._inputs: dict[int, list[torch.Tensor]] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, list[torch.Tensor]] = {}
        self._input_gradients: dict[int, torch.Tensor] = {}
        generation, span = self.plan.generation, self._timeline.span
        for instruction in program:
            self._control.check_wanted(generation)
            purpose.reached("before", instruction)
            microbatch = instruction.microbatch if isinstance(instruction, Action) else None
            with span(_SPANS[type(instruction)], microbatch):
                self._execute(instruction)
            purpose.reached("after", instruction)

    def settle(self) -> None:
        """Leave a step in the middle: what was left for later is added to the layers' gradients,
        and nothing is kept of micro-batches that were on their way."""
        self._stage.settle()

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case LoadTokens():
                self._load(instruction)
            case ReceiveActivation(microbatch=m):
                self._inputs.setdefault(m, []).append(self._mailbox.receive(instruction))
            case Forward():
                self._forward(instruction)
            case SendActivation():
                self._send(instruction, self._outputs)
            case ReceiveGradient(microbatch=m):
                self._gradients.setdefault(m, []).append(self._mailbox.receive(instruction))
            case Backward(microbatch=m):
                self._keep(m, self._stage.backward(m, joined(self._gradients.pop(m, []))))
            case BackwardInput(microbatch=m):
                self._keep(m, self._stage.backward_input(m, joined(self._gradients.pop(m, []))))
            case BackwardWeight(microbatch=m):
                self._stage.backward_weight(m)
            case SendGradient():
                self._send(instruction, self._input_gradients)
            case SyncGradient() | Vote() | OptimizerStep():
                self._purpose.end(instruction)

    def _keep(self, microbatch: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self._input_gradients[microbatch] = gradient

    def _send(self, message: SendActivation | SendGradient, kept: dict[int, torch.Tensor]) -> None:
        rows = kept.get(message.microbatch, self._no_rows)
        if self._mailbox.send(message, rows):
            kept.pop(message.microbatch, None)

    def _load(self, instruction: LoadTokens) -> None:
        m = instruction.microbatch
        tokens = torch.from_numpy(self._purpose.load(instruction, self._rows))
        keys = self._purpose.keys(m, self._rows)
        inputs, targets = inputs_and_targets(self._job.model, tokens, keys)
        if instruction.stage == 0:
            self._tokens[m] = inputs
        if self._is_last(instruction):
            self._targets[m] = targets

    def _is_last(self, action: Action) -> bool:
        return action.stage == self._stage_count[action.pipeline] - 1

    def _forward(self, instruction: Forward) -> None:
        m, purpose = instruction.microbatch, self._purpose
        x = self._tokens.pop(m) if instruction.stage == 0 else joined(self._inputs.pop(m))
        assert x is not None, "a stage's input is there before its forward"
        keys, targets = purpose.keys(m, self._rows), self._targets.pop(m, None)
        output = purpose.forward(self._stage, m, x, keys, targets)
        if self._is_last(instruction):
            purpose.take_loss(m, output.item(), self._rows)
        else:
            self._outputs[m] = output
