"""Trial of the job's code before the worker is ready: a micro-batch through each kind of layer.

It runs on the worker's device, as training and evaluations run layers. The user's layers get a row
of the data and the initial weights. Layers of one kind have the same input and output shapes, so
the output of one serves as that of another.

So a package, a file or memory that only this node lacks costs no step. The code was checked where
the job was submitted, so a failure here is taken for the node's fault; the master fails the job if
most nodes report the same.

The run also compiles the layers that are to be compiled, for each number of workers that may share
them. A plan may put any layer on any worker, so all kinds are compiled, and no step waits for the
compiler. For the project's own layers, no step waits for first-pass costs either: a fork's pages
are copied when first written, and torch sets up each operator at its first call. A GPU's kernels
are loaded here too, while no communicator waits there for its peer. Must not know how compiling
works.
"""

import faulthandler
import logging
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import Timer

import torch
from torch import Tensor

from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import Failed
from oobleck.core.sharing import sharing_sizes
from oobleck.worker.data.dataset import Dataset
from oobleck.worker.data.opening import first_row
from oobleck.worker.data.own import OwnDataset
from oobleck.worker.models.compiled import compiling
from oobleck.worker.models.tree import Tree, map_tensors
from oobleck.worker.profiling.measure_layers import pass_once
from oobleck.worker.runtime import memory
from oobleck.worker.runtime.code import Ended, end_process
from oobleck.worker.runtime.control import Control
from oobleck.worker.runtime.errors import JobError, NodeError, for_want_of_memory
from oobleck.worker.state.layout import layer_sizes

log = logging.getLogger(__name__)

#: Numbers of a layer times tokens of a micro-batch that a core computes in about 0.1 s.
_MOST_PRODUCTS = 1 << 29
#: Time before the deadline at which a worker that is not ready reports why.
MARGIN_S = 10.0


def has_own_code(job: JobSpec) -> bool:
    """Return whether the job has code of the user's to try.

    A job's data has such code only if its model has, too.
    """
    return isinstance(job.model, OwnModelSpec) or job.training.optimizer.code is not None


@contextmanager
def on_this_node(job: JobSpec, control: Control, ready_by: float | None) -> Iterator[None]:
    """Treat errors in the block as this node's fault, if the job has code of the user's.

    Code that is still running `MARGIN_S` before `ready_by` (monotonic clock) is the node's fault
    too: this is reported to the agent, and the process ends. Raise NodeError; let Ended pass,
    which is the job's fault.
    """
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
        if cause is None:  # its message says what to do
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
    """Report that the job's code is still running, and end the process; runs in its own thread."""
    faulthandler.dump_traceback()
    message = (
        f"the job's code is still running on this machine after {round(most_s, 1):g} s, before the "
        "first step; the log has its stack"
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
    """Try the layers and the optimizer.

    `passed`: another process of this host has done so; then the user's code is tried again only if
    layers are compiled, or on a GPU. `workers`: workers of this node, which may share a layer.
    Raise DataError or JobError if the code fails, NodeError if this node lacks something else.
    """
    model = job.model
    compiled = {n for n in model.examples if job.training.compile and model.compiles(n)}
    on_gpu = device.type == "cuda"
    if has_own_code(job) and passed and not compiled and not on_gpu:
        return
    began = time.monotonic()
    with compiling(device) if compiled else nullcontext():
        if has_own_code(job):
            tried = _try_in_turn(job, device, dataset, workers, compiled)
        else:
            wanted = set(model.examples) if on_gpu else compiled
            short = [n for n in model.examples if n in wanted or _takes_a_moment(job, n)]
            for layer in short:
                _try(job, layer, device, workers, None, compiled=layer in compiled)
            tried = len(short)
    memory.give_back()  # or it would count as memory in use before the layers
    seconds = round(time.monotonic() - began, 1)
    fields = {"kinds": tried, "compiled": len(compiled), "seconds": seconds}
    log.info("tried layers", extra=fields)


def _try_in_turn(
    job: JobSpec,
    device: torch.device,
    dataset: Dataset | OwnDataset,
    workers: int,
    compiled: Container[int],
) -> int:
    """Try a layer of each kind in turn; return how many were tried."""
    model, tried = job.model, 0
    repeated = partial(_repeated, times=job.training.microbatch)
    inputs, targets = (map_tensors(repeated, side) for side in first_row(job, dataset))
    #: Outputs by kind, in host memory.
    outputs: dict[int, Tensor] = {}
    for layer in model.examples:
        given = outputs.get(model.order[layer - 1]) if layer else inputs
        # The layer below may not fit here. Then this one gets random rows, which may be invalid.
        rows = None if given is None else (given, targets)
        try:
            output = _try(job, layer, device, workers, rows, compiled=layer in compiled)
        except JobError:
            if rows is not None:
                raise
            log.info("a layer does not take random rows", exc_info=True)
            continue
        tried += 1
        if output is not None and rows is not None:
            outputs[model.order[layer]] = output
    return tried


def _takes_a_moment(job: JobSpec, layer: int) -> bool:
    numbers = layer_sizes(job.model, job.training.optimizer.no_decay)[layer]
    return numbers * job.training.microbatch * job.model.row_tokens <= _MOST_PRODUCTS


def _repeated(rows: Tensor, times: int) -> Tensor:
    return rows.repeat(times, *[1] * (rows.dim() - 1))


def _try(
    job: JobSpec,
    layer: int,
    device: torch.device,
    workers: int,
    given: tuple[Tree, Tree] | None,
    *,
    compiled: bool,
) -> Tensor | None:
    """Return the layer's output in host memory, as if received. None: the layer does not fit here,
    but workers may share it.

    It is tried with fewer rows, as of one of several workers that share it, if it does not fit
    otherwise. So it is anyway if it is `compiled` or runs kernels of a GPU: other rows need other
    code.
    """
    again = compiled or device.type == "cuda"
    shared = job.model.may_share(layer)
    output: Tensor | None = None
    for sharing in sharing_sizes(job.training.microbatch, workers if shared else 1):
        try:
            passed = pass_once(job, layer, device, given, sharing=sharing).cpu().contiguous()
        except (JobError, RuntimeError, MemoryError) as error:
            _raise_unless_short(error, layer)
            if workers > 1 and shared:
                continue
            what = str(error).partition("\n")[0] or type(error).__name__
            raise NodeError(
                f"model: layer {layer} alone does not fit on this node's {device} ({what}); free "
                "its memory, or lower training.microbatch"
            ) from error
        output = _repeated(passed, sharing) if output is None else output
        if not again:
            break
    return output


def _raise_unless_short(error: Exception, layer: int) -> None:
    """Raise an error of a layer, unless memory is short."""
    cause = error.__cause__ if isinstance(error, JobError) else error
    if _is_of_the_compiler(cause):
        log.error("a layer cannot be compiled", exc_info=error)
        reason = " ".join(str(cause).split())[:200]
        raise NodeError(
            f"training.compile: layer {layer} cannot be compiled on this machine: {reason}; the "
            "log has the whole error; correct it, or leave the key out"
        ) from error
    if not for_want_of_memory(error):
        raise error


def _is_of_the_compiler(error: BaseException | None) -> bool:
    """Return whether the compiler failed, not the layer: these torch modules compile."""
    return type(error).__module__.startswith(("torch._dynamo.", "torch._inductor."))
