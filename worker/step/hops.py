"""Computations that a plan gives this worker, and the state of its micro-batches between
instructions.

Training steps (`executor`) and evaluations (`evaluator`) decide the next instruction, the loaded
samples and the use of a loss. `stage` computes layers, `mailbox` moves tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby

import torch

from oobleck.core import instructions as ops
from oobleck.core.ids import WorkerId
from oobleck.core.instructions import Action, Instruction, Share, Visit
from oobleck.core.plan import Plan
from oobleck.core.routes import Hold
from oobleck.planner.programs.compiler.own import OwnProgram
from oobleck.worker.context import WorkerContext
from oobleck.worker.data.dataset import Tokens
from oobleck.worker.data.objective import inputs_and_targets
from oobleck.worker.data.samples import Samples
from oobleck.worker.models.tree import Tree
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.state.precision import sums_dtype
from oobleck.worker.step.exchange import Exchange, StageExchange
from oobleck.worker.step.mailbox import Mailbox, Receive, Send, joined, wire
from oobleck.worker.step.stage import OnLayer, StageRunner
from oobleck.worker.transport.transport import Transport

#: Names of instructions in a timeline.
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

#: Tensor that a worker without a row of a micro-batch sends on.
_NO_ROWS = torch.empty(0)


class Hops:
    """Computations that a plan gives this worker in one generation: hops of routes, by their
    layers."""

    def __init__(self, context: WorkerContext, plan: Plan, transport: Transport) -> None:
        self._context = context
        self.model = context.job.model
        self._transport = transport
        #: Rank in `transport` of each worker of the plan.
        self._rank = {member: index for index, member in enumerate(plan.workers)}
        #: This worker's share of a micro-batch's rows, by layer.
        self._share: dict[int, Share] = {}
        #: Exchange with the workers that hold a layer together with this one, by layer.
        self._exchange: dict[int, Exchange] = {}
        self._exchanges: list[Exchange] = []
        own = [hold for hold in plan.holds if context.worker in hold.workers]
        for workers, holds in groupby(sorted(own, key=_workers), key=_workers):
            self._join(workers, list(holds))
        self._runners: dict[range, StageRunner] = {}

    def _join(self, workers: tuple[WorkerId, ...], holds: Sequence[Hold]) -> None:
        """Add the layers that `workers` hold together."""
        part, parts = workers.index(self._context.worker), len(workers)
        layers = [layer for hold in holds for layer in hold.layers]
        exchange = Exchange()
        if parts > 1:
            exchange = StageExchange(
                self._context.state,
                layers,
                self._transport,
                [self._rank[member] for member in workers],
                sums=sums_dtype(self._context.job),
                resident={layer for hold in holds if hold.resident for layer in hold.layers},
                timeline=self._context.timeline,
                stopwatch=self._context.stopwatch,
            )
        self._exchanges.append(exchange)
        self._exchange.update(dict.fromkeys(layers, exchange))
        self._share.update(dict.fromkeys(layers, Share(part, part + 1, parts)))

    def rows(self, action: Action, count: int) -> range:
        """Return this worker's rows of the action's micro-batch, which has `count`."""
        return self._share[action.first_layer].of_rows(count)

    def runner(self, action: Action) -> StageRunner:
        """Return the runner of the layers of `action`."""
        layers, context = action.layers, self._context
        if layers not in self._runners:
            self._runners[layers] = StageRunner(
                context.state,
                layers,
                context.job,
                context.connector.device,
                context.timeline,
                self._exchange[action.first_layer],
            )
        return self._runners[layers]

    def begin(self, due: Mapping[int, int]) -> None:
        """Begin a step in which each layer's gradient gets so many micro-batches."""
        for exchange in self._exchanges:
            exchange.begin(due)

    def end(self) -> None:
        """Wait until no exchange of the step is under way; before the update."""
        for exchange in self._exchanges:
            exchange.end()

    def settle(self) -> None:
        """Leave a step in the middle; see `StageRunner.settle`."""
        for runner in self._runners.values():
            runner.settle()

    def mailbox(self, own: OwnProgram, rows: Callable[[int], int]) -> Mailbox:
        """Return a mailbox for this worker's program. `rows`: the row count of a micro-batch."""
        context = self._context
        return Mailbox(
            own,
            self._transport,
            rank=self._rank,
            layers=self.model.layer_count,
            rows=rows,
            wire=partial(wire, context.job),
            shares=self._share,
            device=context.connector.device,
        )

    def is_first(self, action: Action) -> bool:
        """Return whether `action` takes tokens."""
        return action.first_layer == 0

    def is_last(self, action: Action) -> bool:
        """Return whether `action` yields the loss."""
        return action.last_layer == self.model.layer_count - 1


