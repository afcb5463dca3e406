"""Training by one worker: the steps of each generation, and the end of the job.

Owns what happens between two steps: evaluations, reports, and the switch to another plan. Must not
know how generations begin or end.
"""

from oobleck.core.messages import Assign, Committed, Finished, Measure
from oobleck.core.plan import Plan
from oobleck.planner.programs.compiler.compile import Work
from oobleck.planner.programs.compiler.own import OwnProgram, compile_own
from oobleck.worker.checkpoint.output import write_result
from oobleck.worker.checkpoint.saver import Saver
from oobleck.worker.context import WorkerContext
from oobleck.worker.data.opening import Data
from oobleck.worker.data.prefetch import Prefetcher
from oobleck.worker.membership import Membership
from oobleck.worker.preparation.preparing import Preparing
from oobleck.worker.recovery.forgiven import Forgiven
from oobleck.worker.runtime.memory import MemoryMeter
from oobleck.worker.state.layout import layer_sizes
from oobleck.worker.state.precision import state_dtype
from oobleck.worker.step.commit import check_skipped
from oobleck.worker.step.evaluator import Evaluator
from oobleck.worker.step.executor import Executor, Redo
from oobleck.worker.step.salvage import Salvage
from oobleck.worker.transport.transport import Transport


def compile_program(context: WorkerContext, plan: Plan, work: Work | None = None) -> OwnProgram:
    """Return this worker's part of `plan`; `work`: the remaining work of an interrupted step."""
    job = context.job
    width = state_dtype(job.training.precision).itemsize
    sizes = layer_sizes(job.model, job.training.optimizer.no_decay)
    layer_bytes = [size * width for size in sizes]
    return compile_own(
        plan, context.worker, tied=job.model.ties, layer_bytes=layer_bytes, work=work
    )


class Training:
    """Training by one worker, over all generations."""

    def __init__(
        self, context: WorkerContext, data: Data, preparing: Preparing, forgiven: Forgiven
    ) -> None:
        """Start to prefetch from `data`."""
        training, threads = context.job.training, max(1, context.job.data.workers)
        self._context = context
        self._preparing = preparing
        self._forgiven = forgiven
        self.memory = MemoryMeter(context.connector.device)
        self._prefetcher = Prefetcher(data.dataset, training, threads=threads)
        self._evaluator = Evaluator(context, data.held_out) if data.held_out else None
        self._saver = Saver(context)
        #: Executor of the current generation; None outside of one.
        self._executor: Executor | None = None

    @property
    def is_under_way(self) -> bool:
        """True while a generation trains, or until its step is settled."""
        return self._executor is not None

    def run(
        self,
        assign: Assign,
        membership: Membership,
        own: OwnProgram,
        salvage: Salvage | None,
    ) -> Assign | Measure:
        """Run the remaining steps; the first one reuses the work in `salvage`.

        Return the next assignment: the one that starts at a step boundary, or one that arrives
        after the last step (a late loss, or a late node).
        """
        context, plan, transport = self._context, assign.plan, membership.transport
        job, progress = context.job, context.progress
        self._forgiven.recorded = progress.committed
        self._saver.enter(assign, transport)
        self.memory.restart()
        executor = self._executor = Executor(
            context, plan, own, transport, self._prefetcher, self._saver, self._preparing
        )
        redo: Redo | None = None
        if salvage is not None:
            redo = Redo(salvage=salvage, own=compile_program(context, plan, salvage.work))
        while True:
            self._preparing.look(plan)
            check_skipped(job.training, progress)
            if self._evaluator is not None:
                # Checked before the first step too: the previous generation may have ended in an
                # evaluation.
                self._evaluator.run(progress.committed, plan, executor.hops, transport)
            if progress.committed >= job.training.steps:
                break
            with context.timeline.first_step():
                record, switch_to = executor.run_step(progress.committed + 1, redo)
            redo = None
            memory = self.memory.read()
            committed = Committed(record=record, memory=memory, compute=executor.compute)
            context.records.add(record)
            context.control.report(committed)
            self._forgiven.recorded = progress.committed
            if switch_to is not None:
                return context.control.boundary(switch_to)
        self._finish(plan, transport)
        membership.stand_down()
        return context.control.wait_next(plan.generation)

    def _finish(self, plan: Plan, transport: Transport) -> None:
        context = self._context
        output, step = context.job.output, context.progress.committed
        # Saved first: the state might be lost while a failed write of the output is retried.
        self._saver.finish(transport, step, needed=output is None)
        if output is not None:
            saved = self._saver.saved_step == step
            write_result(context, output, plan, transport, saved=saved)
        context.control.report(Finished(generation=plan.generation, step=step))

    def settle(self) -> None:
        """Settle the step that a generation's end has interrupted, if there is one."""
        if self._executor is not None:
            self._executor.settle()
            self._executor = None

    def drop(self) -> None:
        """Drop the executor, whose step is complete or discarded."""
        self._executor = None
