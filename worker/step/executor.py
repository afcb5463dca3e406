"""One training step on one worker, top to bottom (docs/architecture.md, "A step").

`run_step` begins the step, carries out the worker's program instruction by instruction (load,
compute, messages, sums of gradients), votes and updates the weights. Owns the order of these
effects and what each leaves in the worker's progress. How a layer computes, a tensor travels or a
ballot is counted is below.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass

from oobleck.host.ipc.messages import StepRecord
from oobleck.planner.ids import Generation, WorkerId
from oobleck.planner.programs.instructions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    LayerPart,
    LoadTokens,
    OptimizerStep,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    SyncGradient,
    Vote,
)
from oobleck.planner.programs.plan import Plan
from oobleck.worker.context import WorkerContext
from oobleck.worker.data.prefetch import Prefetcher
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.step import vote
from oobleck.worker.step.commit import commit, count_votes, make_record
from oobleck.worker.step.gradient_sums import GradientSums
from oobleck.worker.step.mailbox import Mailbox
from oobleck.worker.step.pipeline_stage import SPANS, PipelineStage
from oobleck.worker.step.salvage import Salvage
from oobleck.worker.transport.transport import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Redo:
    """A step that is done again in part: what counts of the earlier attempt, and the programs of
    all workers for the rest."""

    salvage: Salvage
    programs: Mapping[WorkerId, Program]


class StepPlan:
    """What one worker does in a step: its program, and what of the step is there already, where the
    step is the rest of one that was cut off."""

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
            return self._layers
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


class Executor:
    """The training steps of one generation on one worker."""

    def __init__(
        self,
        context: WorkerContext,
        plan: Plan,
        programs: Mapping[WorkerId, Program],
        transport: Transport,
        prefetcher: Prefetcher,
        saver: vote.Checkpoints,
    ) -> None:
        """`programs`: of all workers of `plan`, for whole steps."""
        self._context = context
        self._training = context.job.training
        self._progress = context.progress
        self._timeline = context.timeline
        self._generation = plan.generation
        self._layers = plan.holdings()[context.worker]
        self._transport = transport
        self._prefetcher = prefetcher
        self._saver = saver
        rank = {member: index for index, member in enumerate(plan.workers)}
        own = programs[context.worker]
        self._sums = GradientSums(own, rank, context.state, transport, context.timeline)
        self.stage = PipelineStage(context, plan, transport)
        #: For a whole step, and for the one under way.
        self._whole = self._step_plan = self._make_step_plan(programs)
        #: The step under way, and what its vote said, once it did.
        self._step = 0
        self._result: vote.Result | None = None

    def _make_step_plan(
        self, programs: Mapping[WorkerId, Program], salvage: Salvage | None = None
    ) -> StepPlan:
        worker = self._context.worker
        mailbox = self.stage.mailbox(programs)
        return StepPlan(worker, self._layers, programs[worker], mailbox, salvage)

    def run_step(self, step: int, redo: Redo | None = None) -> tuple[StepRecord, Generation | None]:
        """Train step `step` to its commit, or what `redo` has left of it to do.

        Returns its record and the generation that all workers switch to now, if any. Raises
        TransportError when a peer is lost, Superseded when a newer generation is wanted; in both
        cases `TrainingProgress` says how far the step came.
        """
        control, timeline = self._context.control, self._timeline
        wanted = control.record
        timeline.begin_step(step, wanted)
        with timeline.span("step", step):
            self._begin(step, redo)
            for instruction in self._step_plan.program:
                control.check_wanted(self._generation)
                microbatch = instruction.microbatch if isinstance(instruction, Action) else None
                name = type(instruction).__name__
                self._reached(f"before:{name}", microbatch)
                with timeline.span(SPANS[type(instruction)], microbatch):
                    self._execute(instruction)
                self._reached(f"after:{name}", microbatch)
        if (recorded := timeline.end_step(step, wanted)) is not None:
            control.report_recorded(recorded)
        assert self._result is not None, "a program ends with a vote"
        record = make_record(self._context.job, self._generation, self._progress, self._result)
        return record, self._result.switch_to

    def _begin(self, step: int, redo: Redo | None) -> None:
        """Take up the whole step, or what is left of it; keep what counts of an earlier attempt."""
        step_plan = self._whole
        if redo is not None:
            step_plan = self._make_step_plan(redo.programs, redo.salvage)
        self._step_plan, self._step, self._result = step_plan, step, None
        size = self._training.microbatch
        self._progress.begin(
            step,
            losses=step_plan.losses,
            positions={m * size + row for m in step_plan.digests for row in range(size)},
        )
        self._prefetcher.begin(step, step_plan.loads, self._whole.loads)
        self._context.state.zero_gradients(keeping=step_plan.counted)
        self.stage.exchange.begin(step_plan.due)
        self.stage.begin(step_plan.mailbox)
        self._sums.begin(step_plan.due)

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case LoadTokens():
                self._load(instruction)
            case ReceiveActivation() | ReceiveGradient():
                self.stage.receive(instruction)
            case Forward():
                self._forward(instruction)
            case Backward() | BackwardInput() | BackwardWeight():
                # The sum of a layer starts beside the backward of those below it.
                self.stage.backward(instruction, self._sums.added)
            case SendActivation() | SendGradient():
                self.stage.send(instruction)
            case SyncGradient():
                self._sums.check_started(instruction)
            case Vote():
                self._result = self._vote(instruction.norm_parts)
            case OptimizerStep():
                self._update()

    def _load(self, instruction: LoadTokens) -> None:
        """Take the micro-batch's token rows; the first stage answers for their digests."""
        loaded = self._prefetcher.take(self._step, instruction.microbatch)
        own = slice(self.stage.rows.start, self.stage.rows.stop)
        if instruction.stage == 0:
            digests = zip(loaded.positions[own], loaded.digests[own], strict=True)
            self._progress.row_digests.update(digests)
        self.stage.load(instruction, loaded.rows[own], self._keys(instruction.microbatch))

    def _keys(self, microbatch: int) -> RowKeys:
        """Which samples this worker's rows of the micro-batch are: by step and position, never by
        rank."""
        first, rows = microbatch * self._training.microbatch, self.stage.rows
        positions = tuple(range(first + rows.start, first + rows.stop))
        return RowKeys(seed=self._training.seed, step=self._step, positions=positions)

    def _forward(self, instruction: Forward) -> None:
        m, step_plan, progress = instruction.microbatch, self._step_plan, self._progress
        x, targets = self.stage.take_input(instruction)
        output = self.stage.runner.forward(
            m,
            x,
            self._keys(m),
            targets,
            split=m in step_plan.split,
            adding=step_plan.adding(m),
            lowest=step_plan.lowest(m),
            by_layer=m == step_plan.last and self._sums.several,
        )
        if not self.stage.is_last(instruction):
            self.stage.keep_output(m, output)
        elif len(self.stage.rows) == self._training.microbatch:
            progress.losses[m] = output.item()
        else:
            progress.loss_parts += output.item()

    def _vote(self, norm_parts: tuple[LayerPart, ...]) -> vote.Result:
        """Have every reduced gradient in hand, say so, and learn that everybody has: from then on
        the step is committed."""
        timeline, progress, state = self._timeline, self._progress, self._context.state
        with timeline.span("wait for sends"):
            self._step_plan.mailbox.finish()
        self.stage.exchange.end()
        with timeline.span("wait for sums"):
            self._sums.wait()
            self._transport.complete()
        progress.reduced, progress.reduced_generation = self._step, self._generation
        progress.reduced_layers = self._layers
        self._reached("reduced")

        with timeline.span("ballot"):
            vector = vote.ballot(
                global_batch=self._training.global_batch,
                loss_sum=sum(progress.losses.values(), progress.loss_parts),
                squared_norm=state.squared_norm(norm_parts),
                pending=self._context.control.pending_boundary(self._generation),
                row_digests=progress.row_digests,
                saving=self._saver.intent(self._step),
            )
        workers = self._transport.size
        with timeline.span("wait for votes"):
            outcome = self._transport.all_reduce(vector, tuple(range(workers)))
            self._reached("voting")
            outcome.wait()
        progress.voted, progress.voted_generation = self._step, self._generation
        progress.ballot = vector
        with timeline.span("count"):
            return count_votes(self._context.job, vector, workers=workers)

    def _update(self) -> None:
        """Apply the step. Local: no peer is needed, so it cannot fail half-way between workers."""
        assert self._result is not None, "the vote comes before the optimizer"
        context = self._context
        commit(context.state, context.job, self._progress, self._result, self._step)
        self._saver.committed(self._step, self._result.saving)

    def _reached(self, point: str, microbatch: int | None = None) -> None:
        self._context.faults.reached(
            point, generation=self._generation, step=self._step, microbatch=microbatch
        )

    def settle(self) -> None:
        """Leave a step in the middle: see `StageRunner.settle`."""
        self.stage.runner.settle()
