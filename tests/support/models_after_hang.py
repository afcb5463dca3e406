"""A user's model whose code fails in the steps after another worker has hung."""

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oobleck.model import Model

WIDTH = 4


class Points:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return point, point.sum()


class Failing(nn.Linear):
    def __init__(self, pid_file: str) -> None:
        """`pid_file`: names a process that a signal has stopped; none is there before. What its
        agent kills is no longer stopped, whether it has ended yet or not."""
        super().__init__(WIDTH, 1)
        self._pid_file = Path(pid_file)

    def forward(self, x: Tensor) -> Tensor:
        if self._pid_file.exists() and not self._is_stopped():
            raise ValueError("this table has no entry 50257")
        return super().forward(x)

    def _is_stopped(self) -> bool:
        try:
            stat = Path("/proc", self._pid_file.read_text(), "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat.rpartition(")")[2].split()[0] == "T"


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output[:, 0], target, reduction="none")


def model(pid_file: str) -> Model:
    return Model(
        layers=[partial(nn.Linear, WIDTH, WIDTH), partial(Failing, pid_file)],
        loss=loss,
    )
