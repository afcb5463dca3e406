"""What a worker tries before it is ready: a micro-batch through a layer of each kind, on its
device, as training and evaluations run them.

What a node alone lacks for a user's code (a package, a file, room on its device) costs no step so.
That code was looked at where the job was submitted: what fails here is taken for the node's fault,
and the master fails the job where most nodes say the same. What is to be compiled is by this. A
plan may put any layer on any worker, so all kinds are, and no step waits for the compiler. Nor does
it wait, where the layers are the project's own, for what a process spends on its first pass: a
fork's pages are copied as they are touched, and torch sets up each operator at its first call.
Must not know what compiling is.
"""

import faulthandler
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Timer

import torch

from oobleck.host.ipc.messages import Failed
from oobleck.planner.job.own import OwnModelSpec
from oobleck.planner.job.spec import JobSpec
from oobleck.worker.models.compiled import compiling
from oobleck.worker.models.own import is_compiled
from oobleck.worker.profiling.measure_layers import pass_once
from oobleck.worker.runtime import heap
from oobleck.worker.runtime.control import Control
from oobleck.worker.runtime.errors import JobError, NodeError, for_want_of_memory
from oobleck.worker.state.layout import layer_sizes

log = logging.getLogger(__name__)

#: Of a layer's numbers and a micro-batch's tokens: what takes a core some 0.1 s.
_MOST_PRODUCTS = 1 << 29

#: The agent waits a little longer for a worker to be ready.
MOST_S = 110.0


@contextmanager
def on_this_node(control: Control, most_s: float | None) -> Iterator[None]:
    """What is wrong with the job's code within is this node's fault, and so is code that has not
    ended after `most_s`: the agent is told so, and the process ends. Raises NodeError."""
    timer = None if most_s is None else Timer(most_s, _give_up, (control, most_s))
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield
    except JobError as error:
        cause = error.__cause__
        if cause is None:  # it says what to do
            raise NodeError(str(error)) from error
        log.exception("the job's code failed on this node")
        raise NodeError(f"{error}; {_fix(cause)}") from error
    finally:
        if timer is not None:
            timer.cancel()


def _fix(cause: BaseException) -> str:
    if isinstance(cause, ModuleNotFoundError) and cause.name:
        return f"install {cause.name.partition('.')[0]} on every node"
    return "give every node the same packages and files, or correct the code"


def _give_up(control: Control, most_s: float) -> None:
    """In a thread of its own."""
    faulthandler.dump_traceback()
    message = (
        f"the job's code has not ended on this node for {most_s:g} s, before the first step; the "
        "log has the lines that it is at"
    )
    control.report(Failed(kind="node", message=message))
    os._exit(1)


def preflight(
    job: JobSpec, device: torch.device, *, passed: bool = False, workers: int = 1
) -> None:
    """Try the layers and the optimizer. `passed`: a process before this one has done so; of what is
    the user's, only what is to be compiled is tried again. `workers`: of this node, among which a
    layer may be shared. Raises JobError where the code fails, NodeError where this node lacks
    something else."""
    model = job.model
    own = isinstance(model, OwnModelSpec) or job.training.optimizer.code is not None
    if own:
        tried = set() if passed else set(model.examples)
    else:
        tried = {layer for layer in model.examples if _takes_a_moment(job, layer)}
    compiled = set()
    if job.training.compile and isinstance(model, OwnModelSpec):
        compiled = {layer for layer in model.examples if is_compiled(model, layer)}
    began = time.monotonic()
    with compiling(device) if compiled else nullcontext():
        for layer in sorted(tried | compiled):
            _try(job, layer, device, workers)
    if tried or compiled:
        heap.give_back()  # else it would count as what was there before the layers
        seconds = round(time.monotonic() - began, 1)
        told = {"kinds": len(tried), "compiled": len(compiled), "seconds": seconds}
        log.info("tried layers", extra=told)


def _takes_a_moment(job: JobSpec, layer: int) -> bool:
    numbers = layer_sizes(job.model, job.training.optimizer.no_decay)[layer]
    return numbers * job.training.microbatch * job.model.row_tokens <= _MOST_PRODUCTS


def _try(job: JobSpec, layer: int, device: torch.device, workers: int) -> None:
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
    except (RuntimeError, MemoryError) as error:
        if not for_want_of_memory(error):
            raise
        if workers > 1 and job.model.may_share(layer):
            return
        what = str(error).partition("\n")[0] or type(error).__name__
        raise NodeError(
            f"model: layer {layer} alone has no room on this node's {device} ({what}); free its "
            "memory, or lower training.microbatch"
        ) from error


def _is_of_the_compiler(error: BaseException | None) -> bool:
    """Rather than of the layer: torch imports these modules where it compiles."""
    return type(error).__module__.startswith(("torch._dynamo.", "torch._inductor."))
