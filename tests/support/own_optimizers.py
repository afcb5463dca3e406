"""Optimizers as users write them: one that workers can use, and others that each break one rule."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class _Stepped(Optimizer):
    """Calls `change` on each parameter."""

    def __init__(
        self, params: Iterable[Any], lr: float, weight_decay: float = 0.0, **more: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.change(parameter, group, self.state[parameter])

    def change(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(_Stepped):
    """By the sign of a momentum. It counts its steps, and puts new tensors in place of old ones."""

    def change(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        momentum = state.get("momentum", torch.zeros_like(parameter))
        state["momentum"] = 0.9 * momentum + 0.1 * parameter.grad
        state["steps"] = state.get("steps", 0) + 1
        decayed = parameter.data * (1 - group["lr"] * group["weight_decay"])
        parameter.data = decayed - group["lr"] / state["steps"] * torch.sign(state["momentum"])


class Lamb(_Stepped):
    def change(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        trust = parameter.norm() / parameter.grad.norm()
        parameter.sub_(parameter.grad, alpha=group["lr"] * float(trust))


class Noisy(_Stepped):
    def change(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad + torch.randn_like(parameter), alpha=group["lr"])


class Normed(_Stepped):
    def change(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["norm"] = parameter.grad.norm()
        parameter.sub_(parameter.grad, alpha=group["lr"])


class Remembering(_Stepped):
    """Keeps its count in itself."""

    taken = 0

    def change(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        self.taken += 1
        parameter.sub_(parameter.grad, alpha=group["lr"] / self.taken)


class Grouping(_Stepped):
    def change(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1
        parameter.sub_(parameter.grad, alpha=group["lr"] / group["k"])


class Writing(_Stepped):
    def change(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        parameter.grad.add_(parameter, alpha=0.1)
        parameter.sub_(parameter.grad, alpha=group["lr"])


class Late(_Stepped):
    """Begins to average in its fifth step."""

    def change(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        parameter.sub_(parameter.grad, alpha=group["lr"])
        if state["step"] >= 5:
            state["average"] = parameter.clone()


class History(_Stepped):
    def change(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state.setdefault("gradients", []).append(parameter.grad.clone())
        parameter.sub_(parameter.grad, alpha=group["lr"])


class Half(_Stepped):
    def change(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["momentum"] = parameter.grad.bfloat16()
        parameter.sub_(parameter.grad, alpha=group["lr"])


class Asking(_Stepped):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


def no_optimizer(params: Iterable[Any], lr: float) -> str:
    return "none"
