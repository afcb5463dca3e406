"""A worker's life: enter a generation, train in it until it ends, enter the next.

Owns what becomes of each way out of a generation, and the end of training. The process and its
layers live through all generations. Must not know how workers join (`membership`), agree
(`recover`), compute (`executor`) or write (`saver`, `output`).
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence

import torch

from oobleck.core.ids import Generation
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import Assign, Committed, Finished, Launch, Measure, PhaseReached, Ready
from oobleck.core.plan import Plan
from oobleck.host.address import is_loopback
from oobleck.host.data.token_file import DataError
from oobleck.host.system.memory import total_memory
from oobleck.planner.programs.compiler.own import OwnProgram, compile_own
from oobleck.planner.programs.compiler.work import Work
from oobleck.worker.checkpoint.location import check_place
from oobleck.worker.checkpoint.output import check_writable, write_result
from oobleck.worker.checkpoint.saver import Saver
from oobleck.worker.context import WorkerContext
from oobleck.worker.data.dataset import Dataset
from oobleck.worker.data.held_out import HeldOut
from oobleck.worker.data.loaders import Loaders
from oobleck.worker.data.opening import open_dataset, start_loaders
from oobleck.worker.data.own import OwnDataset
from oobleck.worker.data.prefetch import Prefetcher
from oobleck.worker.membership import Membership, join, join_handover, report_lost
from oobleck.worker.models import check_code, check_weights
from oobleck.worker.preparation.preparing import Preparing
from oobleck.worker.profiling.measuring import Measuring
from oobleck.worker.profiling.preflight import on_this_node, preflight
from oobleck.worker.recovery.forgiven import Forgiven
from oobleck.worker.recovery.recover import Recovery
from oobleck.worker.runtime import code, heap
from oobleck.worker.runtime.control import Control
from oobleck.worker.runtime.device_clock import clock_of
from oobleck.worker.runtime.errors import (
    HelperLost,
    JobError,
    NodeError,
    Superseded,
    TransportError,
)
from oobleck.worker.runtime.faults import FaultInjector
from oobleck.worker.runtime.memory import MemoryMeter
from oobleck.worker.runtime.stopwatch import Stopwatch
from oobleck.worker.runtime.timeline import Timeline
from oobleck.worker.state import own_optimizer, precision
from oobleck.worker.state.layout import check_no_decay, layer_sizes
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.state.precision import state_dtype
from oobleck.worker.state.progress import TrainingProgress
from oobleck.worker.step.commit import check_skipped
from oobleck.worker.step.evaluator import Evaluator
from oobleck.worker.step.executor import Executor, Redo
from oobleck.worker.step.salvage import Salvage
from oobleck.worker.transport.connect import Connector
from oobleck.worker.transport.links.hub import Links
from oobleck.worker.transport.transport import Transport

log = logging.getLogger(__name__)


class Session:
    """Session of one worker process, from its launch to its stop."""

    def __init__(self, launch: Launch, control: Control) -> None:
        """Raises DataError or NodeError where this node lacks the data or device, JobError where
        the model cannot be built or saved."""
        job = launch.job
        if launch.no_code:
            raise NodeError(launch.no_code)
        code.allow(launch.allow_code)
        loaders = start_loaders(job)  # first: a fork beside threads may hang
        connector = Connector(launch)
        torch.set_float32_matmul_precision(job.training.float32_matmul)
        if job.output is not None:
            check_writable(job.output)
        if job.checkpoint is not None:
            check_place(job.checkpoint)
        precision.check(job)
        # On CPUs the workers of a node are alike, and in one memory.
        alike = connector.device.type == "cpu" and launch.worker.slot > 0
        with on_this_node(job, control, launch.ready_by):
            check_code(job)
            own_optimizer.check(job.training.optimizer)
            dataset, held_out = _open_data(job, loaders)
            preflight(
                job,
                connector.device,
                dataset,
                passed=launch.passed or alike,
                workers=launch.workers,
            )
        check_no_decay(job.model, job.training.optimizer.no_decay)
        data = held_out.fingerprint if held_out else dataset.fingerprint
        weights = check_weights(job.model)
        self._context = context = WorkerContext(
            worker=launch.worker,
            job=job,
            job_id=launch.job_id,
            control=control,
            faults=FaultInjector(launch, control),
            timeline=Timeline(clock_of(connector.device)),
            stopwatch=Stopwatch.on(connector.device),
            connector=connector,
            links=Links(
                launch.address,
                silence_s=launch.silence_s,
                sealed=job.seals_links(on_loopback=is_loopback(launch.address)),
                # An honest peer that is further ahead has used this worker's memory up anyway.
                most_early_bytes=total_memory() // (2 * launch.workers),
            ),
            state=ModelState(job, connector.device),
            progress=TrainingProgress(),
            records=control.records,
            chunk_bytes=launch.chunk_bytes,
            data=dataset.fingerprint,
            base=weights if job.model.rests_on_files else b"",
            inputs=_inputs(data, weights),
        )
        self._measuring = Measuring(context, launch.device_kind)
        self._memory = MemoryMeter(connector.device)
        self._prefetcher = Prefetcher(dataset, job.training, threads=max(1, job.data.workers))
        self._recovery = Recovery(context)
        self._preparing = Preparing(context, self._compile)
        self._evaluator = Evaluator(context, held_out) if held_out else None
        self._saver = Saver(context)
        #: The newest generation that was entered; 0: none.
        self._entered = Generation(0)
        #: Of the generation that this worker is in.
        self._executor: Executor | None = None
        self._forgiven = Forgiven(context.worker, context.progress, connector.held_by_others)

    def run(self, pid: int) -> None:
        """Report ready and follow the assignments; only a Stop or a dead agent ends it."""
        context = self._context
        ready = Ready(pid=pid, card=context.links.card.text, data=context.inputs.hex())
        context.control.report(ready)
        wish = context.control.wait_next(self._entered)

        def overruled() -> bool:
            return context.control.is_overruled(self._entered)

        try:
            while True:
                wish = self._measure(wish) if isinstance(wish, Measure) else self._enter(wish)
        except torch.AcceleratorError as error:
            if self._forgiven.follows_a_loss(error, overruled):
                raise HelperLost(
                    f"{context.worker}: the GPU has failed at the loss of a worker ({error}), to "
                    "whose memory it may have written; the process is replaced"
                ) from error
            raise

    def _measure(self, wish: Measure) -> Assign | Measure:
        """Measure as `wish` says, in no generation; return the instruction that follows."""
        self._context.connector.release()
        self._measuring.run(wish, self._entered)
        heap.give_back()  # else it would count as what was there before the layers
        return self._context.control.wait_next(self._entered)

    def _enter(self, assign: Assign) -> Assign | Measure:
        """Live through one generation and return what follows it."""
        context, generation = self._context, assign.plan.generation
        self._entered = generation
        control, timeline = context.control, context.timeline
        control.answered()
        timeline.enter(generation)
        if assign.boundary and not context.state.layers:
            self._memory.begin()  # before anything is fed
        self._preparing.enter(assign)
        log.info("entering generation", extra={"generation": generation})
        membership: Membership | None = None
        try:
            control.report(PhaseReached(generation=generation, phase="aborted"))
            received = fed = 0
            if assign.handover:
                with timeline.phase("hand over"):
                    standing = self._recovery.standing(assign.plan)
                    membership = join_handover(context, assign, standing)
                    fed, standings = self._take_over(assign, membership)
                    received = self._recovery.hand_over(assign, membership.transport, standings)
                    membership.leave(orderly=True)
                    membership = None
            if context.worker in assign.leaving:
                log.info("left the plan", extra={"generation": generation})
                self._executor = None
                context.connector.release()
                return control.wait_next(generation)
            with timeline.phase("rendezvous"):
                own = self._preparing.own_program(assign.plan)
                standing = self._recovery.standing(assign.plan)
                membership = join(context, assign, standing, self._recovery.moving)
            self._forgiven.enter(membership)
            if not assign.boundary and not context.state.layers:
                self._memory.begin()
            with membership.failing():
                more, standings = self._take_over(assign, membership)
                salvage = self._recovery.run(
                    assign,
                    membership.transport,
                    standings,
                    received=received + fed + more,
                    fed=fed + more,
                )
                self._preparing.drop()
                following = self._train(assign, membership, own, salvage)
        except TransportError as error:
            self._forgiven.check_mapped(error, assign)
            report_lost(context, generation, error, membership.silent() if membership else ())
            self._leave(membership, orderly=False)
        except (MemoryError, RuntimeError) as error:
            training = self._executor is not None
            if not self._forgiven.short_of_memory(error, training=training):
                raise
            self._executor = None
            line = str(error).partition("\n")[0] or type(error).__name__
            what = "the step is tried" if training else "all meet"
            told = f"{context.worker} was out of memory ({line}); {what} once more"
            report_lost(context, generation, TransportError(told), left=True)
            self._leave(membership, orderly=False)
        except (DataError, JobError, NodeError):
            if membership is not None:
                # Others may be about to find the same of themselves: this one's end is not their
                # loss.
                membership.stand_down()
            raise
        except Superseded as superseded:
            log.info("leaving generation", extra={"generation": generation, "why": str(superseded)})
            self._leave(membership, orderly=True)
        else:
            self._leave(membership, orderly=True)
            self._executor = None
            return following
        if self._executor is not None:
            self._executor.settle()
            self._executor = None
        with timeline.phase("wait for the plan"):
            return control.wait_next(generation)

    def _take_over(self, assign: Assign, membership: Membership) -> tuple[int, Sequence[bytes]]:
        """Hold what has been fed, if anything; the bytes, and where all stand then."""
        if not assign.boundary:
            return 0, membership.standings
        fed = self._preparing.take_over(membership.host)
        self._recovery.tell_received(assign.plan, fed)
        standing = self._recovery.standing(assign.plan)
        return fed, membership.transport.gather(standing)

    def _leave(self, membership: Membership | None, *, orderly: bool) -> None:
        overruled = self._context.control.is_overruled(self._entered)
        self._forgiven.leave(after_a_loss=overruled or not orderly)
        self._context.timeline.leave()
        with self._context.timeline.phase("leave"):
            if membership is not None:
                membership.leave(orderly=orderly)

    def _compile(self, plan: Plan, work: Work | None = None) -> OwnProgram:
        job, worker = self._context.job, self._context.worker
        width = state_dtype(job.training.precision).itemsize
        layer_bytes = [
            size * width for size in layer_sizes(job.model, job.training.optimizer.no_decay)
        ]
        return compile_own(plan, worker, tied=job.model.ties, layer_bytes=layer_bytes, work=work)

    def _train(
        self,
        assign: Assign,
        membership: Membership,
        own: OwnProgram,
        salvage: Salvage | None,
    ) -> Assign | Measure:
        """Run the remaining steps, the first one as far as `salvage` leaves it to do.

        Returns what follows: the assignment that all go to at a step boundary, or after the last
        step, if one comes: a loss at the very end, or a node that joined too late.
        """
        context, transport = self._context, membership.transport
        job, progress = context.job, context.progress
        self._forgiven.recorded = progress.committed
        self._saver.enter(assign, transport)
        self._memory.restart()
        executor = self._executor = Executor(
            context,
            assign.plan,
            own,
            transport,
            self._prefetcher,
            self._saver,
            self._preparing,
        )
        redo: Redo | None = None
        if salvage is not None:
            redo = Redo(salvage=salvage, own=self._compile(assign.plan, salvage.work))
        while True:
            self._preparing.look(assign.plan)
            check_skipped(job.training, progress)
            if self._evaluator is not None:
                # Also in a generation's begin: the one before may have ended in the middle of it.
                self._evaluator.run(progress.committed, assign.plan, executor.hops, transport)
            if progress.committed >= job.training.steps:
                break
            with context.timeline.first_step():
                record, switch_to = executor.run_step(progress.committed + 1, redo)
            redo = None
            committed = Committed(
                record=record, memory=self._memory.read(), compute=executor.compute
            )
            context.records.add(record)
            context.control.report(committed)
            self._forgiven.recorded = progress.committed
            if switch_to is not None:
                return context.control.boundary(switch_to)
        self._finish(assign.plan, transport)
        membership.stand_down()
        return context.control.wait_next(assign.plan.generation)

    def _finish(self, plan: Plan, transport: Transport) -> None:
        context = self._context
        output, step = context.job.output, context.progress.committed
        # First: while an output that cannot be written is tried again, the state may get lost.
        self._saver.finish(transport, step, needed=output is None)
        if output is not None:
            saved = self._saver.saved_step == step
            write_result(context, output, plan, transport, saved=saved)
        context.control.report(Finished(generation=plan.generation, step=step))


def _open_data(
    job: JobSpec, loaders: Mapping[str, Loaders]
) -> tuple[Dataset | OwnDataset, HeldOut | None]:
    """Open the data set that is trained on, and the rows that are evaluated, None if there are
    none. Raises DataError, JobError."""
    evaluation = job.evaluation
    share = (evaluation.fraction or 0.0) if evaluation else 0.0
    dataset = open_dataset(job, job.data, loaders, held_out=share)
    return dataset, HeldOut(job, evaluation, dataset, loaders) if evaluation else None


def _inputs(data: bytes, weights: bytes) -> bytes:
    """Return one fingerprint, 32 bytes, for the data and the initial weights, if these are
    files."""
    return hashlib.sha256(data + weights).digest() if weights else data
