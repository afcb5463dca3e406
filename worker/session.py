"""Life of a worker: enter a generation, train in it until it ends, enter the next.

`Session` owns the reaction to each end of a generation. At the end of the process it decides whose
error that was: the node's, the user's or ours. The process and its layers outlive generations. Must
not know how workers join (`membership`) or agree (`recover`). `Training` owns what happens between
two steps.
"""

import logging
from collections.abc import Mapping, Sequence

import torch

from oobleck.core.ids import Generation, WorkerId
from oobleck.core.messages import (
    Assign,
    Committed,
    Failed,
    Finished,
    Launch,
    Measure,
    PhaseReached,
    Ready,
)
from oobleck.core.plan import Plan
from oobleck.core.redact import redact
from oobleck.core.units import comma_separated
from oobleck.host.token_file import DataError
from oobleck.planner.programs.compiler.own import OwnProgram
from oobleck.worker.checkpoint.output import write_result
from oobleck.worker.checkpoint.saver import Saver
from oobleck.worker.context import WorkerContext
from oobleck.worker.data.opening import Data, Prefetcher
from oobleck.worker.membership import Membership, join, join_handover, report_lost
from oobleck.worker.preparation.preparing import Preparing, compile_program
from oobleck.worker.profiling.measuring import Measuring
from oobleck.worker.recovery.forgiven import Forgiven
from oobleck.worker.recovery.recover import Recovery
from oobleck.worker.runtime import memory
from oobleck.worker.runtime.code import described
from oobleck.worker.runtime.control import Control
from oobleck.worker.runtime.device import take_place
from oobleck.worker.runtime.errors import (
    HelperLost,
    InvariantViolation,
    JobError,
    NodeError,
    Superseded,
    TransportError,
    for_want_of_memory,
    whose_fault,
)
from oobleck.worker.runtime.memory import MemoryMeter
from oobleck.worker.start import start
from oobleck.worker.step.evaluator import Evaluator
from oobleck.worker.step.executor import Executor, Redo
from oobleck.worker.step.salvage import Salvage
from oobleck.worker.step.vote import check_skipped
from oobleck.worker.transport.transport import Transport

log = logging.getLogger(__name__)


