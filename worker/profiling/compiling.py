"""Compiles the layers of a job's model, of each kind one, as training and evaluations run them.

A plan may put any layer on any worker, so all kinds are compiled before a worker is ready: no step
waits for the compiler, the first one of a new plan included. Must not know what compiling is.
"""

import logging
import time

import torch

from oobleck.planner.job.own import OwnModelSpec
from oobleck.planner.job.spec import JobSpec
from oobleck.worker.models.compiled import compiling
from oobleck.worker.models.own import is_compiled
from oobleck.worker.profiling.measure_layers import pass_once
from oobleck.worker.runtime.errors import JobError, NodeError

log = logging.getLogger(__name__)


def compile_layers(job: JobSpec, device: torch.device) -> None:
    """Have all that is to be compiled of the job's model compiled. Raises NodeError where that
    cannot be done here, JobError where a layer fails."""
    model = job.model
    if not job.training.compile or not isinstance(model, OwnModelSpec):
        return
    wanted = [layer for layer in model.examples if is_compiled(model, layer)]
    if not wanted:
        return
    began = time.monotonic()
    with compiling(device):
        for layer in wanted:
            _compile(job, layer, device)
    seconds = time.monotonic() - began
    log.info("compiled layers", extra={"kinds": len(wanted), "seconds": round(seconds, 1)})


def _compile(job: JobSpec, layer: int, device: torch.device) -> None:
    try:
        pass_once(job, layer, device)
    except JobError as error:
        if not _is_of_the_compiler(error.__cause__):
            raise
        log.exception("a layer cannot be compiled")
        reason = " ".join(str(error.__cause__).split())[:200]
        raise NodeError(
            f"training.compile: layer {layer} cannot be compiled on this node: {reason}; the log "
            "has all of it; correct that, or leave the key out"
        ) from error


def _is_of_the_compiler(error: BaseException | None) -> bool:
    """Rather than of the layer: torch imports these modules where it compiles."""
    return type(error).__module__.startswith(("torch._dynamo.", "torch._inductor."))
