"""A model, data and an optimizer of a user whose code ends a process, or tries to, at one place.

`where` names the place, `how` the end, and `after` how many calls go well before it, in each
process: what looks at a job where it is submitted makes some fifty.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oobleck.model import Model

WIDTH = 4
_calls = 0


def end(how: str, after: int) -> None:
    global _calls
    _calls += 1
    if _calls <= after:
        return
    match how:
        case "SystemExit":
            sys.exit("I leave")
        case "KeyboardInterrupt":
            raise KeyboardInterrupt
        case "GeneratorExit":
            raise GeneratorExit
        case "os._exit":
            os._exit(0)
        case "exit":  # as a library does
            print("no thread is left", file=sys.stderr)  # noqa: T201
            ctypes.CDLL(None).exit(9)
        case "kill":
            os.kill(os.getpid(), 9)


class Points:
    def __init__(self, where: str = "", how: str = "", after: int = 0) -> None:
        self._where, self._end = where, partial(end, how, after)

    def __len__(self) -> int:
        if self._where == "length":
            self._end()
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._where == "sample":
            self._end()
        point = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return point, point.sum()


class _Ending(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, end: Any) -> Tensor:
        ctx.end = end
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.end()
        return gradient, None


class Layer(nn.Module):
    def __init__(self, where: str, how: str, after: int) -> None:
        super().__init__()
        self._where, self._end = where, partial(end, how, after)
        self.inner = nn.Linear(WIDTH, WIDTH)
        if where == "builder":
            self._end()

    def train(self, mode: bool = True) -> "Layer":
        if self._where == "train":
            self._end()
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self._where == "layer":
            self._end()
        x = self.inner(x)
        if self._where == "backward":
            ending: Tensor = _Ending.apply(x, self._end)
            return ending
        return x


def model(where: str = "", how: str = "", after: int = 0) -> Model:
    ends = partial(end, how, after)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if where == "loss":
            ends()
        return F.mse_loss(output[:, 0], target, reduction="none")

    def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
        if where == "metrics":
            ends()
        return {"error": (output[:, 0] - target).abs()}

    def layers() -> Iterator[Any]:
        yield partial(nn.Linear, WIDTH, WIDTH)
        ends()

    if where == "function":
        ends()
    if where == "layers":
        return Model(layers=layers(), loss=loss)  # type: ignore[arg-type]  # a user may err
    return Model(
        layers=[partial(nn.Linear, WIDTH, WIDTH), partial(Layer, where, how, after)],
        loss=loss,
        metrics=metrics,
    )


class Optimizer(torch.optim.SGD):
    def __init__(
        self, parameters: Any, lr: float, where: str = "", how: str = "", after: int = 0
    ) -> None:
        super().__init__(parameters, lr=lr)
        self._where, self._end = where, partial(end, how, after)

    def step(self, closure: Any = None) -> Any:
        if self._where == "optimizer":
            self._end()
        return super().step(closure)