def _workers(hold: Hold) -> tuple[WorkerId, ...]:
    return hold.workers


class Microbatches:
    """Inputs and outputs of the worker's micro-batches at each hop, while one program runs."""

    def __init__(self, hops: Hops, mailbox: Mailbox) -> None:
        """Begin the program that `mailbox` is for: its first receives are posted."""
        self._hops = hops
        self._mailbox = mailbox
        self._tokens: dict[Visit, Tree] = {}
        self._targets: dict[Visit, Tree] = {}
        #: Rows of a micro-batch that have arrived, from one neighbour or several.
        self._inputs: dict[Visit, dict[Share, torch.Tensor]] = {}
        self._outputs: dict[Visit, torch.Tensor] = {}
        self._gradients: dict[Visit, dict[Share, torch.Tensor]] = {}
        self._input_gradients: dict[Visit, torch.Tensor] = {}
        mailbox.begin()

    def load(self, instruction: ops.LoadTokens, rows: Tokens | Samples, keys: RowKeys) -> None:
        """Keep this worker's `rows`, tokens (n, sequence_length + 1) or samples, until their
        forward."""
        inputs: Tree
        targets: Tree
        if isinstance(rows, Samples):
            inputs, targets = rows.inputs, rows.targets
        else:
            inputs, targets = inputs_and_targets(self._hops.model, torch.from_numpy(rows), keys)
        if self._hops.is_first(instruction):
            self._tokens[instruction.visit] = inputs
        if self._hops.is_last(instruction):
            self._targets[instruction.visit] = targets

    def receive(self, message: Receive) -> None:
        """Wait for the message. Raises TransportError."""
        kept = self._inputs if isinstance(message, ops.ReceiveActivation) else self._gradients
        kept.setdefault(message.visit, {})[message.share] = self._mailbox.receive(message)

    def send(self, message: Send) -> None:
        """Start sending the micro-batch's result to the neighbour hop. Raises TransportError."""
        kept = self._input_gradients if isinstance(message, ops.SendGradient) else self._outputs
        rows = kept.get(message.visit, _NO_ROWS)
        if self._mailbox.send(message, rows):
            kept.pop(message.visit, None)

    def take_input(self, instruction: ops.Forward) -> tuple[Tree, Tree | None]:
        """Return the hop's input for the micro-batch, and the targets where it yields the loss."""
        visit = instruction.visit
        first = self._hops.is_first(instruction)
        x = self._tokens.pop(visit) if first else joined(self._inputs.pop(visit))
        assert x is not None, "a hop's input arrives before its forward"
        return x, self._targets.pop(visit, None)

    def keep_output(self, instruction: ops.Forward, output: torch.Tensor) -> None:
        """Keep the output until it is sent to the next hop."""
        self._outputs[instruction.visit] = output

    def backward(
        self, instruction: ops.Backward | ops.BackwardInput | ops.BackwardWeight, on_layer: OnLayer
    ) -> None:
        """Run a backward; `on_layer` is called with each layer whose gradient then has the
        micro-batch.
        """
        m, runner = instruction.microbatch, self._hops.runner(instruction)
        if isinstance(instruction, ops.BackwardWeight):
            runner.backward_weight(m, on_layer)
            return
        gradient = joined(self._gradients.pop(instruction.visit, {}))
        if isinstance(instruction, ops.Backward):
            gradient = runner.backward(m, gradient, on_layer)
        else:
            gradient = runner.backward_input(m, gradient)
        if gradient is not None:
            self._input_gradients[instruction.visit] = gradient
