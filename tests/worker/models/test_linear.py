"""Linear layers of users leave their weights' gradients for later, and have the same ones."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from oobleck.worker.models import base
from oobleck.worker.models.base import (
    DeferredGradients,
    WeightGradients,
    add_product,
    adding,
    split_linear,
    sums_wide,
)


class Checkpointed(nn.Module):
    """Computes its inner part once more in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


@pytest.mark.parametrize("gradients", [DeferredGradients, WeightGradients])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4, bias=False)),
        lambda: nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
        lambda: nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)),
        Checkpointed,
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)),
    ],
    ids=["plain", "weight norm", "frozen", "checkpointed", "changed in place"],
)
def test_linear_layers_of_users_have_the_gradients_of_autograd(
    make: Callable[[], nn.Module], gradients: type[WeightGradients]
) -> None:
    torch.manual_seed(0)
    plain = make().double()
    split = copy.deepcopy(plain)
    split_linear(split)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    plain(x).square().sum().backward()
    added = gradients()
    with adding(added):
        out = split(x.detach().requires_grad_())
    out.square().sum().backward()
    if isinstance(added, DeferredGradients):
        added.add()
    for (name, ours), theirs in zip(split.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None, name
        else:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_products_of_narrow_numbers_are_not_rounded_before_they_are_summed() -> None:
    torch.manual_seed(0)
    left, right = torch.randn(8, 64).bfloat16(), torch.randn(64, 8).bfloat16()
    total = torch.randn(8, 8)
    expected = total.double() + left.double().mm(right.double())
    add_product(total, left, right)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-5)


def test_a_gpu_adds_them_in_one_product_without_a_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own operation, which takes what it is given but computes on GPUs alone."""
    assert sums_wide(torch.device("cuda"))
    assert not sums_wide(torch.device("cpu"))
    monkeypatch.setattr(base, "sums_wide", lambda device: True)
    called = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    left, right = (torch.empty(4, 4, dtype=torch.bfloat16, device="meta") for _ in range(2))
    with Noted():
        add_product(torch.empty(4, 4, device="meta"), left, right)
    assert called[1:] == ["aten.addmm.dtype_out"]


def test_gradients_of_bfloat16_weights_are_those_of_wide_products() -> None:
    """Of several micro-batches, in float32, whether they are left for later or not."""
    torch.manual_seed(0)
    narrow = base.Linear(16, 16)
    narrow.weight = nn.Parameter(torch.randn(16, 16, dtype=torch.bfloat16))
    narrow.weight.grad_dtype = None
    pairs = [torch.randn(2, 3, 16).bfloat16() for _ in range(4)]
    expected = torch.zeros(16, 16, dtype=torch.float64)
    for x in pairs:
        expected += x.double().flatten(0, 1).sum(0).expand(16, 16)
    found = []
    for added in (WeightGradients(), DeferredGradients()):
        narrow.weight.grad = torch.zeros(16, 16)
        for x in pairs:
            with adding(added):
                narrow(x.requires_grad_()).sum().backward()
        if isinstance(added, DeferredGradients):
            added.add()
        found.append(narrow.weight.grad)
    assert torch.equal(*found)
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-6, atol=1e-5)
