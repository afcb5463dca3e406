"""Timing of checkpoints: when to take one, and which worker writes which layer.

Workers agree in the votes of their steps. A checkpoint is due every so many steps, when the plan
holds too few copies of a layer, and when an operator asks for one. All workers begin it after the
same step, and only after the last one has ended everywhere.

Training goes on while this worker's layers are copied (`snapshots`) and written (`writer`). The
next step's update waits for the copies. Layers that several workers share are copied before the
current step returns.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from oobleck.core.checkpoint import folder_name
from oobleck.core.ids import WorkerId
from oobleck.core.messages import Assign
from oobleck.host.storage.folder import open_folder
from oobleck.planner.programs.balance import writers
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.worker.checkpoint.output import collect
from oobleck.worker.checkpoint.snapshots import Ring, Snapshots
from oobleck.worker.checkpoint.writer import CheckpointWriter, Order
from oobleck.worker.context import WorkerContext
from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.errors import JobError, TransportError
from oobleck.worker.state.layout import layer_sizes
from oobleck.worker.step import vote
from oobleck.worker.transport.transport import Transport

log = logging.getLogger(__name__)

_POLL_S = 0.05
#: Pause between attempts at the last checkpoint, which must not be lost; and their number.
_RETRY_S, _ATTEMPTS = 10.0, 7


def _wait(snapshots: Snapshots) -> None:
    with pulse.FILES:
        snapshots.wait()


class Saver:
    """Saver of one worker: its part in the checkpoints of its job."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._job = context.job
        self._spec = context.job.checkpoint
        self._worker = context.worker
        self._control = context.control
        self._sizes = layer_sizes(context.job.model, context.job.training.optimizer.no_decay)
        self._assign: Assign | None = None
        self._transport: Transport | None = None
        #: The newest checkpoint that was begun, and whether its end is still to be agreed on.
        self._last: CheckpointWriter | None = None
        self._open = False
        #: Whether a checkpoint has been due since an earlier step.
        self._overdue = False
        self._at_risk = False
        #: Created with the first checkpoint, because it takes pinned memory.
        self._ring: Ring | None = None
        #: Newest request that was answered, and newest saved step that this worker knows of.
        self._served = 0
        self.saved_step = 0

    def enter(self, assign: Assign, transport: Transport) -> None:
        """Continue in another generation.

        A save continues if no worker was lost. After a loss its writers may be gone, so it is given
        up, and the next step is saved instead.
        """
        if self._spec is None:
            return
        if self._open and self._last is not None and not self._goes_on(self._last, assign):
            log.warning("checkpoint given up", extra={"step": self._last.order.step})
            self._last.abandon(disturbed=True)
            self._open, self._overdue = False, True
        self._assign, self._transport = assign, transport
        progress = self._context.progress
        if progress.lineage == assign.plan.generation:  # the checkpoint that the job resumed from
            self.saved_step = progress.committed
        at_risk = can_lose(assign.plan) < self._job.fault_tolerance
        self._overdue = self._overdue or (at_risk and not self._at_risk)
        self._at_risk = at_risk

    @staticmethod
    def _goes_on(saving: CheckpointWriter, assign: Assign) -> bool:
        """Return whether all writers of `saving` stay until its end."""
        writers = {worker for worker, _ in saving.order.writers}
        return assign.boundary and writers <= set(assign.plan.workers)

    def intent(self, step: int) -> vote.SaveVote:
        """Return this worker's share in the vote on `step`."""
        if self._spec is None:
            return vote.SaveVote()
        wish = self._control.save_wish
        under_way = self._last.order.wish if self._open and self._last is not None else 0
        return replace(
            self._vote(),
            due=self._overdue or (self._spec.every != "auto" and step % self._spec.every == 0),
            wish=wish if wish > max(self._served, under_way) else 0,
        )

    def _vote(self) -> vote.SaveVote:
        """Return whether the last checkpoint is still being written, and whether it failed."""
        last = self._last
        if last is None:
            return vote.SaveVote()
        busy = last.busy  # read before `failed`, which is final only once the thread has ended
        return vote.SaveVote(busy=busy, failed=self._open and last.failed)

    def committed(self, step: int, verdict: vote.SaveVerdict) -> None:
        """React to the vote on `step`, which was applied."""
        if self._spec is None:
            return
        if self._open:
            self._follow(verdict)
        if not verdict.due:
            return
        if verdict.busy:
            self._overdue = self._overdue or not verdict.wish
            return
        self._begin(step, verdict.wish)

    def _follow(self, verdict: vote.SaveVerdict) -> None:
        last = self._last
        assert last is not None, "an open checkpoint has begun"
        if verdict.failed:
            last.abandon(disturbed=False)
        if verdict.busy <= 1:
            last.others_are_done()
        if verdict.busy == 0:
            self._open = False
            self._served = max(self._served, last.order.wish)
            if not verdict.failed:
                self.saved_step = last.order.step

    def _begin(self, step: int, wish: int) -> None:
        assign, spec = self._assign, self._spec
        assert assign is not None, "steps are run in a generation"
        assert spec is not None, "only asked of jobs with checkpoints"
        plan = assign.plan
        chosen = writers(plan, self._sizes)
        order = Order(
            job=self._job,
            job_id=self._context.job_id,
            step=step,
            name=folder_name(step, assign.rendezvous.prefix),
            data=self._context.data.hex(),
            base=self._context.base.hex(),
            missed=self._context.progress.missed,
            wish=wish,
            writers=tuple((worker, chosen[worker]) for worker in plan.workers),
            rank=plan.workers.index(self._worker),
            recorder=self._context.progress.recorder,
        )
        try:
            with pulse.FILES:
                snapshots = self._snapshots(chosen)
        except TransportError as error:
            # The step is committed nevertheless; the next step detects the loss.
            log.warning("checkpoint given up", extra={"step": step, "reason": str(error)})
            self._overdue = True
            return
        reached = partial(
            self._context.faults.reached, "before:LayerFile", generation=plan.generation, step=step
        )
        self._last = CheckpointWriter(
            order,
            open_folder(spec.path),
            snapshots,
            self._context.records,
            report=self._control.report,
            reached=reached,
        )
        self._context.state.read_until(partial(_wait, snapshots))
        self._open, self._overdue = True, False

    def _snapshots(self, chosen: Mapping[WorkerId, tuple[int, ...]]) -> Snapshots:
        """Return snapshots of the layers that this worker writes. Raise TransportError."""
        assert self._assign is not None, "steps are run in a generation"
        assert self._transport is not None, "it comes with the assignment"
        state, plan, transport = self._context.state, self._assign.plan, self._transport
        ring = self._ring = self._ring or Ring(self._context.connector.device)
        writer_of = {layer: writer for writer, layers in chosen.items() for layer in layers}
        found = Snapshots(ring)
        for layer, writer in sorted(writer_of.items()):
            if plan.hold_of(writer, layer).workers == (self._worker,):
                found.add(layer, state.layers[layer].storage)
                continue
            whole = collect(
                state, layer, transport, plan, worker=self._worker, writer=writer, copy=ring.copy
            )
            if whole is not None:
                found.add_copy(layer, whole)
        return found

    def finish(self, transport: Transport, step: int, *, needed: bool) -> None:
        """Finish the save under way and save the state after the last step.

        If that is `needed`, make up to `_ATTEMPTS` attempts. No steps follow, so gathers replace
        the votes. Raise JobError if this worker failed to write its part in the last attempt,
        TransportError or Superseded.
        """
        if self._spec is None:
            return
        self._conclude(transport)
        attempts = 0
        while self._newest_saved(transport) < step and self._spec.at_end:
            assert self._assign is not None, "steps are run in a generation"
            self._begin(step, self._control.save_wish)
            self._conclude(transport)
            if not needed:
                return
            if self._newest_saved(transport) >= step:
                return
            attempts += 1
            # A worker without a problem continues, until it learns that another one has failed.
            if attempts >= _ATTEMPTS and self._last is not None and self._last.problem:
                raise JobError(
                    f"checkpoint: {self._last.problem}; make room there or make it writable, and "
                    f"submit the job again: the state of step {step} is not saved, {self._rest()}"
                )
            self._control.pause(self._assign.plan.generation, _RETRY_S)

    def _rest(self) -> str:
        """Return the rest of an error message, which says up to which step the state is saved."""
        return f"that of step {self.saved_step} is" if self.saved_step else "nor is an earlier one"

    def _newest_saved(self, transport: Transport) -> int:
        """Agree on the newest saved step.

        A worker that joined late knows of no earlier save.
        """
        gathered = transport.all_gather(torch.tensor([self.saved_step]))
        self.saved_step = max(int(row[0]) for row in gathered)
        return self.saved_step

    def _conclude(self, transport: Transport) -> None:
        """Wait until the last save has ended on all workers."""
        assert self._assign is not None, "steps are run in a generation"
        while True:
            own = self._vote()
            gathered = transport.all_gather(torch.tensor([own.busy, own.failed], dtype=torch.int64))
            busy, failed = torch.stack(gathered).sum(dim=0).tolist()
            if self._open:
                verdict = vote.SaveVerdict(due=False, wish=0, busy=busy, failed=failed > 0)
                self._follow(verdict)
            if not busy:
                return
            self._control.pause(self._assign.plan.generation, _POLL_S)
