"""This worker's stage of a pipeline, and its micro-batches between two instructions.

Training steps (`executor`) and evaluations (`evaluator`) say which instruction comes next, which
samples are loaded and what becomes of a loss. What a layer computes is in `stage`, how tensors
travel is in `mailbox`.
"""

from collections.abc import Mapping

import torch

from oobleck.planner.ids import WorkerId
from oobleck.planner.programs import instructions as ops
from oobleck.planner.programs.instructions import Action, Instruction, Program, Share
from oobleck.planner.programs.plan import Plan
from oobleck.worker.context import WorkerContext
from oobleck.worker.data.dataset import Tokens
from oobleck.worker.data.objective import inputs_and_targets
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.step.exchange import Exchange, StageExchange
from oobleck.worker.step.mailbox import Mailbox, Receive, Send, joined
from oobleck.worker.step.stage import OnLayer, StageRunner
from oobleck.worker.transport.transport import Transport

#: What an instruction is called in a timeline.
SPANS: Mapping[type[Instruction], str] = {
    ops.LoadTokens: "load",
    ops.ReceiveActivation: "receive activation",
    ops.Forward: "forward",
    ops.SendActivation: "send activation",
    ops.ReceiveGradient: "receive gradient",
    ops.Backward: "backward",
    ops.BackwardInput: "backward input",
    ops.BackwardWeight: "backward weight",
    ops.SendGradient: "send gradient",
    ops.SyncGradient: "sync gradient",
    ops.Vote: "vote",
    ops.OptimizerStep: "optimizer",
}

#: What a worker sends on that has no row of a micro-batch.
_NO_ROWS = torch.empty(0)


class PipelineStage:
    """The stage that a plan gives to this worker, in one generation."""

    def __init__(self, context: WorkerContext, plan: Plan, transport: Transport) -> None:
        job, state, worker = context.job, context.state, context.worker
        self._worker = worker
        self.model = job.model
        self._transport = transport
        self._stage_count = [len(pipeline.stages) for pipeline in plan.pipelines]
        #: Of each worker of the plan in `transport`.
        self._rank = {member: index for index, member in enumerate(plan.workers)}
        stage = plan.stage_of(worker)
        part, parts = stage.workers.index(worker), len(stage.workers)
        self._share = Share(part, part + 1, parts)
        #: Which rows of a micro-batch are this worker's.
        self.rows = self._share.of_rows(job.training.microbatch)
        layers = plan.holdings()[worker]
        #: With the other workers of the stage.
        self.exchange = Exchange()
        if parts > 1:
            ranks = [self._rank[member] for member in stage.workers]
            self.exchange = StageExchange(
                state,
                layers,
                transport,
                ranks,
                resident=stage.resident,
                timeline=context.timeline,
            )
        #: Runs the layers.
        self.runner = StageRunner(
            state, layers, job, context.connector.device, context.timeline, self.exchange
        )

    def mailbox(self, programs: Mapping[WorkerId, Program]) -> Mailbox:
        """For this worker's program among those of all workers of the plan."""
        return Mailbox(
            self._worker,
            programs,
            self._transport,
            rank=self._rank,
            stages=max(self._stage_count),
            shape=self.runner.activation_shape,
            own=self._share,
            dtype=self.runner.activation_dtype,
            device=self.runner.device,
        )

    def is_last(self, action: Action) -> bool:
        """Whether `action` is in the stage that yields the loss."""
        return action.stage == self._stage_count[action.pipeline] - 1


class Microbatches:
    """What the stage's micro-batches have, while one program runs."""

    def __init__(self, stage: PipelineStage, mailbox: Mailbox) -> None:
        """Begins the program that `mailbox` is for: its first receives are posted."""
        self._stage = stage
        self._mailbox = mailbox
        self._tokens: dict[int, torch.Tensor] = {}
        self._targets: dict[int, torch.Tensor] = {}
        #: Rows of a micro-batch that have arrived, in order: from one neighbour or several.
        self._inputs: dict[int, list[torch.Tensor]] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, list[torch.Tensor]] = {}
        self._input_gradients: dict[int, torch.Tensor] = {}
        mailbox.begin()

    def load(self, instruction: ops.LoadTokens, rows: Tokens, keys: RowKeys) -> None:
        """Keep this worker's `rows` (n, sequence_length + 1) until their forward."""
        inputs, targets = inputs_and_targets(self._stage.model, torch.from_numpy(rows), keys)
        if instruction.stage == 0:
            self._tokens[instruction.microbatch] = inputs
        if self._stage.is_last(instruction):
            self._targets[instruction.microbatch] = targets

    def receive(self, message: Receive) -> None:
        """Wait for the message. Raises TransportError."""
        kept = self._inputs if isinstance(message, ops.ReceiveActivation) else self._gradients
        kept.setdefault(message.microbatch, []).append(self._mailbox.receive(message))

    def send(self, message: Send) -> None:
        """Start sending what the micro-batch has for the neighbour stage. Raises TransportError."""
        kept = self._input_gradients if isinstance(message, ops.SendGradient) else self._outputs
        rows = kept.get(message.microbatch, _NO_ROWS)
        if self._mailbox.send(message, rows):
            kept.pop(message.microbatch, None)

    def take_input(self, instruction: ops.Forward) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The stage's input for the micro-batch, and the targets where it yields the loss."""
        m = instruction.microbatch
        x = self._tokens.pop(m) if instruction.stage == 0 else joined(self._inputs.pop(m))
        assert x is not None, "a stage's input is there before its forward"
        return x, self._targets.pop(m, None)

    def keep_output(self, microbatch: int, output: torch.Tensor) -> None:
        """To be sent to the next stage."""
        self._outputs[microbatch] = output

    def backward(
        self, instruction: ops.Backward | ops.BackwardInput | ops.BackwardWeight, on_layer: OnLayer
    ) -> None:
        """Run it; `on_layer` is told each layer whose gradient has the micro-batch now."""
        m = instruction.microbatch
        if isinstance(instruction, ops.BackwardWeight):
            self._stage.runner.backward_weight(m, on_layer)
            return
        gradient = joined(self._gradients.pop(m, []))
        if isinstance(instruction, ops.Backward):
            gradient = self._stage.runner.backward(m, gradient, on_layer)
        else:
            gradient = self._stage.runner.backward_input(m, gradient)
        if gradient is not None:
            self._input_gradients[m] = gradient
