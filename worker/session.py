"""A worker's life: enter a generation, train in it until it ends, enter the next.

Owns what becomes of each way out of a generation and the end of training. The process, its
libraries and every layer that it keeps live on through all generations.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from oobleck.host.messages import (
    Assign,
    Committed,
    Failed,
    Finished,
    Launch,
    Measure,
    PeerLost,
    PhaseReached,
    Ready,
    SaveFailed,
)
from oobleck.host.tokenfile import DataError
from oobleck.planner.compile import compile_programs
from oobleck.planner.ids import Generation, WorkerId
from oobleck.planner.plan import Plan
from oobleck.planner.program import Program
from oobleck.planner.work import Work
from oobleck.worker import pulse, stacks
from oobleck.worker.collect import collect
from oobleck.worker.commit import Progress
from oobleck.worker.connect import Connector, links_of
from oobleck.worker.control import Control
from oobleck.worker.course import Redo
from oobleck.worker.data import Dataset
from oobleck.worker.device import DeviceError
from oobleck.worker.entry import Entry, members_of
from oobleck.worker.errors import (
    CheckpointError,
    InvariantViolation,
    ModelError,
    Superseded,
    TransportError,
    Unreached,
)
from oobleck.worker.evaluator import Evaluator
from oobleck.worker.executor import Executor, owner_groups
from oobleck.worker.faults import FaultInjector
from oobleck.worker.heldout import HeldOut
from oobleck.worker.layout import layer_sizes
from oobleck.worker.measuring import Measuring
from oobleck.worker.membership import Membership
from oobleck.worker.memory import MemoryMeter
from oobleck.worker.models import check_weights
from oobleck.worker.nccl import Link
from oobleck.worker.output import OutputError, check_writable, write_layers, write_manifest
from oobleck.worker.prefetch import Prefetcher
from oobleck.worker.rendezvous import StoreServer
from oobleck.worker.restore import check_protocol
from oobleck.worker.salvage import Salvage
from oobleck.worker.saver import Saver
from oobleck.worker.state import ModelState, state_dtype
from oobleck.worker.timeline import Timeline
from oobleck.worker.transport import Group, Transport

log = logging.getLogger(__name__)

#: Between two attempts to write the result to a disk that did not take it.
_OUTPUT_RETRY_S = 5.0


class Session:
    """One worker process, from its launch to its stop."""

    def __init__(self, launch: Launch, control: Control) -> None:
        """Raises DataError, DeviceError, ModelError or OutputError when this node cannot read the
        data, has not the device, cannot build or begin the model, or cannot save weights."""
        self._worker = launch.worker
        self._job = launch.job
        self._job_id = launch.job_id
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
        self._progress = Progress()
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
        self._entry = Entry(
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
        self._store = StoreServer(launch.address)
        #: Of the generation that this worker is in.
        self._executor: Executor | None = None

    def run(self, pid: int) -> None:
        """Report ready and follow the assignments; only a Stop or a dead agent ends it."""
        inputs = self._inputs.hex()
        self._control.report(Ready(pid=pid, store=self._store.endpoint, data=inputs))
        while isinstance(wish := self._control.wait_begin(), Measure):
            self._measuring().run(wish)
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
                    membership = self._meet_all(assign)
                    received = self._entry.hand_over(assign, membership.transport)
                    membership.leave(orderly=True)
                    membership = None
            if self._worker in assign.leaving:
                log.info("left the plan", extra={"generation": generation})
                self._executor = None
                return self._control.wait_next(generation)
            with self._timeline.phase("rendezvous"):
                membership = self._join(assign)
            salvage = self._entry.run(assign, membership.transport, received=received)
            following = self._train(assign, membership, salvage)
        except TransportError as error:
            self._lost(generation, error)
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

    def _lost(self, generation: Generation, error: TransportError) -> None:
        """Tell the agent that a peer is gone; from any thread, more than once if need be."""
        log.warning("peer lost", extra={"generation": generation, "detail": str(error)})
        way_gone = error if isinstance(error, Unreached) else None
        self._control.report(
            PeerLost(
                generation=generation,
                step=self._progress.begun,
                detail=str(error),
                unreached=way_gone.worker if way_gone else None,
                store_unreached=way_gone is not None and way_gone.worker is None,
            )
        )

    def _meet_all(self, assign: Assign) -> Membership:
        """Meet the plan's workers and those that leave, to hand over what the latter alone hold."""
        return self._member(assign, members_of(assign), groups=(), links=(), meeting="/handover")

    def _join(self, assign: Assign) -> Membership:
        plan = assign.plan
        self._programs = self._compile(plan)
        self._probe("before:rendezvous", assign)
        return self._member(
            assign,
            plan.workers,
            groups=owner_groups(self._programs.values(), plan),
            links=links_of(self._programs, plan),
        )

    def _probe(self, point: str, assign: Assign) -> None:
        generation = assign.plan.generation
        self._faults.reached(point, generation=generation, step=self._progress.begun)

    def _member(
        self,
        assign: Assign,
        members: Sequence[WorkerId],
        *,
        groups: Sequence[Group],
        links: Sequence[Link],
        meeting: str = "",
    ) -> Membership:
        try:
            return Membership(
                assign,
                self._worker,
                members=members,
                own_store=self._store,
                connector=self._connector,
                groups=groups,
                links=links,
                control=self._control,
                on_lost=lambda detail: self._lost(assign.plan.generation, TransportError(detail)),
                on_arrival=lambda: self._probe("before:connect", assign),
                meeting=meeting,
            )
        except Unreached as error:
            raise error.of(members) from None

    def _compile(self, plan: Plan, work: Work | None = None) -> Mapping[WorkerId, Program]:
        width = state_dtype(self._job.training.precision).itemsize
        layer_bytes = [size * width for size in layer_sizes(self._job.model)]
        return compile_programs(plan, tied=self._job.model.tied, layer_bytes=layer_bytes, work=work)

    def _train(self, assign: Assign, membership: Membership, salvage: Salvage | None) -> Assign:
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
            programs=self._programs,
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
            if self._evaluator is not None:
                # Also at the entry into a generation: the last one may have ended in the middle.
                self._evaluator.run(self._progress.committed, executor.interpreter)
            if self._progress.committed >= self._job.training.steps:
                break
            with self._timeline.first_step():
                record, switch_to = executor.run_step(self._progress.committed + 1, redo)
            redo = None
            self._control.report(Committed(record=record, memory=self._memory.read()))
            if switch_to is not None:
                return self._control.boundary(switch_to)
        self._finish(assign, transport)
        membership.stand_down()
        return self._control.wait_next(assign.plan.generation)

    def _finish(self, assign: Assign, transport: Transport) -> None:
        """Save this worker's share of the result: the layers of which it is the first owner."""
        plan, output = assign.plan, self._job.output
        # First: while an output that cannot be written is tried again, the state may get lost.
        self._saver.finish(transport, self._progress.committed, needed=output is None)
        if output is not None:
            self._write_layers(output, assign, transport)
            transport.all_gather(torch.zeros(1))  # the manifest vouches for all layers
            if plan.workers[0] == self._worker:
                step = self._progress.committed
                self._write_output(
                    assign, lambda: write_manifest(output, self._job, self._job_id, step)
                )
        self._control.report(Finished(generation=plan.generation, step=self._progress.committed))

    def _write_layers(self, output: str, assign: Assign, transport: Transport) -> None:
        """One layer after the other, so that there is no more than one whole in host memory."""
        plan, step = assign.plan, self._progress.committed
        for layer in range(plan.layer_count):
            writer = plan.owners(layer)[0]
            whole = collect(self._state, layer, transport, plan, worker=self._worker, writer=writer)
            if whole is not None:
                state = ModelState(self._job, torch.device("cpu"))
                state.load(layer, whole, version=step)
                self._write_output(assign, partial(write_layers, output, state, [layer]))

    def _write_output(self, assign: Assign, write: Callable[[], None]) -> None:
        """Until it has worked: the result of the training is here and nowhere else."""
        while True:
            try:
                with pulse.FILES:
                    return write()
            except OutputError as error:
                log.warning("the output cannot be written", extra={"reason": error})
                step = self._progress.committed
                self._control.report(SaveFailed(what="output", step=step, reason=str(error)))
                self._control.pause(assign.plan.generation, _OUTPUT_RETRY_S)


