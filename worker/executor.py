"""The interpreter: runs one worker's program, one training step at a time.

Owns what is between the instructions of a step (tokens, outputs, gradients on their way) and the
order of effects around the commit. Decides nothing: who does what when is in the program, what
a layer computes is in the stage, how tensors travel is in the mailbox and the gradient sums.
"""

from collections.abc import Iterable, Mapping

import torch

from oobleck.host.messages import StepRecord
from oobleck.planner.ids import Generation, WorkerId
from oobleck.planner.job import JobSpec
from oobleck.planner.plan import Plan
from oobleck.planner.program import (
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
    Share,
    SyncGradient,
    Vote,
)
from oobleck.worker import vote
from oobleck.worker.commit import Progress, commit, count_votes, make_record
from oobleck.worker.control import Control
from oobleck.worker.course import Course, Redo
from oobleck.worker.exchange import Exchange, NoExchange, StageExchange
from oobleck.worker.faults import FaultInjector
from oobleck.worker.gradientsums import GradientSums
from oobleck.worker.mailbox import Mailbox, joined
from oobleck.worker.objective import inputs_and_targets
from oobleck.worker.prefetch import Prefetcher
from oobleck.worker.random import RowKeys
from oobleck.worker.salvage import Salvage
from oobleck.worker.saver import Saver
from oobleck.worker.stage import StageRunner
from oobleck.worker.state import ModelState
from oobleck.worker.timeline import Timeline
from oobleck.worker.transport import Group, Transport


def owner_groups(programs: Iterable[Program], plan: Plan) -> list[Group]:
    """The distinct owner sets of all programs, as ranks, in an order that is the same for all."""
    rank = {worker: index for index, worker in enumerate(plan.workers)}
    return sorted(
        {
            tuple(sorted(rank[owner] for owner in instruction.owners))
            for program in programs
            for instruction in program
            if isinstance(instruction, SyncGradient)
        }
    )


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


