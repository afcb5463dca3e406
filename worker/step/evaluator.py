"""Evaluation of the state after a step on held-out samples, by all workers of a generation.

A forward pass without dropout over the same samples each time, in shares over all pipelines, and
one sum over all workers. It reads the state and changes nothing, so a loss in the middle costs
nothing but another evaluation: whoever comes to the same step in a later generation does it again,
unless one worker has the result, which the others take over then. So every worker that goes on
from a step has told of its evaluation before.
"""

import logging
import math
import time

import torch

from oobleck.host.ipc.messages import Evaluated, EvaluationRecord
from oobleck.planner.ids import Generation
from oobleck.planner.job.spec import JobSpec
from oobleck.planner.programs.compile import compile_evaluation
from oobleck.planner.programs.instructions import Action, Instruction, LoadTokens
from oobleck.worker.data.dataset import Tokens
from oobleck.worker.data.held_out import HeldOut
from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.control import Control
from oobleck.worker.runtime.faults import FaultInjector
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.runtime.timeline import Timeline
from oobleck.worker.step.interpreter import Interpreter, Purpose, StepEnd
from oobleck.worker.step.stage import StageRunner
from oobleck.worker.transport.transport import Transport

log = logging.getLogger(__name__)

#: The samples are not those of a step.
_NO_STEP = 0


class Evaluator:
    """One worker's part in the evaluations of a job, over all generations."""

    def __init__(
        self,
        *,
        job: JobSpec,
        held_out: HeldOut,
        control: Control,
        faults: FaultInjector,
        timeline: Timeline,
    ) -> None:
        self._job = job
        self._held_out = held_out
        self._control = control
        self._faults = faults
        self._timeline = timeline
        self._newest: EvaluationRecord | None = None

    def run(self, step: int, interpreter: Interpreter) -> None:
        """Evaluate the state after `step`, if that is due and not done, and report the result.

        `interpreter`: of the generation, which is between two steps. Every worker of the plan calls
        it at the same step. Raises TransportError when a peer is lost, Superseded when a newer
        generation is wanted, DataError.
        """
        if not self._held_out.due(step):
            return
        with self._timeline.span("evaluate", step):
            known = self._known(step, interpreter.transport)
            if known is None:
                known = self._evaluate(step, interpreter)
        if self._newest is None or self._newest.step != step:
            self._newest = known
            self._control.report(Evaluated(record=known))

    def _known(self, step: int, transport: Transport) -> EvaluationRecord | None:
        """The evaluation of `step` that some worker has from an earlier generation."""
        row = torch.zeros(6, dtype=torch.float64)
        if (own := self._newest) is not None and own.step == step:
            loss = math.nan if own.loss is None else own.loss
            row[:] = torch.tensor(
                [step, loss, own.samples, own.generation, own.seconds, own.time],
                dtype=torch.float64,
            )
        for other in transport.all_gather(row):
            found, loss, samples, generation, seconds, at = other.tolist()
            if found == step:
                return EvaluationRecord(
                    step=step,
                    loss=loss if math.isfinite(loss) else None,
                    samples=int(samples),
                    generation=Generation(int(generation)),
                    seconds=seconds,
                    time=at,
                )
        return None

    def _evaluate(self, step: int, interpreter: Interpreter) -> EvaluationRecord:
        began = time.monotonic()
        plan, worker = interpreter.plan, interpreter.worker
        evaluation = _Evaluation(self._job, self._held_out, self._faults, plan.generation, step)
        interpreter.exchange.begin({})
        rounds = compile_evaluation(plan, self._held_out.microbatches)
        for number, program in enumerate(rounds[worker]):
            programs = {
                member: programs[number] if number < len(programs) else ()
                for member, programs in rounds.items()
            }
            mailbox = interpreter.mailbox(programs)
            mailbox.begin()
            interpreter.run(program, mailbox, evaluation)
            mailbox.finish()
        interpreter.exchange.end()
        losses = torch.tensor([evaluation.loss], dtype=torch.float64)
        transport = interpreter.transport
        transport.all_reduce(losses, tuple(range(transport.size))).wait()
        loss = losses.item() / self._held_out.microbatches
        return EvaluationRecord(
            step=step,
            loss=loss if math.isfinite(loss) else None,
            samples=self._held_out.samples,
            generation=plan.generation,
            seconds=time.monotonic() - began,
            time=time.time(),
        )


class _Evaluation(Purpose):
    """One evaluation of the state after a step on one worker."""

    def __init__(
        self,
        job: JobSpec,
        held_out: HeldOut,
        faults: FaultInjector,
        generation: Generation,
        step: int,
    ) -> None:
        #: Sum over the micro-batches whose loss this worker computed.
        self.loss = 0.0
        self._job = job
        self._held_out = held_out
        self._faults = faults
        self._generation = generation
        self._step = step

    def reached(self, when: str, instruction: Instruction) -> None:
        assert isinstance(instruction, Action), "an evaluation has no vote"
        if when == "before":
            self._faults.reached(
                "evaluating",
                generation=self._generation,
                step=self._step,
                microbatch=instruction.microbatch,
            )

    def keys(self, microbatch: int, rows: range) -> RowKeys:
        positions = self._held_out.positions(microbatch)[rows.start : rows.stop]
        return RowKeys(
            seed=self._job.training.seed,
            step=_NO_STEP,
            positions=tuple(positions),
            training=False,
        )

    def load(self, instruction: LoadTokens, rows: range) -> Tokens:
        with pulse.FILES:
            return self._held_out.rows(instruction.microbatch)[rows.start : rows.stop]

    def forward(
        self,
        stage: StageRunner,
        microbatch: int,
        x: torch.Tensor,
        keys: RowKeys,
        targets: torch.Tensor | None,
    ) -> torch.Tensor:
        # No layer wants a backward, so nothing is kept for one.
        return stage.forward(microbatch, x, keys, targets, lowest=self._job.model.layer_count)

    def take_loss(self, microbatch: int, loss: float, rows: range) -> None:
        self.loss += loss

    def end(self, instruction: StepEnd) -> None:
        raise AssertionError(f"{instruction} in an evaluation")
