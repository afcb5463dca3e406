"""The result of a training, written by all workers together.

Owns who writes which layer, and that a write which failed is tried until it works: the result is
here and nowhere else. Must not know files (`output`) nor when training is over.
"""

import logging
from collections.abc import Callable
from functools import partial

import torch

from oobleck.host.ipc.messages import SaveFailed
from oobleck.planner.ids import Generation, WorkerId
from oobleck.planner.job.spec import JobSpec
from oobleck.planner.programs.plan import Plan
from oobleck.worker.checkpoint.output import OutputError, write_layers, write_manifest
from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.control import Control
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.transport.collect import collect
from oobleck.worker.transport.transport import Transport

log = logging.getLogger(__name__)

#: Between two attempts to write to a disk that did not take it.
_RETRY_S = 5.0


class ResultWriter:
    """One worker's part in writing the final weights."""

    def __init__(
        self, *, job: JobSpec, job_id: str, worker: WorkerId, state: ModelState, control: Control
    ) -> None:
        self._job = job
        self._job_id = job_id
        self._worker = worker
        self._state = state
        self._control = control

    def write(self, output: str, plan: Plan, transport: Transport, *, step: int) -> None:
        """Write the state after `step` to the directory `output`: each layer by its first owner,
        then the manifest.

        Every worker of `plan` calls it. Raises TransportError when one is lost, Superseded when a
        newer generation is wanted.
        """
        self._write_layers(output, plan, transport, step)
        transport.all_gather(torch.zeros(1))  # the manifest vouches for all layers
        if plan.workers[0] == self._worker:
            manifest = partial(write_manifest, output, self._job, self._job_id, step)
            self._write(manifest, plan.generation, step)

    def _write_layers(self, output: str, plan: Plan, transport: Transport, step: int) -> None:
        """One layer after the other, so that there is no more than one whole in host memory."""
        for layer in range(plan.layer_count):
            writer = plan.owners(layer)[0]
            whole = collect(self._state, layer, transport, plan, worker=self._worker, writer=writer)
            if whole is not None:
                state = ModelState(self._job, torch.device("cpu"))
                state.load(layer, whole, version=step)
                self._write(partial(write_layers, output, state, [layer]), plan.generation, step)

    def _write(self, write: Callable[[], None], generation: Generation, step: int) -> None:
        """Until it has worked."""
        while True:
            try:
                with pulse.FILES:
                    return write()
            except OutputError as error:
                log.warning("the output cannot be written", extra={"reason": error})
                self._control.report(SaveFailed(what="output", step=step, reason=str(error)))
                self._control.pause(generation, _RETRY_S)
