"""The tagger of `weighted_models` trained by a plain loop of torch, in one batch per step: its loss
is torch's own weighted mean over all tags of the batch."""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from oobleck.model import initial
from oobleck.worker.data.objective import Order
from support import weighted_models
from support.weighted_models import BATCH, IGNORED, SEED, SHARES, Tagged

RATE = 1.0e-2
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(slots=True)
class Trained:
    losses: list[float] = field(default_factory=list)
    #: Before clipping.
    norms: list[float] = field(default_factory=list)
    #: By step.
    evaluations: dict[int, float] = field(default_factory=dict)
    net: nn.Sequential = field(default_factory=nn.Sequential)


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    decayed = [p for p in parameters if p.dim() > 1]
    rest = [p for p in parameters if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)


def train(
    data: Tagged,
    steps: int,
    *,
    clip: float = 1.0,
    dtype: torch.dtype = torch.float64,
    optimizer: MakeOptimizer = adamw,
    held_out: Tagged | None = None,
    due: Container[int] = (),
) -> Trained:
    """`held_out`: what is evaluated after the steps `due`."""
    found = Trained(net=initial(weighted_models.tagger, SEED).to(dtype))
    parameters = list(found.net.parameters())
    taken, order = optimizer(parameters), Order.of(len(data), 0.0)
    for step in range(1, steps + 1):
        numbers = map(int, order.of_step(SEED, step, range(BATCH), BATCH))
        loss = mean_loss(found.net, data, numbers)
        taken.zero_grad(set_to_none=False)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        found.losses.append(loss.item())
        found.norms.append(nn.utils.clip_grad_norm_(parameters, clip).item())
        taken.step()
        if held_out is not None and step in due:
            with torch.no_grad():
                value = mean_loss(found.net, held_out, range(len(held_out)))
            found.evaluations[step] = value.item()
    return found


def mean_loss(net: nn.Module, data: Tagged, numbers: Iterable[int]) -> Tensor:
    """torch's weighted mean over these samples; 0 where none of their words has a tag."""
    words, tags = (torch.stack(side) for side in zip(*(data[n] for n in numbers), strict=True))
    scores = net(words).flatten(0, 1)
    if (tags == IGNORED).all():
        return scores.sum() * 0.0
    shares = scores.new_tensor(SHARES)
    return F.cross_entropy(scores, tags.flatten(), weight=shares, ignore_index=IGNORED)
