"""Types of a job's numbers: those trained, those that layers compute with, those passed on.

Trained numbers are in float32 at least. In a bf16 job the blocks and the head of a built-in model
compute with a copy of their weights in bfloat16, made once per step, and pass bfloat16 on. Norms,
softmax and the loss sum in float32. The embedding stays in float32: a lookup is no faster in
another type, and its gradient is a sum over many rows. A user's model runs under autocast instead,
which rounds the inputs of each operation, because it is unknown which of its weights tolerate
rounding.

An fp8 job is a bf16 job whose linear layers multiply in float8, but for those of the last layer:
losses suffer most from rounding there.
"""

import torch

from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import FLOAT8_MULTIPLE, JobSpec, Precision
from oobleck.worker.models.float8 import RECIPES, Recipe, is_apart, multiply
from oobleck.worker.runtime.device import no_float8
from oobleck.worker.runtime.errors import NodeError


def state_dtype(precision: Precision) -> torch.dtype:
    """Return the type of weights as they are trained, and of moments and gradients."""
    return torch.float64 if precision == "fp64" else torch.float32


def autocasts(job: JobSpec) -> bool:
    """Return whether layers run under autocast."""
    return job.training.narrow and not isinstance(job.model, ModelSpec)


def check(job: JobSpec, device: torch.device) -> None:
    """Raise NodeError if this torch cannot add a gradient to a sum of another type, or the device
    lacks the job's products."""
    if job.training.precision == "fp8" and (why := _no_float8(job, device)):
        raise NodeError(
            f"training.precision: fp8 needs products in float8, and {why}; set precision to bf16, "
            "or train on nodes that have them"
        )
    if stream_dtype(job) == torch.bfloat16 and not hasattr(torch.Tensor, "grad_dtype"):
        raise NodeError(
            f"training.precision: {job.training.precision} of a built-in model needs a torch whose "
            f"tensors have grad_dtype, and this machine has {torch.__version__}: install a newer "
            "one"
        )


def _no_float8(job: JobSpec, device: torch.device) -> str:
    """Return why the device lacks the job's products in float8; empty: it has them. They are tried,
    backward too, as kernels depend on the build of torch."""
    if why := no_float8(device):
        return why
    size = FLOAT8_MULTIPLE, FLOAT8_MULTIPLE
    factor = torch.zeros(size, dtype=torch.bfloat16, device=device, requires_grad=True)
    try:
        product = multiply(factor, factor, RECIPES[job.training.fp8_recipe])
        torch.autograd.grad(product, factor, torch.zeros_like(product))
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        return f"torch {torch.__version__} has none for this device ({reason})"
    return ""


def stream_dtype(job: JobSpec) -> torch.dtype:
    """Return the type of values passed between the layers of a built-in model."""
    narrow = job.training.narrow and isinstance(job.model, ModelSpec)
    return torch.bfloat16 if narrow else state_dtype(job.training.precision)


def sums_dtype(job: JobSpec) -> torch.dtype:
    """Return the type of gradients that are sent to be summed."""
    rounded = job.training.gradient_sums == "bf16"
    return torch.bfloat16 if rounded else state_dtype(job.training.precision)


def weights_dtype(job: JobSpec, layer: int) -> torch.dtype:
    """Return the type of the weights that a layer computes with."""
    return state_dtype(job.training.precision) if layer == 0 else stream_dtype(job)


def float8_recipe(job: JobSpec, layer: int) -> Recipe | None:
    """Return the recipe of a layer's products in float8; None: it has none.

    The last layer has none, unless it is built like another one, or is the only one.
    """
    order = job.model.order
    if job.training.precision != "fp8" or (order[layer] == order[-1] and is_apart(order)):
        return None
    return RECIPES[job.training.fp8_recipe]
