"""Hooks of a layer's parameters: whether a job can honour them, or needs whole micro-batches.

A hook by `register_hook` gets the gradient of one micro-batch, as in a plain loop that accumulates
gradients. If several workers share a stage, it gets the gradient of some rows only. There its
results for parts must add up to its result for their sum. A hook by
`register_post_accumulate_grad_hook` sees the sum so far, which several workers have only in parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn

from oobleck.core.job.description import Tie
from oobleck.core.job.own import OwnModelSpec
from oobleck.worker.models import own
from oobleck.worker.models.checks.rows import same
from oobleck.worker.models.linear import is_hooked
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError

#: Scales of the gradients that a hook is tried on; it may clamp at any of them.
_SCALES = (1e-6, 1e-3, 1.0, 1e3)


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
        """Return whether results for parts of a gradient add up to the result for their sum.
        Raises JobError if the hooks cannot be honoured."""
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
