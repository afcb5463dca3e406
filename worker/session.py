"""A worker's life: enter a generation, train in it until it ends, enter the next.

Owns what becomes of each way out of a generation and the end of training. The process, its
libraries and every layer that it keeps live on through all generations. Must not know how workers
meet (`meetings`), agree (`recover`), compute (`executor`) or write (`saver`, `result`).
"""

import hashlib
import logging
from collections.abc import Mapping

from oobleck.host.ipc.messages import (
    Assign,
    Committed,
    Finished,
    Launch,
    Measure,
    PhaseReached,
    Ready,
)
from oobleck.planner.ids import WorkerId
from oobleck.planner.programs.compile import compile_programs
from oobleck.planner.programs.instructions import Program
from oobleck.planner.programs.plan import Plan
from oobleck.planner.programs.work import Work
from oobleck.worker.checkpoint.location import check_protocol
from oobleck.worker.checkpoint.output import check_writable
from oobleck.worker.checkpoint.result import ResultWriter
from oobleck.worker.checkpoint.saver import Saver
from oobleck.worker.data.dataset import Dataset
from oobleck.worker.data.held_out import HeldOut
from oobleck.worker.data.prefetch import Prefetcher
from oobleck.worker.meetings import Meetings
from oobleck.worker.membership import Membership
from oobleck.worker.models import check_weights
from oobleck.worker.profiling.measuring import Measuring
from oobleck.worker.recovery.recover import Recovery
from oobleck.worker.runtime import heap, stacks
from oobleck.worker.runtime.control import Control
from oobleck.worker.runtime.errors import Superseded, TransportError
from oobleck.worker.runtime.faults import FaultInjector
from oobleck.worker.runtime.memory import MemoryMeter
from oobleck.worker.runtime.timeline import Timeline
from oobleck.worker.state.layout import layer_sizes
from oobleck.worker.state.model_state import ModelState, state_dtype
from oobleck.worker.step.commit import TrainingProgress, check_skipped
from oobleck.worker.step.evaluator import Evaluator
from oobleck.worker.step.executor import Executor
from oobleck.worker.step.salvage import Salvage
from oobleck.worker.step.step_plan import Redo
from oobleck.worker.transport.connect import Connector
from oobleck.worker.transport.rendezvous import StoreServer
from oobleck.worker.transport.transport import Transport

log = logging.getLogger(__name__)


