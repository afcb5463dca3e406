"""Checks of a layer that has just been built: kinds that cannot be trained, precision, hooks.

Owns the names of torch's modules that are refused, each with the fix.

A hook by `register_hook` gets the gradient of one micro-batch, as in a plain loop that accumulates
gradients. If several workers share a stage, it gets the gradient of some rows only. There its
results for parts must add up to its result for their sum; else the layer needs whole micro-batches.
A hook by `register_post_accumulate_grad_hook` sees the sum so far, which several workers have only
in parts.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from oobleck.core.job.description import Tie
from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.spec import FLOAT8_MULTIPLE, Precision
from oobleck.worker.models import own
from oobleck.worker.models.base import is_hooked, is_plain
from oobleck.worker.models.checks.rows import same
from oobleck.worker.models.float8 import takes
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError, Problem

#: Modules of torch.ao with integer weights; its other modules record ranges in each forward.
_QUANTISED = "torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.ao.nn.sparse"
#: Scales of the gradients that a hook is tried on; it may clamp at any of them.
_SCALES = (1e-6, 1e-3, 1.0, 1e3)
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
    """Yield a warning if the job's precision would change the type of floats that `module` was
    built with."""
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
    if wanted != ("bf16" if precision == "fp8" else precision):
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


def look_at_float8(spec: OwnModelSpec, layers: Sequence[int], seed: int) -> list[Problem]:
    """Return a warning for those of the layers that multiply in bfloat16 in an fp8 job, as their
    sizes do not fit; one for all that have the same such weights, as adapters in each block.
    `layers`: for each layer one of its kind. Raises JobError if nothing fits."""
    alike, fits = defaultdict[tuple[str, str], Counter[int]](Counter), False
    for layer, count in Counter(layers).items():
        module = build(spec, layer, seed)
        weights = {name: one.weight for name, one in module.named_modules() if is_plain(one)}
        odd = {name: weight for name, weight in weights.items() if not takes(weight)}
        fits |= len(odd) < len(weights)
        if odd:
            name, weight = next(iter(odd.items()))
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            what = f"{name or 'its weight'} {list(weight.shape)}{more}"
            alike[type(module).__name__, what][layer] += count
    if not fits:
        raise JobError(
            "training.precision: fp8 is for nn.Linear layers whose sizes are multiples of "
            f"{FLOAT8_MULTIPLE}, and the model has none before its last layer; set it to bf16"
        )
    return [
        Problem(
            where=f"layer {min(each)} ({kind})",
            sentence=(
                f"multiplies with {what} in bfloat16"
                + (f", in {each.total()} layers" if each.total() > 1 else "")
                + f": fp8 takes weights whose sizes are multiples of {FLOAT8_MULTIPLE}"
            ),
            warning=True,
        )
        for (kind, what), each in alike.items()
    ]


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


def are_wanted_whole(module: nn.Module, where: str) -> bool:
    """Return whether a hook of `module`, in host memory, needs whole micro-batches. Raises JobError
    if one cannot be honoured."""
    # Check all, without a short cut: any may raise.
    additive = [_Hooks(name, parameter, where).check() for name, parameter in _hooked(module)]
    return not all(additive)


def check_tied(spec: OwnModelSpec, seed: int, dtype: torch.dtype, tied: Sequence[Tie]) -> None:
    """Raise JobError if layers that share a parameter have unlike hooks on it. A hook there must
    also give results for two gradients that add up to its result for their sum."""
    for tie in tied:
        with torch.device("meta"), own.without_draws():
            modules = [own.build(spec, layer) for layer in tie.layers]
        for names in zip(*tie.names, strict=True):
            if any(
                is_hooked(module.get_parameter(name))
                for module, name in zip(modules, names, strict=True)
            ):
                _check_shared(spec, seed, dtype, tie.layers, names)


def _check_shared(
    spec: OwnModelSpec,
    seed: int,
    dtype: torch.dtype,
    layers: Sequence[int],
    names: Sequence[str],
) -> None:
    places = [f"{layer}.{name}" for layer, name in zip(layers, names, strict=True)]
    results = []
    for layer, name, place in zip(layers, names, places, strict=True):
        module = own.in_precision(own.build_real(spec, seed, layer), dtype)
        hooks = _Hooks(name, module.get_parameter(name), f"layer {layer}")
        if not hooks.check():
            raise JobError(
                f"model: the hook of {place} does not give the same for the sum of two gradients "
                f"as for each, and {' and '.join(places)} are one parameter whose gradients are "
                "computed by layer; leave out the hook, or the tie"
            )
        results.append(hooks.result())
    if not all(same(results[0], result) for result in results):
        raise JobError(
            f"model: {' and '.join(places)} are one parameter, and their hooks change a gradient "
            "in different ways; register the same hook in each of these layers"
        )


def _hooked(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in module.named_parameters() if p.requires_grad and is_hooked(p)]


@dataclass(frozen=True, slots=True)
class _Hooks:
    """The hooks of one parameter, if any."""

    name: str
    parameter: nn.Parameter
    where: str

    def check(self) -> bool:
        """Return whether the hooks are additive: their results for parts of a gradient add up to
        the result for the sum. Raises JobError if they cannot be honoured."""
        additive = True
        for scale in _SCALES:
            one, other = self._drawn(scale)
            apart = self._after(one) + self._after(other)
            if not same(apart, self._after(one) + self._after(other)):
                self._refuse("gives something else when it is called again")
            if not same(apart, self._after(one, other)):
                self._refuse(
                    "depends on the sum of gradients so far, of which each worker has a part; "
                    "change the gradient of a micro-batch (register_hook), or have the optimizer "
                    "do it (training.clip, an optimizer of your own)"
                )
            lost = one.clone()
            lost.view(-1)[0] = torch.nan
            for first in (one, lost):
                whole = self._after(first + other)
                additive &= same(self._after(first) + self._after(other), whole)
        return additive

    def result(self) -> Tensor:
        """Return the hooks' result for a fixed gradient, the same for all parameters of a shape."""
        return self._after(self._drawn(1.0)[0])

    def _drawn(self, scale: float) -> tuple[Tensor, Tensor]:
        draws = torch.Generator().manual_seed(0)
        shape, dtype = self.parameter.shape, self.parameter.dtype
        one, other = (torch.randn(shape, generator=draws, dtype=dtype) for _ in range(2))
        return one * scale, other * scale

    def _after(self, *gradients: Tensor) -> Tensor:
        """Return the accumulated gradient after backwards with these gradients in turn."""
        parameter = self.parameter
        weights, total = parameter.detach().clone(), torch.zeros_like(parameter)
        before = torch.get_rng_state()
        parameter.grad = total
        try:
            with code.running(f"{self.where}: the hook of {self.name}"):
                for gradient in gradients:
                    parameter.backward(gradient.clone())  # type: ignore[no-untyped-call]  # torch's
        except Exception as error:
            raise JobError(
                f"model: {self.where}: the hook of {self.name} failed: {code.described(error)}"
            ) from error
        found, parameter.grad = parameter.grad, None
        if found is None or found.data_ptr() != total.data_ptr():
            self._refuse(
                "puts another tensor into .grad, or none; write into it, as in p.grad.mul_(mask)"
            )
        if not torch.equal(weights, parameter.detach()):
            self._refuse("changes the weight; that is the optimizer's")
        if not torch.equal(before, torch.get_rng_state()):
            self._refuse("draws random numbers; a layer may in its forward, a hook may not")
        return total.detach()

    def _refuse(self, why: str) -> NoReturn:
        raise JobError(f"model: {self.where}: the hook of {self.name} {why}")
