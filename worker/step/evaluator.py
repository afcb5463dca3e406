"""Evaluation of the state after a step on held-out samples, by all workers of a generation.

It is a forward pass without dropout, divided over all pipelines, and one sum over all workers. It
changes no state. After a loss the next generation repeats it, unless a worker has the result, which
the others adopt. So before training continues from a step, its evaluation has been reported.
"""

import math
import time
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import torch

from oobleck.core import instructions as ops
from oobleck.core.ids import Generation
from oobleck.core.instructions import Action, Instruction
from oobleck.core.messages import Evaluated, EvaluationRecord
from oobleck.core.plan import Plan
from oobleck.planner.programs.compiler.own import compile_own_evaluation
from oobleck.worker.context import WorkerContext
from oobleck.worker.data.opening import HeldOut
from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.step.hops import SPANS, Hops, Microbatches
from oobleck.worker.transport.transport import Transport, tell_all

#: Step number for loading: held-out samples belong to no step.
_NO_STEP = 0


@dataclass(slots=True)
class _Sums:
    """Losses of a worker by micro-batch, each with its weight, (2,), and metrics summed by name."""

    losses: list[torch.Tensor] = field(default_factory=list)
    metrics: Counter[str] = field(default_factory=Counter)

    def shared(self) -> "_SharedSums":
        # Sum first, so that the device is read only once.
        known = self.losses
        loss, weight = torch.stack(known).sum(dim=0).tolist() if known else (0.0, 0.0)
        metrics = {name: _finite(total) for name, total in self.metrics.items()}
        return _SharedSums(loss=_finite(loss), weight=_finite(weight), metrics=metrics)


class _SharedSums(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of one worker as sent to the others; None: not finite."""

    loss: float | None
    weight: float | None
    metrics: dict[str, float | None]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else value


class Evaluator:
    """Evaluations of a job, one worker's part over all generations."""

    def __init__(self, context: WorkerContext, held_out: HeldOut) -> None:
        self._context = context
        self._held_out = held_out
        self._newest: EvaluationRecord | None = None

    def run(self, step: int, plan: Plan, hops: Hops, transport: Transport) -> None:
        """Evaluate the state after `step`, if that is due and not done, and report the result.

        Every worker of `plan` calls it at the same step, between two steps. Raises TransportError
        when a peer is lost, Superseded when a newer generation is wanted, DataError.
        """
        if not self._held_out.due(step):
            return
        with self._context.timeline.span("evaluate", step):
            known = self._known(step, transport)
            if known is None:
                known = self._evaluate(step, plan, hops, transport)
        if self._newest is None or self._newest.step != step:
            self._newest = known
            self._context.records.add_evaluation(known)
            self._context.control.report(Evaluated(record=known))

    def _known(self, step: int, transport: Transport) -> EvaluationRecord | None:
        """Return the evaluation of `step` that some worker has from an earlier generation,
        or None."""
        own = self._newest
        some = (own,) if own is not None and own.step == step else ()
        known = tell_all(transport, some, tuple[EvaluationRecord, ...])
        return next((record for records in known for record in records), None)

    def _evaluate(
        self, step: int, plan: Plan, hops: Hops, transport: Transport
    ) -> EvaluationRecord:
        began = time.monotonic()
        own = _Sums()
        self._context.stopwatch.begin()
        hops.begin({})
        worker = self._context.worker
        for part in compile_own_evaluation(plan, self._held_out.microbatches, worker):
            mailbox = hops.mailbox(part, self._rows)
            microbatches = Microbatches(hops, mailbox)
            for instruction in part.program:
                self._execute(instruction, step, plan.generation, hops, microbatches, own)
            mailbox.finish()
        hops.end()
        losses, weight, metrics = 0.0, 0.0, Counter[str]()
        for sums in tell_all(transport, own.shared(), _SharedSums):
            losses += _number(sums.loss)
            weight += _number(sums.weight)
            metrics.update({name: _number(value) for name, value in sums.metrics.items()})
        # Stages divide losses by the rows of a whole micro-batch.
        losses *= self._context.job.training.microbatch
        loss = losses / weight if weight else math.nan
        return EvaluationRecord(
            step=step,
            loss=_finite(loss),
            samples=self._held_out.samples,
            generation=plan.generation,
            seconds=time.monotonic() - began,
            time=time.time(),
            metrics={
                name: _finite(total / self._held_out.samples)
                for name, total in sorted(metrics.items())
            },
        )

    def _execute(
        self,
        instruction: Instruction,
        step: int,
        generation: Generation,
        hops: Hops,
        microbatches: Microbatches,
        sums: "_Sums",
    ) -> None:
        """Carry out one instruction, adding to `sums` where it yields a loss."""
        context = self._context
        context.control.check_wanted(generation)
        assert isinstance(instruction, Action), "an evaluation has no vote"
        m = instruction.microbatch
        own = hops.rows(instruction, self._rows(m))
        context.faults.reached("evaluating", generation=generation, step=step, microbatch=m)
        with context.timeline.span(SPANS[type(instruction)], m):
            match instruction:
                case ops.LoadTokens():
                    with pulse.FILES:
                        rows = self._held_out.rows(m)[own.start : own.stop]
                    microbatches.load(instruction, rows, self._keys(step, m, own))
                case ops.ReceiveActivation():
                    microbatches.receive(instruction)
                case ops.Forward():
                    x, targets = microbatches.take_input(instruction)
                    # No layer wants a backward, so nothing is kept for one.
                    lowest = context.job.model.layer_count
                    runner = hops.runner(instruction)
                    with context.stopwatch.running():  # limits a GPU's queue
                        output = runner.forward(
                            m,
                            x,
                            self._keys(step, m, own),
                            targets,
                            lowest=lowest,
                            metrics=sums.metrics,
                        )
                    if hops.is_last(instruction):
                        sums.losses.append(output)
                    else:
                        microbatches.keep_output(instruction, output)
                case ops.SendActivation():
                    microbatches.send(instruction)
                case _:
                    raise AssertionError(f"{instruction} in an evaluation")

    def _rows(self, microbatch: int) -> int:
        return len(self._held_out.positions(microbatch))

    def _keys(self, step: int, microbatch: int, rows: range) -> RowKeys:
        positions = self._held_out.positions(microbatch)[rows.start : rows.stop]
        seed = self._context.job.training.seed
        return RowKeys(
            seed=seed,
            step=_NO_STEP,
            positions=tuple(positions),
            training=False,
            evaluated=step,
        )