class Session:
    """One worker process, from its launch to its stop."""

    def __init__(self, launch: Launch, control: Control) -> None:
        """Raises DataError, DeviceError, LocationUnreachable, ModelError or OutputError when this
        node lacks the data or the device, or cannot build the model or save it."""
        self._worker = launch.worker
        self._job = launch.job
        self._control = control
        self._connector = Connector(launch)
        self._device = self._connector.device
        self._device_kind = launch.device_kind
        self._faults = FaultInjector(launch, control)
        model = launch.job.model
        if launch.job.output is not None:
            check_writable(launch.job.output)
        if launch.job.checkpoint is not None:
            check_protocol(launch.job.checkpoint)
        evaluation = launch.job.evaluation
        self._dataset = Dataset(
            launch.job.data,
            model.sequence_length,
            model.vocabulary,
            held_out=(evaluation.fraction or 0.0) if evaluation else 0.0,
        )
        held_out = HeldOut(launch.job, evaluation, self._dataset) if evaluation else None
        data = held_out.fingerprint if held_out else self._dataset.fingerprint
        #: Of all that must be the same on every node.
        self._inputs = _inputs(data, check_weights(model))
        self._prefetcher = Prefetcher(self._dataset, launch.job.training)
        self._memory = MemoryMeter(self._device)
        self._state = ModelState(launch.job, self._device)
        self._progress = TrainingProgress()
        self._timeline = Timeline()
        self._evaluator: Evaluator | None = None
        if held_out is not None:
            self._evaluator = Evaluator(
                job=launch.job,
                held_out=held_out,
                control=control,
                faults=self._faults,
                timeline=self._timeline,
            )
        self._recovery = Recovery(
            worker=launch.worker,
            job=launch.job,
            state=self._state,
            progress=self._progress,
            fingerprint=self._dataset.fingerprint,
            inputs=self._inputs,
            control=control,
            faults=self._faults,
            timeline=self._timeline,
        )
        self._saver = Saver(
            job=launch.job,
            job_id=launch.job_id,
            worker=launch.worker,
            state=self._state,
            fingerprint=self._dataset.fingerprint,
            control=control,
            faults=self._faults,
        )
        self._result = ResultWriter(
            job=launch.job,
            job_id=launch.job_id,
            worker=launch.worker,
            state=self._state,
            control=control,
        )
        self._store = StoreServer(launch.address)
        self._meetings = Meetings(
            worker=launch.worker,
            connector=self._connector,
            own_store=self._store,
            progress=self._progress,
            control=control,
            faults=self._faults,
        )
        #: Of the generation that this worker is in.
        self._executor: Executor | None = None

    def run(self, pid: int) -> None:
        """Report ready and follow the assignments; only a Stop or a dead agent ends it."""
        inputs = self._inputs.hex()
        self._control.report(Ready(pid=pid, store=self._store.endpoint, data=inputs))
        while isinstance(wish := self._control.wait_begin(), Measure):
            self._measuring().run(wish)
            heap.give_back()  # else it would count as what was there before the layers
        while True:
            wish = self._enter(wish)

    def _measuring(self) -> Measuring:
        return Measuring(
            worker=self._worker,
            job=self._job,
            device=self._device,
            device_kind=self._device_kind,
            connector=self._connector,
            own_store=self._store,
            control=self._control,
            faults=self._faults,
        )

    def _enter(self, assign: Assign) -> Assign:
        """Live through one generation and return the assignment that follows it."""
        generation = assign.plan.generation
        stacks.answered()
        self._timeline.enter(generation)
        log.info("entering generation", extra={"generation": generation})
        membership: Membership | None = None
        try:
            self._control.report(PhaseReached(generation=generation, phase="aborted"))
            received = 0
            if assign.handover:
                with self._timeline.phase("hand over"):
                    membership = self._meetings.hand_over(assign)
                    received = self._recovery.hand_over(assign, membership.transport)
                    membership.leave(orderly=True)
                    membership = None
            if self._worker in assign.leaving:
                log.info("left the plan", extra={"generation": generation})
                self._executor = None
                return self._control.wait_next(generation)
            with self._timeline.phase("rendezvous"):
                programs = self._compile(assign.plan)
                membership = self._meetings.join(assign, programs)
            if not self._state.layers:
                self._memory.begin()
            salvage = self._recovery.run(assign, membership.transport, received=received)
            following = self._train(assign, membership, programs, salvage)
        except TransportError as error:
            self._meetings.lost(generation, error, membership.silent() if membership else ())
            self._leave(membership, orderly=False)
        except Superseded as superseded:
            log.info("leaving generation", extra={"generation": generation, "why": str(superseded)})
            self._leave(membership, orderly=True)
        else:
            self._leave(membership, orderly=True)
            self._executor = None
            return following
        if self._executor is not None:
            self._executor.interpreter.settle()
            self._executor = None
        with self._timeline.phase("wait for the plan"):
            return self._control.wait_next(generation)

    def _leave(self, membership: Membership | None, *, orderly: bool) -> None:
        self._timeline.leave()
        with self._timeline.phase("leave"):
            if membership is not None:
                membership.leave(orderly=orderly)

    def _compile(self, plan: Plan, work: Work | None = None) -> Mapping[WorkerId, Program]:
        width = state_dtype(self._job.training.precision).itemsize
        layer_bytes = [size * width for size in layer_sizes(self._job.model)]
        return compile_programs(plan, tied=self._job.model.tied, layer_bytes=layer_bytes, work=work)

    def _train(
        self,
        assign: Assign,
        membership: Membership,
        programs: Mapping[WorkerId, Program],
        salvage: Salvage | None,
    ) -> Assign:
        """Run the remaining steps, the first one as far as `salvage` leaves it to do.

        Returns the assignment that all go to at a step boundary, or after the last step, if one
        comes: a loss at the very end, or a node that joined too late.
        """
        transport = membership.transport
        self._saver.enter(assign, transport, self._progress)
        self._memory.restart()
        executor = self._executor = Executor(
            job=self._job,
            plan=assign.plan,
            worker=self._worker,
            programs=programs,
            transport=transport,
            state=self._state,
            prefetcher=self._prefetcher,
            progress=self._progress,
            control=self._control,
            saver=self._saver,
            faults=self._faults,
            device=self._device,
            timeline=self._timeline,
        )
        redo: Redo | None = None
        if salvage is not None:
            redo = Redo(salvage=salvage, programs=self._compile(assign.plan, salvage.work))
        while True:
            check_skipped(self._job.training, self._progress)
            if self._evaluator is not None:
                # Also in a generation's begin: the one before may have ended in the middle.
                self._evaluator.run(self._progress.committed, executor.interpreter)
            if self._progress.committed >= self._job.training.steps:
                break
            with self._timeline.first_step():
                record, switch_to = executor.run_step(self._progress.committed + 1, redo)
            redo = None
            self._control.report(Committed(record=record, memory=self._memory.read()))
            if switch_to is not None:
                return self._control.boundary(switch_to)
        self._finish(assign.plan, transport)
        membership.stand_down()
        return self._control.wait_next(assign.plan.generation)

    def _finish(self, plan: Plan, transport: Transport) -> None:
        output, step = self._job.output, self._progress.committed
        # First: while an output that cannot be written is tried again, the state may get lost.
        self._saver.finish(transport, step, needed=output is None)
        if output is not None:
            self._result.write(output, plan, transport, step=step)
        self._control.report(Finished(generation=plan.generation, step=step))


def _inputs(data: bytes, weights: bytes) -> bytes:
    """One fingerprint, 32 bytes, for the data and the initial weights, if these are files."""
    return hashlib.sha256(data + weights).digest() if weights else data