class Executor:
    """Runs the steps of one generation on one worker."""

    def __init__(
        self,
        *,
        job: JobSpec,
        plan: Plan,
        worker: WorkerId,
        programs: Mapping[WorkerId, Program],
        transport: Transport,
        state: ModelState,
        prefetcher: Prefetcher,
        progress: Progress,
        control: Control,
        saver: Saver,
        faults: FaultInjector,
        device: torch.device,
        timeline: Timeline,
    ) -> None:
        """`programs`: of all workers of `plan`, for whole steps."""
        self._job = job
        self._saver = saver
        self._plan = plan
        self._worker = worker
        self._transport = transport
        self._state = state
        self._prefetcher = prefetcher
        self._progress = progress
        self._control = control
        self._faults = faults
        self._timeline = timeline
        self._layers = plan.holdings()[worker]
        self._stage_count = [len(pipeline.stages) for pipeline in plan.pipelines]
        self._rank = {member: index for index, member in enumerate(plan.workers)}
        self._sums = GradientSums(programs[worker], self._rank, state, transport, timeline)
        stage = plan.stage_of(worker)
        part, parts = stage.workers.index(worker), len(stage.workers)
        #: Which rows of a micro-batch are this worker's.
        self._share = Share(part, part + 1, parts)
        self._rows = self._share.of_rows(job.training.microbatch)
        self.exchange: Exchange = NoExchange()
        if parts > 1:
            self.exchange = StageExchange(
                state,
                self._layers,
                transport,
                [self._rank[member] for member in stage.workers],
                resident=stage.resident,
                timeline=timeline,
            )
        self._stage = StageRunner(
            state,
            self._layers,
            job,
            device,
            self._sums.added,
            timeline=timeline,
            exchange=self.exchange,
        )
        #: What a worker sends on that has no row of a micro-batch.
        self._no_rows = torch.empty(0)
        self._whole = self._course_of(programs)

    def _course_of(
        self, programs: Mapping[WorkerId, Program], salvage: Salvage | None = None
    ) -> Course:
        mailbox = Mailbox(
            self._worker,
            programs,
            self._transport,
            rank=self._rank,
            stages=max(self._stage_count),
            shape=self._stage.activation_shape,
            own=self._share,
            dtype=self._stage.activation_dtype,
            device=self._stage.device,
        )
        return Course(self._worker, self._layers, programs[self._worker], mailbox, salvage)

    def run_step(self, step: int, redo: Redo | None = None) -> tuple[StepRecord, Generation | None]:
        """Train step `step` to its commit, or what `redo` has left of it to do.

        Returns its record and the generation that all workers switch to now, if any. Raises
        TransportError when a peer is lost, Superseded when a newer generation is wanted; in both
        cases `Progress` says how far the step came.
        """
        timeline, wanted = self._timeline, self._control.record
        timeline.begin_step(step, wanted)
        with timeline.span("step", step):
            self._begin(step, redo)
            for instruction in self._course.program:
                self._control.check_wanted(self._plan.generation)
                self._probe("before", instruction)
                microbatch = instruction.microbatch if isinstance(instruction, Action) else None
                with timeline.span(_SPANS[type(instruction)], microbatch):
                    self._execute(instruction)
                self._probe("after", instruction)
        if (recorded := timeline.end_step(step, wanted)) is not None:
            self._control.report_recorded(recorded)
        assert self._result is not None, "a program ends with a vote"
        record = make_record(self._job, self._plan.generation, self._progress, self._result)
        return record, self._result.switch_to

    def settle(self) -> None:
        """Leave a step in the middle: what was left for later is added to the layers' gradients,
        and nothing is kept of micro-batches that were on their way."""
        self._stage.settle()

    def _begin(self, step: int, redo: Redo | None) -> None:
        course = self._whole
        if redo is not None:
            course = self._course_of(redo.programs, redo.salvage)
        self._course = course
        size = self._job.training.microbatch
        self._progress.begin(
            step,
            losses=course.losses,
            positions={m * size + row for m in course.digests for row in range(size)},
        )
        self._prefetcher.begin(step, course.loads, self._whole.loads)
        self._state.zero_gradients(keeping=course.counted)
        self._step = step
        self._tokens: dict[int, torch.Tensor] = {}
        self._targets: dict[int, torch.Tensor] = {}
        #: Rows of a micro-batch that have arrived, in order: from one neighbour or several.
        self._inputs: dict[int, list[torch.Tensor]] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, list[torch.Tensor]] = {}
        self._input_gradients: dict[int, torch.Tensor] = {}
        self._result: vote.Result | None = None
        self.exchange.begin(course.due)
        course.mailbox.begin()
        self._sums.begin(course.due)

    def _probe(self, when: str, instruction: Instruction) -> None:
        microbatch = instruction.microbatch if isinstance(instruction, Action) else None
        self._faults.reached(
            f"{when}:{type(instruction).__name__}",
            generation=self._plan.generation,
            step=self._step,
            microbatch=microbatch,
        )

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case LoadTokens():
                self._load(instruction)
            case ReceiveActivation(microbatch=m):
                self._inputs.setdefault(m, []).append(self._course.mailbox.receive(instruction))
            case Forward():
                self._forward(instruction)
            case SendActivation():
                self._send(instruction, self._outputs)
            case ReceiveGradient(microbatch=m):
                self._gradients.setdefault(m, []).append(self._course.mailbox.receive(instruction))
            case Backward(microbatch=m):
                self._keep(m, self._stage.backward(m, joined(self._gradients.pop(m, []))))
            case BackwardInput(microbatch=m):
                self._keep(m, self._stage.backward_input(m, joined(self._gradients.pop(m, []))))
            case BackwardWeight(microbatch=m):
                self._stage.backward_weight(m)
            case SendGradient():
                self._send(instruction, self._input_gradients)
            case SyncGradient():
                self._sums.check_started(instruction)
            case Vote():
                self._vote(instruction.norm_parts)
            case OptimizerStep():
                assert self._result is not None, "the vote comes before the optimizer"
                commit(self._state, self._job, self._progress, self._result, self._step)
                self._saver.committed(self._step, self._result.saving)

    def _keep(self, microbatch: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self._input_gradients[microbatch] = gradient

    def _send(self, message: SendActivation | SendGradient, kept: dict[int, torch.Tensor]) -> None:
        rows = kept.get(message.microbatch, self._no_rows)
        if self._course.mailbox.send(message, rows):
            kept.pop(message.microbatch, None)

    def _keys(self, microbatch: int) -> RowKeys:
        """Of this worker's rows of the micro-batch."""
        first = microbatch * self._job.training.microbatch
        positions = tuple(range(first + self._rows.start, first + self._rows.stop))
        return RowKeys(seed=self._job.training.seed, step=self._step, positions=positions)

    def _load(self, instruction: LoadTokens) -> None:
        loaded = self._prefetcher.take(self._step, instruction.microbatch)
        rows = slice(self._rows.start, self._rows.stop)
        tokens = torch.from_numpy(loaded.rows[rows])
        keys = self._keys(instruction.microbatch)
        inputs, targets = inputs_and_targets(self._job.model, tokens, keys)
        if instruction.stage == 0:
            self._tokens[instruction.microbatch] = inputs
            digests = zip(loaded.positions[rows], loaded.digests[rows], strict=True)
            self._progress.row_digests.update(digests)
        if self._is_last(instruction):
            self._targets[instruction.microbatch] = targets

    def _is_last(self, action: Action) -> bool:
        return action.stage == self._stage_count[action.pipeline] - 1

    def _forward(self, instruction: Forward) -> None:
        m = instruction.microbatch
        keys = self._keys(m)
        x = self._tokens.pop(m) if instruction.stage == 0 else joined(self._inputs.pop(m))
        assert x is not None, "a stage's input is there before its forward"
        output = self._stage.forward(
            m,
            x,
            keys,
            self._targets.pop(m, None),
            split=m in self._course.split,
            adding=self._course.adding(m),
            lowest=self._course.lowest(m),
            by_layer=m == self._course.last and self._sums.several,
        )
        if self._is_last(instruction):
            if len(self._rows) == self._job.training.microbatch:
                self._progress.losses[m] = output.item()
            else:
                self._progress.loss_parts += output.item()
        else:
            self._outputs[m] = output

    def _vote(self, norm_parts: tuple[LayerPart, ...]) -> None:
        with self._timeline.span("wait for sends"):
            self._course.mailbox.finish()
        self.exchange.end()
        with self._timeline.span("wait for sums"):
            self._sums.wait()
            self._transport.complete()
        progress, generation = self._progress, self._plan.generation
        progress.reduced, progress.reduced_generation = self._step, generation
        progress.reduced_layers = self._layers
        self._faults.reached("reduced", generation=generation, step=self._step)

        training = self._job.training
        with self._timeline.span("ballot"):
            vector = vote.ballot(
                global_batch=training.global_batch,
                loss_sum=sum(progress.losses.values(), progress.loss_parts),
                squared_norm=self._state.squared_norm(norm_parts),
                pending=self._control.pending_boundary(generation),
                row_digests=progress.row_digests,
                saving=self._saver.intent(self._step),
            )
        with self._timeline.span("wait for votes"):
            outcome = self._transport.all_reduce(vector, tuple(range(self._transport.size)))
            self._faults.reached("voting", generation=generation, step=self._step)
            outcome.wait()
        progress.voted, progress.voted_generation = self._step, generation
        progress.ballot = vector
        with self._timeline.span("count"):
            self._result = count_votes(self._job, vector, workers=self._transport.size)