class Session:
    """Session of one worker process, from its launch to its stop."""

    def __init__(self, launch: Launch, control: Control) -> None:
        """Start the worker. Raise what `start` raises."""
        self._context, data = start(launch, control)
        context = self._context
        self._measuring = Measuring(context, launch.device_kind)
        self._recovery = Recovery(context)
        self._forgiven = Forgiven(
            context.worker, context.progress, context.connector.held_by_others
        )
        self._preparing = Preparing(context)
        self._training = Training(context, data, self._preparing, self._forgiven)
        #: Newest generation that this worker entered; 0: none.
        self._entered = Generation(0)
        #: Cards of that generation's workers, as far as the master knew them.
        self._cards: Mapping[WorkerId, str] = {}
        #: Membership in that generation; None before it joins and after it leaves.
        self._membership: Membership | None = None

    def run(self, pid: int) -> None:
        """Report ready and follow the agent's instructions until it sends Stop or dies."""
        context = self._context
        ready = Ready(pid=pid, card=context.links.card.text, data=context.inputs.hex())
        context.control.report(ready)
        wish = context.control.wait_next(self._entered)
        try:
            while True:
                wish = self._measure(wish) if isinstance(wish, Measure) else self._enter(wish)
        except torch.AcceleratorError as error:
            if self._forgiven.follows_a_loss(error, self._is_overruled):
                raise HelperLost(
                    f"{context.worker}: the GPU has failed at the loss of a worker ({error}), to "
                    "whose memory it may have written; the process is replaced"
                ) from error
            raise

    def _is_overruled(self) -> bool:
        return self._context.control.is_overruled(self._entered)

    def _measure(self, wish: Measure) -> Assign | Measure:
        """Measure as `wish` asks, outside any generation; return the next instruction."""
        self._context.connector.release()
        self._measuring.run(wish, self._entered)
        memory.give_back()  # or it would count as memory in use before the layers
        return self._context.control.wait_next(self._entered)

    def _enter(self, assign: Assign) -> Assign | Measure:
        """Take part in one generation; return the instruction that follows it."""
        context, generation = self._context, assign.plan.generation
        self._begin(assign)
        try:
            context.control.report(PhaseReached(generation=generation, phase="aborted"))
            received, fed = self._hand_over(assign) if assign.handover else (0, 0)
            if context.worker in assign.leaving:
                return self._step_aside(generation)
            following = self._train(assign, received, fed)
        except TransportError as error:
            self._forgiven.check_mapped(error, assign.rendezvous.cards)
            silent = self._membership.silent() if self._membership is not None else ()
            report_lost(context, generation, error, silent)
            self._leave(orderly=False)
        except (MemoryError, RuntimeError) as error:
            if not self._is_tried_again(error, generation):
                raise
            self._leave(orderly=False)
        except (DataError, JobError, NodeError):
            if self._membership is not None:
                # Others may fail in the same way: neither they nor this worker may report a loss.
                self._membership.stand_down()
            raise
        except Superseded as superseded:
            log.info("leaving generation", extra={"generation": generation, "why": str(superseded)})
            self._leave(orderly=True)
        else:
            self._leave(orderly=True)
            self._training.drop()
            return following
        self._training.settle()
        with context.timeline.phase("wait for the plan"):
            return context.control.wait_next(generation)

    def _begin(self, assign: Assign) -> None:
        """Begin the generation of `assign`, and drop work of earlier ones."""
        context, generation = self._context, assign.plan.generation
        self._entered, self._membership = generation, None
        context.control.answered()
        context.timeline.enter(generation)
        if assign.boundary and not context.state.layers:
            self._training.memory.begin()  # before state arrives
        self._preparing.enter(assign)
        before = self._cards
        self._cards = dict(zip(assign.plan.workers, assign.rendezvous.cards, strict=False))
        gone = [
            str(peer) for peer, card in before.items() if card and self._cards.get(peer) != card
        ]
        fields = {"gone": comma_separated(gone)} if gone else {}
        log.info("entering generation", extra={"generation": generation, **fields})

    def _hand_over(self, assign: Assign) -> tuple[int, int]:
        """Meet the workers that leave, and take over the layers that they alone hold.

        Return the bytes received here, and those fed in advance.
        """
        with self._context.timeline.phase("hand over"):
            standing = self._recovery.standing(assign.plan)
            membership = self._membership = join_handover(self._context, assign, standing)
            fed, standings = self._take_over(assign, membership)
            received = self._recovery.hand_over(assign, membership.transport, standings)
            membership.leave(orderly=True)
            self._membership = None
        return received, fed

    def _step_aside(self, generation: Generation) -> Assign | Measure:
        """Leave the plan, of which this worker is no longer a part."""
        log.info("left the plan", extra={"generation": generation})
        self._training.drop()
        self._context.connector.release()
        return self._context.control.wait_next(generation)

    def _train(self, assign: Assign, received: int, fed: int) -> Assign | Measure:
        """Join the plan's workers, recover, and train; return the instruction that follows.

        `received`, `fed`: bytes of state from the handover, and from feeding in advance.
        """
        context = self._context
        with context.timeline.phase("rendezvous"):
            own = self._preparing.own_program(assign.plan)
            standing = self._recovery.standing(assign.plan)
            membership = join(context, assign, standing, self._recovery.moving)
            self._membership = membership
        self._forgiven.enter(membership)
        if not assign.boundary and not context.state.layers:
            self._training.memory.begin()
        with membership.failing():
            more, standings = self._take_over(assign, membership)
            fed += more
            salvage = self._recovery.run(
                assign, membership.transport, standings, received=received + fed, fed=fed
            )
            self._preparing.drop()
            return self._training.run(assign, membership, own, salvage)

    def _take_over(self, assign: Assign, membership: Membership) -> tuple[int, Sequence[bytes]]:
        """Take over state that arrived in advance.

        Return its bytes and, at a boundary, all workers' announcements after it.
        """
        if not assign.boundary:
            return 0, membership.standings
        fed = self._preparing.take_over(membership.host)
        self._recovery.tell_received(assign.plan, fed)
        standing = self._recovery.standing(assign.plan)
        return fed, membership.transport.gather(standing)

    def _is_tried_again(self, error: Exception, generation: Generation) -> bool:
        """Return whether the work that lacked memory is tried again; then report it."""
        training = self._training.is_under_way
        if not self._forgiven.short_of_memory(error, training=training):
            return False
        self._training.drop()
        line = str(error).partition("\n")[0] or type(error).__name__
        what = "the step is tried" if training else "all meet"
        message = f"{self._context.worker} was out of memory ({line}); {what} once more"
        report_lost(self._context, generation, TransportError(message), left=True)
        return True

    def _leave(self, *, orderly: bool) -> None:
        membership, self._membership = self._membership, None
        self._forgiven.leave(after_a_loss=self._is_overruled() or not orderly)
        self._context.timeline.leave()
        with self._context.timeline.phase("leave"):
            if membership is not None:
                membership.leave(orderly=orderly)


def run(launch: Launch, control: Control, pid: int) -> int:
    """Run a worker's session; return the exit status."""
    try:
        take_place(launch)
        Session(launch, control).run(pid)
    except InvariantViolation as error:
        log.exception("invariant violated")
        control.report(Failed(kind="internal", message=redact(f"{type(error).__name__}: {error}")))
    except HelperLost as error:
        control.report(Failed(kind="internal", message=redact(str(error))))
    except (DataError, NodeError, OSError) as error:
        control.report(Failed(kind="node", message=redact(str(error))))
    except JobError as error:
        if error.__cause__ is not None:
            log.exception("the job's code failed")
        control.report(Failed(kind="user", message=redact(str(error))))
    except torch.AcceleratorError as error:
        # Every later use of the GPU by this process fails as well.
        log.exception("the device failed")
        message = f"{launch.worker}: the GPU has failed: {describe(error)}"
        control.report(Failed(kind=whose_fault(error), message=redact(message)))
    except BaseException as error:
        # Process boundary: whatever the model or the optimizer raised is the job's failure.
        log.exception("training failed")
        control.report(Failed(kind="user", message=redact(f"{launch.worker}: {describe(error)}")))
    return 1


def describe(error: BaseException) -> str:
    """Return one line that describes `error`; for a lack of memory, say what to change."""
    line = str(error).partition("\n")[0]
    if for_want_of_memory(error):
        return (
            f"out of memory ({line or type(error).__name__}); lower training.microbatch, or set "
            "resources.memory_per_worker to the free amount, so that the plan uses more nodes"
        )
    return described(error)


# ---- Training by one worker: the steps of each generation, and the end of the job.
#
# Owns what happens between two steps: evaluations, reports, and the switch to another plan. Must
# not know how generations begin or end.


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
