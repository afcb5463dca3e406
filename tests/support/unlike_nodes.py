"""A model, a data set and an optimizer that want more of a node than their own code, for tests."""

import os
import sys
import time
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oobleck.model import Model

WIDTH = 8
#: A variable of a process's environment: what is wrong there.
WRONG = "WRONG_ON_THIS_NODE"


def is_wrong(what: str) -> bool:
    return os.environ.get(WRONG) == what


class Points:
    def __init__(self) -> None:
        points = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(5))
        self.points = {} if is_wrong("samples") else dict(enumerate(points))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if is_wrong("sys.exit"):
            sys.exit("I leave")
        if is_wrong("os._exit"):
            os._exit(0)
        point = self.points[index]
        return point, point.square().sum()


class Middle(nn.Linear):
    """`everywhere`: it wants its tools on all nodes, and not only where they are said to be
    missing."""

    def __init__(self, everywhere: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.everywhere = everywhere
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if is_wrong("numbers"):
            # As training begins with, and not any: a scale of which none is negative, and what a
            # linear layer gives.
            if bool((self.scale <= 0).any()) or bool((x >= 0).all()):
                raise ValueError("made-up numbers")
            x = x * self.scale
        if is_wrong("tools") or (self.everywhere and not is_wrong("nothing")):
            import tools_of_a_node.drawing  # type: ignore[import-not-found]  # noqa: F401
        if is_wrong("memory"):
            x = x + torch.empty(1 << 50)[0]
        if is_wrong("rows") and len(x) > 2:
            raise torch.OutOfMemoryError("out of memory")
        if is_wrong("time"):
            time.sleep(3600)
        return super().forward(x)


class Last(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        if is_wrong("memory") and bool((x >= 0).all()):
            raise ValueError("made-up numbers")
        return super().forward(x).squeeze(1)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    if is_wrong("numbers") and bool((targets <= 1).all()):
        raise ValueError("made-up targets")
    return F.mse_loss(output, targets, reduction="none")


def metrics(output: Tensor, targets: Tensor) -> dict[str, Tensor]:
    if is_wrong("metrics"):
        raise ValueError("no scale here")
    return {"error": (output - targets).abs()}


def model(everywhere: bool = False) -> Model:
    return Model(
        layers=[partial(nn.Linear, WIDTH, WIDTH), partial(Middle, everywhere), Last],
        loss=loss,
        metrics=metrics,
    )


class Rule(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        if is_wrong("optimizer"):
            raise ValueError("no kernel for this device")
        super().step()
