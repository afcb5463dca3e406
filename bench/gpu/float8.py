"""Linear layer of a large model in float8 beside the same in bfloat16: its speed, compiled and not,
and its error."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from oobleck.core.orders import Finding
from oobleck.worker.models.base import Linear, narrow_products
from oobleck.worker.models.compiled import compiled, load_compiler
from oobleck.worker.models.float8 import RECIPES
from oobleck.worker.runtime.device import board_name, has_queue, no_float8

#: Tokens, inputs and outputs: of a Llama 3 8B's MLP, and of a try on a CPU.
_LARGE, _SMALL = (8192, 4096, 14336), (32, 64, 96)
_ROUNDS = 20
#: Relative error of products whose factors have 3 bits of mantissa (some 0.04), and of gradients
#: with 2 (some 0.07); more is a fault.
_MOST_ERROR = 0.1
#: A compiled layer that gains less is not worth its error.
_LEAST_GAIN = 1.1

Pass = Callable[[], Sequence[Tensor]]


def float8(devices: Sequence[str]) -> Iterator[Finding]:
    """Measure each recipe's forward and backward beside bfloat16's."""
    place = torch.device(devices[0])
    if why := no_float8(place):
        fix = "train in bf16 on it"
        yield Finding(check="float8", level="warn", what=f"{place}: {why}", fix=fix)
        return
    sizes = _LARGE if has_queue(place) else _SMALL
    exact = _once(_pass(place, sizes, None, wide=True))
    if has_queue(place):
        load_compiler()
    with torch.compiler.set_stance("default"):
        for compiles in (False, True) if has_queue(place) else (False,):
            base_s = _seconds(_pass(place, sizes, None, compiles=compiles), place)
            for recipe in RECIPES:
                run = _pass(place, sizes, recipe, compiles=compiles)
                errors = {
                    name: float((found.double() - true.double()).norm() / true.double().norm())
                    for (name, true), found in zip(exact.items(), run(), strict=True)
                }
                gain = base_s / _seconds(run, place)
                way = "compiled" if compiles else "not compiled"
                yield judge(
                    f"{place} ({board_name(place)}): {recipe}, {way}",
                    gain=gain,
                    errors=errors,
                    judged=compiles,
                )


def _once(run: Pass) -> Mapping[str, Tensor]:
    return dict(zip(("output", "input's gradient", "weight's gradient"), run(), strict=True))


def _pass(
    place: torch.device,
    sizes: tuple[int, int, int],
    recipe: str | None,
    *,
    compiles: bool = False,
    wide: bool = False,
) -> Pass:
    """Return a forward and backward of one layer, on the same numbers each time. `wide`: in
    float32; None: in bfloat16."""
    tokens, inputs, outputs = sizes
    draws = torch.Generator().manual_seed(0)
    x, gradient, weight = (
        torch.randn(shape, generator=draws).bfloat16().to(place, torch.float32 if wide else None)
        for shape in ((tokens, inputs), (tokens, outputs), (outputs, inputs))
    )
    layer = Linear(inputs, outputs)
    layer.weight = nn.Parameter(weight)
    if recipe is not None:
        narrow_products(layer, RECIPES[recipe])  # type: ignore[index]  # one of its keys
    call = compiled() if compiles else lambda module, given: module(given)
    x.requires_grad_()

    def run() -> Sequence[Tensor]:
        x.grad = layer.weight.grad = None
        output = call(layer, x)
        assert isinstance(output, Tensor)
        output.backward(gradient)  # type: ignore[no-untyped-call]  # torch's
        assert x.grad is not None
        assert layer.weight.grad is not None
        return output.detach(), x.grad, layer.weight.grad

    return run


def _seconds(run: Pass, place: torch.device) -> float:
    """Return the seconds of a pass, after some that are not timed."""
    board = torch.get_device_module(place)
    for _ in range(3):
        run()
    board.synchronize(place)
    began = time.perf_counter()
    for _ in range(_ROUNDS):
        run()
    board.synchronize(place)
    return (time.perf_counter() - began) / _ROUNDS


def judge(what: str, *, gain: float, errors: Mapping[str, float], judged: bool) -> Finding:
    """Judge a recipe. `gain`: its speed to that of bfloat16; `judged`: whether that counts."""
    figures = {"gain": gain, **errors}
    each = ", ".join(f"{name} {error:.3f}" for name, error in errors.items())
    what += f": {gain:.2f} times as fast as bf16; relative errors: {each}"
    if not all(error <= _MOST_ERROR for error in errors.values()):
        fix = "do not train in fp8 with this torch and driver; report the figures"
        return Finding(check="float8", level="fail", what=what, fix=fix, figures=figures)
    if judged and gain < _LEAST_GAIN:
        fix = "train in bf16: this layer gains nothing"
        return Finding(check="float8", level="slow", what=what, fix=fix, figures=figures)
    return Finding(check="float8", level="pass", what=what, figures=figures)
