"""Training steps of one generation on one worker.

Owns the order of effects from the begin of a step to its commit: which plan it follows, what
it loads, where losses and digests go, the sums, the vote and the update. How a program is run is
the interpreter's.
"""

from collections.abc import Iterable, Mapping

import torch

from oobleck.host.ipc.messages import StepRecord
from oobleck.planner.ids import Generation, WorkerId
from oobleck.planner.job.spec import JobSpec
from oobleck.planner.programs.instructions import (
    Action,
    Instruction,
    LayerPart,
    LoadTokens,
    OptimizerStep,
    Program,
    SyncGradient,
    Vote,
)
from oobleck.planner.programs.plan import Plan
from oobleck.worker.data.dataset import Tokens
from oobleck.worker.data.prefetch import Prefetcher
from oobleck.worker.runtime.control import Control
from oobleck.worker.runtime.faults import FaultInjector
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.runtime.timeline import Timeline
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.step import vote
from oobleck.worker.step.commit import TrainingProgress, commit, count_votes, make_record
from oobleck.worker.step.gradient_sums import GradientSums
from oobleck.worker.step.interpreter import Interpreter, Purpose, StepEnd
from oobleck.worker.step.salvage import Salvage
from oobleck.worker.step.stage import StageRunner
from oobleck.worker.step.step_plan import Redo, StepPlan
from oobleck.worker.transport.transport import Group, Transport


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


class Executor(Purpose):
    """Runs the steps of one generation on one worker; the purpose of its programs."""

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
        progress: TrainingProgress,
        control: Control,
        saver: vote.Checkpoints,
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
        rank = {member: index for index, member in enumerate(plan.workers)}
        self._sums = GradientSums(programs[worker], rank, state, transport, timeline)
        self.interpreter = Interpreter(
            job=job,
            plan=plan,
            worker=worker,
            transport=transport,
            state=state,
            control=control,
            device=device,
            timeline=timeline,
            on_added=self._sums.added,
        )
        self._whole = self._plan_of(programs)

    def _plan_of(
        self, programs: Mapping[WorkerId, Program], salvage: Salvage | None = None
    ) -> StepPlan:
        mailbox = self.interpreter.mailbox(programs)
        return StepPlan(self._worker, self._layers, programs[self._worker], mailbox, salvage)

    def run_step(self, step: int, redo: Redo | None = None) -> tuple[StepRecord, Generation | None]:
        """Train step `step` to its commit, or what `redo` has left of it to do.

        Returns its record and the generation that all workers switch to now, if any. Raises
        TransportError when a peer is lost, Superseded when a newer generation is wanted; in both
        cases `TrainingProgress` says how far the step came.
        """
        timeline, wanted = self._timeline, self._control.record
        timeline.begin_step(step, wanted)
        with timeline.span("step", step):
            self._begin(step, redo)
            self.interpreter.run(self._step_plan.program, self._step_plan.mailbox, self)
        if (recorded := timeline.end_step(step, wanted)) is not None:
            self._control.report_recorded(recorded)
        assert self._result is not None, "a program ends with a vote"
        record = make_record(self._job, self._plan.generation, self._progress, self._result)
        return record, self._result.switch_to

    def _begin(self, step: int, redo: Redo | None) -> None:
        step_plan = self._whole
        if redo is not None:
            step_plan = self._plan_of(redo.programs, redo.salvage)
        self._step_plan = step_plan
        size = self._job.training.microbatch
        self._progress.begin(
            step,
            losses=step_plan.losses,
            positions={m * size + row for m in step_plan.digests for row in range(size)},
        )
        self._prefetcher.begin(step, step_plan.loads, self._whole.loads)
        self._state.zero_gradients(keeping=step_plan.counted)
        self._step = step
        self._result: vote.Result | None = None
        self.interpreter.exchange.begin(step_plan.due)
        step_plan.mailbox.begin()
        self._sums.begin(step_plan.due)

    def reached(self, when: str, instruction: Instruction) -> None:
        microbatch = instruction.microbatch if isinstance(instruction, Action) else None
        self._faults.reached(
            f"{when}:{type(instruction).__name__}",
            generation=self._plan.generation,
            step=self._step,
            microbatch=microbatch,
        )

    def keys(self, microbatch: int, rows: range) -> RowKeys:
        first = microbatch * self._job.training.microbatch
        positions = tuple(range(first + rows.start, first + rows.stop))
        return RowKeys(seed=self._job.training.seed, step=self._step, positions=positions)

    def load(self, instruction: LoadTokens, rows: range) -> Tokens:
        loaded = self._prefetcher.take(self._step, instruction.microbatch)
        own = slice(rows.start, rows.stop)
        if instruction.stage == 0:
            digests = zip(loaded.positions[own], loaded.digests[own], strict=True)
            self._progress.row_digests.update(digests)
        return loaded.rows[own]

    def forward(
        self,
        stage: StageRunner,
        microbatch: int,
        x: torch.Tensor,
        keys: RowKeys,
        targets: torch.Tensor | None,
    ) -> torch.Tensor:
        step_plan = self._step_plan
        return stage.forward(
            microbatch,
            x,
            keys,
            targets,
            split=microbatch in step_plan.split,
            adding=step_plan.adding(microbatch),
            lowest=step_plan.lowest(microbatch),
            by_layer=microbatch == step_plan.last and self._sums.several,
        )

    def take_loss(self, microbatch: int, loss: float, rows: range) -> None:
        if len(rows) == self._job.training.microbatch:
            self._progress.losses[microbatch] = loss
        else:
            self._progress.loss_parts += loss

    def end(self, instruction: StepEnd) -> None:
        match instruction:
            case SyncGradient():
                self._sums.check_started(instruction)
            case Vote():
                self._vote(instruction.norm_parts)
            case OptimizerStep():
                assert self._result is not None, "the vote comes before the optimizer"
                commit(self._state, self._job, self._progress, self._result, self._step)
                self._saver.committed(self._step, self._result.saving)

    def _vote(self, norm_parts: tuple[LayerPart, ...]) -> None:
        with self._timeline.span("wait for sends"):
            self._step_plan.mailbox.finish()
        self.interpreter.exchange.end()
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
