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
from collections.abc import Mapping

import torch

from oobleck.host.messages import Evaluated, EvaluationRecord
from oobleck.planner.compile import compile_evaluation
from oobleck.planner.ids import Generation, WorkerId
from oobleck.planner.job import JobSpec
from oobleck.planner.plan import Plan
from oobleck.planner.program import (
    Action,
    Forward,
    LoadTokens,
    Program,
    ReceiveActivation,
    SendActivation,
    Share,
)
from oobleck.worker.control import Control
from oobleck.worker.exchange import Exchange
from oobleck.worker.faults import FaultInjector
from oobleck.worker.heldout import HeldOut
from oobleck.worker.mailbox import Mailbox, joined
from oobleck.worker.objective import inputs_and_targets
from oobleck.worker.random import RowKeys
from oobleck.worker.stage import StageRunner
from oobleck.worker.state import ModelState
from oobleck.worker.timeline import Timeline
from oobleck.worker.transport import Transport

log = logging.getLogger(__name__)

#: The samples are not those of a step.
_NO_STEP = 0


class Evaluator:
    """One worker's part in the evaluations of a job, over all generations."""

    def __init__(
        self,
        *,
        job: JobSpec,
        worker: WorkerId,
        state: ModelState,
        held_out: HeldOut,
        control: Control,
        faults: FaultInjector,
        device: torch.device,
        timeline: Timeline,
    ) -> None:
        self._job = job
        self._worker = worker
        self._state = state
        self._held_out = held_out
        self._control = control
        self._faults = faults
        self._device = device
        self._timeline = timeline
        self._newest: EvaluationRecord | None = None
        #: Of each micro-batch, those that this worker computes.
        self._rows = range(0)

    def run(self, step: int, plan: Plan, transport: Transport, exchange: Exchange) -> None:
        """Evaluate the state after `step`, if that is due and not done, and report the result.

        `exchange`: with the other workers of the stage, which is between two steps. Every worker
        of the plan calls it at the same step. Raises TransportError when a peer is lost, Superseded
        when a newer generation is wanted, DataError.
        """
        if not self._held_out.due(step):
            return
        with self._timeline.span("evaluate", step):
            known = self._known(step, transport)
            if known is None:
                known = self._evaluate(step, plan, transport, exchange)
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

    def _evaluate(
        self, step: int, plan: Plan, transport: Transport, exchange: Exchange
    ) -> EvaluationRecord:
        began = time.monotonic()
        count = self._held_out.microbatches
        rounds = compile_evaluation(plan, count)
        members = plan.stage_of(self._worker).workers
        part = members.index(self._worker)
        share = Share(part, part + 1, len(members))
        self._rows = share.of_rows(self._job.training.microbatch)
        stage = StageRunner(
            self._state,
            plan.holdings()[self._worker],
            self._job,
            self._device,
            exchange=exchange,
        )
        exchange.begin({})
        rank = {member: index for index, member in enumerate(plan.workers)}
        total = 0.0
        for number in range(len(rounds[self._worker])):
            programs = {
                worker: programs[number] if number < len(programs) else ()
                for worker, programs in rounds.items()
            }
            mailbox = Mailbox(
                self._worker,
                programs,
                transport,
                rank=rank,
                stages=max(len(pipeline.stages) for pipeline in plan.pipelines),
                shape=stage.activation_shape,
                own=share,
                dtype=stage.activation_dtype,
                device=stage.device,
            )
            total += self._run_round(step, plan, programs, stage, mailbox)
        exchange.end()
        losses = torch.tensor([total], dtype=torch.float64)
        transport.all_reduce(losses, tuple(range(transport.size))).wait()
        loss = losses.item() / count
        return EvaluationRecord(
            step=step,
            loss=loss if math.isfinite(loss) else None,
            samples=self._held_out.samples,
            generation=plan.generation,
            seconds=time.monotonic() - began,
            time=time.time(),
        )

    def _run_round(
        self,
        step: int,
        plan: Plan,
        programs: Mapping[WorkerId, Program],
        stage: StageRunner,
        mailbox: Mailbox,
    ) -> float:
        """The sum of the losses of the round's micro-batches, on the last stage; else 0."""
        mailbox.begin()
        total = 0.0
        tokens: dict[int, torch.Tensor] = {}
        targets: dict[int, torch.Tensor] = {}
        arrived: dict[int, list[torch.Tensor]] = {}
        outputs: dict[int, torch.Tensor] = {}
        for instruction in programs[self._worker]:
            assert isinstance(instruction, Action), "an evaluation has no vote"
            m = instruction.microbatch
            self._control.check_wanted(plan.generation)
            self._faults.reached("evaluating", generation=plan.generation, step=step, microbatch=m)
            match instruction:
                case LoadTokens():
                    own = slice(self._rows.start, self._rows.stop)
                    rows = torch.from_numpy(self._held_out.rows(m)[own])
                    tokens[m], targets[m] = inputs_and_targets(self._job.model, rows, self._keys(m))
                case ReceiveActivation():
                    arrived.setdefault(m, []).append(mailbox.receive(instruction))
                case Forward():
                    x = tokens.pop(m) if stage.first else joined(arrived.pop(m))
                    assert x is not None, "a stage's input is there before its forward"
                    outputs[m] = self._forward(stage, m, x, targets.pop(m, None))
                case SendActivation():
                    if mailbox.send(instruction, outputs[m]):
                        del outputs[m]
                case _:
                    raise AssertionError(f"{instruction} in an evaluation")
            if stage.last and isinstance(instruction, Forward):
                total += outputs.pop(m).item()
        mailbox.finish()
        return total

    def _forward(
        self, stage: StageRunner, microbatch: int, x: torch.Tensor, targets: torch.Tensor | None
    ) -> torch.Tensor:
        return stage.forward(
            microbatch,
            x,
            self._keys(microbatch),
            targets if stage.last else None,
            lowest=self._job.model.layer_count,
        )

    def _keys(self, microbatch: int) -> RowKeys:
        return RowKeys(
            seed=self._job.training.seed,
            step=_NO_STEP,
            positions=tuple(
                self._held_out.positions(microbatch)[self._rows.start : self._rows.stop]
            ),
            training=False,
        )
