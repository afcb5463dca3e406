"""Linear layers of users leave their weights' gradients for later, and have the same ones."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oobleck.worker.models.base import DeferredGradients, deferring, split_linear


class Checkpointed(nn.Module):
    """Computes its inner part once more in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4, bias=False)),
        lambda: nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
        lambda: nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)),
        Checkpointed,
    ],
    ids=["plain", "weight norm", "frozen", "checkpointed"],
)
def test_linear_layers_of_users_have_the_gradients_of_autograd(
    make: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(0)
    plain = make().double()
    split = copy.deepcopy(plain)
    split_linear(split)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    plain(x).square().sum().backward()
    deferred = DeferredGradients()
    with deferring(deferred):
        out = split(x.detach().requires_grad_())
    out.square().sum().backward()
    deferred.add()
    for (name, ours), theirs in zip(split.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None, name
        else:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