def _inputs(data: bytes, weights: bytes) -> bytes:
    """One fingerprint, 32 bytes, for the data and the initial weights, if these are files."""
    return hashlib.sha256(data + weights).digest() if weights else data


def run(launch: Launch, control: Control, pid: int) -> int:
    """The main thread of a worker process; returns its exit status."""
    try:
        Session(launch, control).run(pid)
    except InvariantViolation as error:
        log.exception("invariant violated")
        control.report(Failed(kind="internal", message=f"{type(error).__name__}: {error}"))
    except (DataError, DeviceError, OSError) as error:
        control.report(Failed(kind="node", message=str(error)))
    except (CheckpointError, ModelError, OutputError) as error:
        control.report(Failed(kind="user", message=str(error)))
    except Exception as error:
        # The process boundary: whatever the model or the optimizer raised is the job's failure.
        log.exception("training failed")
        control.report(Failed(kind="user", message=f"{launch.worker}: {describe(error)}"))
    return 1


def describe(error: Exception) -> str:
    """One line; for want of memory, the one that says what to do."""
    line = str(error).partition("\n")[0]
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in line:
        return (
            f"out of memory ({line or type(error).__name__}); lower training.microbatch, or set "
            "resources.memory_per_worker to what is free so that the plan uses more nodes"
        )
    return f"{type(error).__name__}: {line}"
