"""Tries the job's code before the worker is ready: runs a micro-batch through a layer of each kind,
on the worker's device, as training and evaluations run them.

A user's layers get a row of the data and the initial weights. Layers of a kind take and give the
same shapes, so the output of one is passed on where another one's output would be.

So whatever this node alone lacks for the user's code (a package, a file, room on its device) costs
no step. That code was looked at where the job was submitted. A failure here is therefore taken for
the node's fault, and the master fails the job where most nodes report the same. The run also
compiles whatever is to be compiled. A plan may put any layer on any worker, so all kinds are
compiled, and no step waits for the compiler. Where the layers are the project's own, no step waits
either for what a process spends on its first pass: a fork's pages are copied as they are touched,
and torch sets up each operator at its first call. Must not know what compiling is."""

import faulthandler
import logging
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, nullcontext
from threading import Timer

import torch
from torch import Tensor

from oobleck.core.job.own import OwnModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import Failed
from oobleck.worker.data.dataset import Dataset
from oobleck.worker.data.opening import first_row
from oobleck.worker.data.own import OwnDataset
from oobleck.worker.models.compiled import compiling
from oobleck.worker.models.own import is_compiled
from oobleck.worker.models.tree import Tree, map_tensors
from oobleck.worker.profiling.measure_layers import pass_once
from oobleck.worker.runtime import heap
from oobleck.worker.runtime.code import Ended, end_process
from oobleck.worker.runtime.control import Control
from oobleck.worker.runtime.errors import JobError, NodeError, for_want_of_memory
from oobleck.worker.state.layout import layer_sizes

log = logging.getLogger(__name__)

#: Of a layer's numbers and a micro-batch's tokens: what takes a core some 0.1 s.
_MOST_PRODUCTS = 1 << 29
#: So long before it would be killed a worker that is not ready says why.
MARGIN_S = 10.0


def has_own_code(job: JobSpec) -> bool:
    """Return whether the job has code of the user's to try. Data have any only beside a model that
    has."""
    return isinstance(job.model, OwnModelSpec) or job.training.optimizer.code is not None


@contextmanager
def on_this_node(job: JobSpec, control: Control, ready_by: float | None) -> Iterator[None]:
    """Take errors within for this node's fault, if the job has code of its user's. Code that has
    not ended `MARGIN_S` before `ready_by` (on the monotonic clock) is the node's fault, too: the
    agent is told so, and the process ends. Raises NodeError; passes Ended on, as that is the job's
    fault."""
    if not has_own_code(job):
        yield
        return
    timer = None
    if ready_by is not None:
        most_s = max(0.0, ready_by - MARGIN_S - time.monotonic())
        timer = Timer(most_s, _give_up, (control, most_s))
        timer.daemon = True
        timer.start()
    try:
        yield
    except Ended:
        raise
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
    """Report that the job's code has not ended, and end the process. Runs in a thread of its
    own."""
    faulthandler.dump_traceback()
    message = (
        f"the job's code has not ended on this node for {round(most_s, 1):g} s, before the first "
        "step; the log has the lines that it is at"
    )
    control.report(Failed(kind="node", message=message))
    end_process(1)


def preflight(
    job: JobSpec,
    device: torch.device,
    dataset: Dataset | OwnDataset,
    *,
    passed: bool = False,
    workers: int = 1,
) -> None:
    """Try the layers and the optimizer. `dataset`: the job's. `passed`: another process of this
    host has done so; of what is the user's, all is tried again only where layers are compiled.
    `workers`: of this node, among which a layer may be shared. Raises DataError, JobError where the
    code fails, NodeError where this node lacks something else."""
    model = job.model
    compiled = set()
    if job.training.compile and isinstance(model, OwnModelSpec):
        compiled = {layer for layer in model.examples if is_compiled(model, layer)}
    if has_own_code(job) and passed and not compiled:
        return
    began = time.monotonic()
    with compiling(device) if compiled else nullcontext():
        if has_own_code(job):
            tried = _try_in_turn(job, device, dataset, workers, compiled)
        else:
            short = [layer for layer in model.examples if _takes_a_moment(job, layer)]
            tried = len([_try(job, layer, device, workers, None) for layer in short])
    heap.give_back()  # else it would count as what was there before the layers
    seconds = round(time.monotonic() - began, 1)
    told = {"kinds": tried, "compiled": len(compiled), "seconds": seconds}
    log.info("tried layers", extra=told)


def _try_in_turn(
    job: JobSpec,
    device: torch.device,
    dataset: Dataset | OwnDataset,
    workers: int,
    compiled: Container[int],
) -> int:
    """Try a layer of each kind in turn. Return the number of layers tried."""
    model, tried = job.model, 0
    inputs, targets = (_repeated(side, job) for side in first_row(job, dataset))
    #: By kind, in host memory.
    outputs: dict[int, Tensor] = {}
    for layer in model.examples:
        given = outputs.get(model.order[layer - 1]) if layer else inputs
        if given is None and layer not in compiled:
            continue  # the one below has no room here, and made-up numbers may not do
        rows = None if given is None else (given, targets)
        output = _try(job, layer, device, workers, rows)
        tried += 1
        if output is not None and rows is not None:
            outputs[model.order[layer]] = output
    return tried


def _takes_a_moment(job: JobSpec, layer: int) -> bool:
    numbers = layer_sizes(job.model, job.training.optimizer.no_decay)[layer]
    return numbers * job.training.microbatch * job.model.row_tokens <= _MOST_PRODUCTS


def _repeated(rows: Tree, job: JobSpec) -> Tree:
    """Return a micro-batch made of one row (1, ...), repeated."""
    size = job.training.microbatch
    return map_tensors(lambda tensor: tensor.repeat(size, *[1] * (tensor.dim() - 1)), rows)


def _try(
    job: JobSpec,
    layer: int,
    device: torch.device,
    workers: int,
    given: tuple[Tree, Tree] | None,
) -> Tensor | None:
    """Return the layer's output, in host memory as if received. None: the layer has no room here
    alone, but may be shared."""
    try:
        return pass_once(job, layer, device, given).cpu().contiguous()
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
            return None
        what = str(error).partition("\n")[0] or type(error).__name__
        raise NodeError(
            f"model: layer {layer} alone has no room on this node's {device} ({what}); free its "
            "memory, or lower training.microbatch"
        ) from error


def _is_of_the_compiler(error: BaseException | None) -> bool:
    """Rather than of the layer: torch imports these modules where it compiles."""
    return type(error).__module__.startswith(("torch._dynamo.", "torch._inductor."))
