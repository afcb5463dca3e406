"""Training step of one worker, top to bottom (docs/architecture.md, "A step").

Owns the order of a step's effects, and the state that each leaves in the worker's progress. Modules
below it compute layers, move tensors and count ballots.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from oobleck.core import instructions as ops
from oobleck.core.ids import Generation, WorkerId
from oobleck.core.instructions import Action, Instruction, Program, Visit
from oobleck.core.messages import ComputeTime, StepRecord
from oobleck.core.plan import Plan
from oobleck.planner.programs.compiler.own import OwnProgram
from oobleck.worker.context import WorkerContext
from oobleck.worker.data.opening import Prefetcher
from oobleck.worker.preparation.preparing import Preparing
from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.state.precision import sums_dtype
from oobleck.worker.step import vote
from oobleck.worker.step.gradient_sums import GradientSums
from oobleck.worker.step.hops import SPANS, Hops, Microbatches
from oobleck.worker.step.mailbox import Mailbox
from oobleck.worker.step.salvage import Salvage
from oobleck.worker.step.vote import commit, make_record, scale_of
from oobleck.worker.transport.transport import Transport

#: Instructions that a device runs.
_COMPUTED = ops.Compute | ops.OptimizerStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Redo:
    """Step that is partly redone: the salvage of the earlier attempt, and this worker's program for
    the rest."""

    salvage: Salvage
    own: OwnProgram


class StepPlan:
    """Work of one worker in a step: its program, and, for the rest of a step that was cut off, the
    salvage."""

    def __init__(
        self,
        worker: WorkerId,
        layers: Collection[int],
        program: Program,
        mailbox: Mailbox,
        salvage: Salvage | None = None,
    ) -> None:
        """Make the work. `layers`: those that the worker holds; `salvage`: given for the rest of a
        step.
        """
        self.program = program
        self.mailbox = mailbox
        #: Micro-batches whose tokens are needed, in this order.
        self.loads = [step.microbatch for step in program if isinstance(step, ops.LoadTokens)]
        backwards = [s for s in program if isinstance(s, ops.Backward | ops.BackwardInput)]
        #: Visit of the last backward; None: there is none.
        self.last = backwards[-1].visit if backwards else None
        #: Visits whose backward is in two parts.
        self.split = frozenset(s.visit for s in program if isinstance(s, ops.BackwardWeight))
        #: Layers whose gradients have a part of the step already.
        self.counted: frozenset[int] = frozenset()
        #: Micro-batches that are not redone whose loss, and whose row digests, this worker
        #: contributes.
        self.losses: frozenset[int] = frozenset()
        self.digests: frozenset[int] = frozenset()
        #: Layers of a hop whose gradients lack a micro-batch, and the lowest such layer of the
        #: whole model. Micro-batches that are absent here are lacking everywhere.
        self.lacking: Mapping[Visit, frozenset[int]] = {}
        self.lowest: Mapping[int, int] = {}
        if salvage is not None:
            self.counted = salvage.counted[worker]
            self.losses = frozenset(
                m for m, holder in salvage.loss_holder.items() if holder == worker
            )
            self.digests = frozenset(
                m for m, holder in salvage.digest_holder.items() if holder == worker
            )
            self.lacking = {s.visit: salvage.adding(s.microbatch, s.layers) for s in backwards}
            self.lowest = salvage.work.lowest
        #: Number of micro-batches that each layer's gradient gets.
        self.due = dict.fromkeys(layers, 0)
        for step in backwards:
            for layer in self.lacking.get(step.visit, step.layers):
                self.due[layer] += 1


@dataclass(slots=True, kw_only=True)
class _Step:
    """Step under way."""

    number: int
    plan: StepPlan
    microbatches: Microbatches
    #: Result of its vote, once counted.
    result: vote.Result | None = None


class Executor:
    """Training steps of one generation on one worker."""

    def __init__(
        self,
        context: WorkerContext,
        plan: Plan,
        own: OwnProgram,
        transport: Transport,
        prefetcher: Prefetcher,
        saver: vote.Checkpoints,
        preparing: Preparing,
    ) -> None:
        """Make the executor. `own`: program for whole steps."""
        self._context = context
        self._training = context.job.training
        self._progress = context.progress
        self._timeline = context.timeline
        self._stopwatch = context.stopwatch
        self._generation = plan.generation
        self._layers = plan.held[context.worker]
        self._transport = transport
        self._prefetcher = prefetcher
        self._saver = saver
        self._preparing = preparing
        rank = {member: index for index, member in enumerate(plan.workers)}
        #: Time of the whole steps so far; None: the worker holds layers and computes nothing.
        self.compute: ComputeTime | None = None
        if any(isinstance(instruction, ops.Compute) for instruction in own.program):
            self.compute = ComputeTime(steps=0, seconds=0.0)
        self._sums = GradientSums(
            own.program,
            rank,
            context.state,
            transport,
            context.timeline,
            sums_dtype(context.job),
        )
        self.hops = Hops(context, plan, transport)
        #: Work of a whole step.
        self._whole = self._make_step_plan(own)

    def _make_step_plan(self, own: OwnProgram, salvage: Salvage | None = None) -> StepPlan:
        mailbox = self.hops.mailbox(own, lambda _: self._training.microbatch)
        return StepPlan(self._context.worker, self._layers, own.program, mailbox, salvage)

    def run_step(self, step: int, redo: Redo | None = None) -> tuple[StepRecord, Generation | None]:
        """Train step `step` to its commit, or the rest of it in `redo`. Return its record, and the
        generation that all enter next, if any. Raises TransportError, Superseded."""
        control, timeline = self._context.control, self._timeline
        wanted = control.record
        timeline.begin_step(step, wanted)
        with timeline.span("step", step):
            self._stopwatch.begin()
            under_way = self._begin(step, redo)
            for instruction in under_way.plan.program:
                control.check_wanted(self._generation)
                microbatch = instruction.microbatch if isinstance(instruction, Action) else None
                name = type(instruction).__name__
                self._reached(f"before:{name}", step, microbatch)
                span = timeline.computing if isinstance(instruction, _COMPUTED) else timeline.span
                with span(SPANS[type(instruction)], microbatch):
                    self._execute(under_way, instruction)
                self._reached(f"after:{name}", step, microbatch)
        if (recorded := timeline.end_step(step, wanted)) is not None:
            control.report_recorded(recorded)
        assert under_way.result is not None, "a program ends with a vote"
        if redo is None and self.compute is not None:
            self.compute = self.compute.plus(self._stopwatch.seconds())
        record = make_record(self._context.job, self._generation, self._progress, under_way.result)
        return record, under_way.result.switch_to

    def _begin(self, step: int, redo: Redo | None) -> _Step:
        """Begin the whole step, or the rest of it with the salvage of the earlier attempt."""
        step_plan = self._whole
        if redo is not None:
            step_plan = self._make_step_plan(redo.own, redo.salvage)
        size = self._training.microbatch
        self._progress.begin(
            step,
            losses=step_plan.losses,
            positions={m * size + row for m in step_plan.digests for row in range(size)},
        )
        self._prefetcher.begin(step, step_plan.loads, self._whole.loads)
        self._context.state.zero_gradients(keeping=step_plan.counted)
        self.hops.begin(step_plan.due)
        microbatches = Microbatches(self.hops, step_plan.mailbox)
        self._sums.begin(step_plan.due)
        return _Step(number=step, plan=step_plan, microbatches=microbatches)

    def _execute(self, step: _Step, instruction: Instruction) -> None:
        match instruction:
            case ops.LoadTokens():
                self._load(step, instruction)
            case ops.ReceiveActivation() | ops.ReceiveGradient():
                step.microbatches.receive(instruction)
            case ops.Forward():
                with self._stopwatch.running():
                    self._forward(step, instruction)
            case ops.Backward() | ops.BackwardInput() | ops.BackwardWeight():
                with self._stopwatch.running():
                    step.microbatches.backward(instruction, self._added)
            case ops.SendActivation() | ops.SendGradient():
                step.microbatches.send(instruction)
            case ops.SyncGradient():
                self._sums.check_started(instruction)
            case ops.Vote():
                step.result = self._vote(step, instruction.norm_parts)
            case ops.OptimizerStep():
                self._update(step)

    def _load(self, step: _Step, instruction: ops.LoadTokens) -> None:
        """Take the micro-batch's token rows; the first hop contributes their digests."""
        loaded = self._prefetcher.take(step.number, instruction.microbatch)
        rows = self._rows(instruction)
        own = slice(rows.start, rows.stop)
        if self.hops.is_first(instruction):
            digests = zip(loaded.positions[own], loaded.digests[own], strict=True)
            self._progress.row_digests.update(digests)
        keys = self._keys(step, instruction)
        step.microbatches.load(instruction, loaded.rows[own], keys)

    def _keys(self, step: _Step, action: Action) -> RowKeys:
        """Return the keys of this worker's rows of the micro-batch: by step and position, never by
        rank."""
        first, rows = action.microbatch * self._training.microbatch, self._rows(action)
        positions = tuple(range(first + rows.start, first + rows.stop))
        return RowKeys(seed=self._training.seed, step=step.number, positions=positions)

    def _rows(self, action: Action) -> range:
        """Return this worker's rows of the action's micro-batch."""
        return self.hops.rows(action, self._training.microbatch)

    def _forward(self, step: _Step, instruction: ops.Forward) -> None:
        m, visit, plan = instruction.microbatch, instruction.visit, step.plan
        progress = self._progress
        x, targets = step.microbatches.take_input(instruction)
        output = self.hops.runner(instruction).forward(
            m,
            x,
            self._keys(step, instruction),
            targets,
            split=visit in plan.split,
            adding=plan.lacking.get(visit),
            lowest=plan.lowest.get(m, 0),
            by_layer=visit == plan.last and self._sums.several,
        )
        if not self.hops.is_last(instruction):
            step.microbatches.keep_output(instruction, output)
        elif len(self._rows(instruction)) == self._training.microbatch:
            progress.losses[m] = output
        else:
            progress.loss_parts.append(output)

    def _added(self, layer: int) -> None:
        """Start the sum of the layer once it is complete, beside the backward of the
        layers below.
        """
        if self._sums.added(layer):
            with self._stopwatch.paused():
                self._sums.start_ready()

    def _vote(self, step: _Step, norm_parts: tuple[ops.LayerPart, ...]) -> vote.Result:
        """Vote once all reduced gradients are complete, and wait for the votes of all: that commits
        the step."""
        timeline, progress, state = self._timeline, self._progress, self._context.state
        with timeline.span("wait for sends"):
            step.plan.mailbox.finish()
        self.hops.end()
        with timeline.span("wait for sums"):
            for layers in self._sums.as_completed():
                with pulse.WAITING:  # a device's sum may wait for others
                    self._preparing.reduced(step.number, layers)
            self._transport.complete()
        progress.reduced, progress.reduced_generation = step.number, self._generation
        progress.reduced_layers = tuple(self._layers)
        self._reached("reduced", step.number)

        with timeline.span("ballot"):
            loss_sum, weight = progress.loss_sum()
            vector = vote.ballot(
                global_batch=self._training.global_batch,
                loss_sum=loss_sum,
                weight=weight,
                squared_norm=state.squared_norm(norm_parts),
                pending=self._preparing.ready_for(step.number),
                row_digests=progress.row_digests,
                saving=self._saver.intent(step.number),
                connected=self._transport.connected,
                used=state.used(),
            )
        workers = self._transport.size
        with timeline.span("wait for votes"):
            outcome = self._transport.all_reduce(vector, tuple(range(workers)))
            self._reached("voting", step.number)
            outcome.wait()
        progress.learn(step.number, self._generation, vector)
        with timeline.span("count"):
            result = vote.count(vector, self._training, workers=workers)
        if result.connected:
            self._transport.use_connected()
        return result

    def _update(self, step: _Step) -> None:
        """Apply the step. No peer is needed, so it cannot fail half-way between workers."""
        assert step.result is not None, "the vote comes before the optimizer"
        context = self._context
        omitted = commit(context.state, context.job, self._progress, step.result, step.number)
        self._saver.committed(step.number, step.result.saving)
        scale = scale_of(step.result, self._training)
        step_s = time.monotonic() - self._progress.begun_at
        self._preparing.committed(step.number, scale, step_s, omitted)

    def _reached(self, point: str, step: int, microbatch: int | None = None) -> None:
        self._context.faults.reached(
            point, generation=self._generation, step=step, microbatch=microbatch
        )

    def settle(self) -> None:
        """Leave a step in the middle; see `StageRunner.settle`."""
        self.hops.settle()
