"""Checks of a layer that has just been built: kinds that cannot be trained, and precision.

Owns the names of torch's modules that are refused, each with the fix.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from oobleck.core.job.own import OwnModelSpec
from oobleck.core.job.spec import Precision
from oobleck.worker.models import own
from oobleck.worker.runtime.errors import JobError
from oobleck.worker.runtime.problem import Problem

#: Modules of torch.ao with integer weights; its other modules record ranges in each forward.
_QUANTISED = "torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.ao.nn.sparse"
#: Module and class of the part that torch's parametrizations.orthogonal adds.
_ORTHOGONAL = "torch.nn.utils.parametrizations", "_Orthogonal"


def build(spec: OwnModelSpec, layer: int, seed: int) -> nn.Module:
    """Build `layer` on the meta device. Raises JobError if that fails or it cannot be trained."""
    try:
        with torch.device("meta"), own.without_draws():
            module = own.build(spec, layer)
    except JobError as error:
        raise JobError(_why_not_built(spec, layer, seed) or str(error)) from error
    for sentence in _refused(module):
        raise JobError(f"model: layer {layer} ({type(module).__name__}) {sentence}")
    return module


def look_at_precision(where: str, module: nn.Module, precision: Precision) -> Iterator[Problem]:
    """Yield a warning if `module` was built with floats that the job's precision would change."""
    trained = torch.float64 if precision == "fp64" else torch.float32
    odd = {
        name: tensor.dtype
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if tensor.is_floating_point() and tensor.dtype not in (trained, torch.float32)
    }
    if not odd:
        return
    name, dtype = next(iter(odd.items()))
    more = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
    wanted = "fp64" if dtype == torch.float64 else "bf16"
    how = "leave dtype out"
    if wanted != precision:
        products = "" if wanted == "fp64" else ", which computes products in bfloat16"
        how += f", or set training.precision: {wanted}{products}"
    yield Problem(
        where=where,
        sentence=(
            f"builds {name} in {_name(dtype)}{more}, and it is kept and trained in "
            f"{_name(trained)}: training.precision ({precision}) holds for all layers; {how}"
        ),
        warning=True,
    )


def _refused(module: nn.Module) -> Iterator[str]:
    """Yield why a part of `module` cannot be trained, and the fix."""
    for path, part in module.named_modules():
        kind, origin = type(part).__name__, type(part).__module__
        what = f"has {path} ({kind})" if path else f"is {kind}"
        shapes = (*part.parameters(recurse=False), *part.buffers(recurse=False))
        if any(
            isinstance(tensor, UninitializedParameter | UninitializedBuffer) for tensor in shapes
        ):
            yield (
                f"{what}, whose shapes are known only after a forward, and layers are placed "
                f"before one; give its sizes, as nn.{kind.removeprefix('Lazy')}(in, out)"
            )
        elif (
            isinstance(part, nn.Embedding | nn.EmbeddingBag)
            and part.sparse
            and part.weight.requires_grad
        ):
            yield (
                f"{what} with sparse=True, and a sparse gradient is not summed over workers; "
                "leave sparse out: the gradient of the same numbers is dense then"
            )
        elif origin.startswith(_QUANTISED):
            yield (
                f"{what}, whose weights are quantised and have no gradient; train the float layer "
                f"(nn.{kind}), and quantise what 'oobleck checkpoint export' gives"
            )
        elif origin.startswith("torch.ao."):
            yield (
                f"{what} of torch.ao, which records ranges of its inputs in each forward: they "
                "would differ from worker to worker; train the float layer, and quantise what "
                "'oobleck checkpoint export' gives"
            )


def _why_not_built(spec: OwnModelSpec, layer: int, seed: int) -> str | None:
    """Return why a layer builds in memory but not on the meta device, and the fix; None if the
    reason is unknown."""
    try:
        module = own.build_real(spec, seed, layer)
    except JobError:
        return None
    where = f"model: layer {layer} ({type(module).__name__})"
    for sentence in _refused(module):
        return f"{where} {sentence}"
    for path, part in module.named_modules():
        if (type(part).__module__, type(part).__name__) == _ORTHOGONAL:
            name = path.partition("parametrizations.")[2].partition(".")[0]
            return (
                f"{where} has an orthogonal parametrization of {name}, which looks at numbers "
                "while it is built, and layers are built without any for their shapes; give "
                f'orthogonal(module, "{name}", use_trivialization=False), or remove it'
            )
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
