"""A model of a user's trained by a plain loop of torch in one process: what any plan must equal."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from oobleck.core.job.spec import Float8Recipe
from oobleck.model import Model, initial, seed_all
from oobleck.worker.data.objective import Order
from support.float8 import emulate

BATCH, MICROBATCH, STEPS, RATE, SEED = 16, 2, 14, 1.0e-3, 7


def plain_loop(
    make: Callable[[], Model],
    data: Any,
    dtype: torch.dtype,
    *,
    drawing: bool = False,
    narrow: bool = False,
    recipe: Float8Recipe | None = None,
    steps: int = STEPS,
) -> tuple[list[float], nn.Sequential]:
    """Trains all layers in one process; the losses. `drawing`: layers are seeded as workers do;
    `narrow`: as bf16 jobs compute; `recipe`: of products in float8, but for the last layer's."""
    net = initial(make, SEED).to(dtype)
    if recipe is not None:
        emulate(net[:-1], recipe, dtype)
    loss, order = make().loss, Order.of(len(data), 0.0)
    parameters = list(net.parameters())
    decayed = [p for p in parameters if p.dim() > 1]
    rest = [p for p in parameters if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    found = []
    size = MICROBATCH if drawing or narrow else BATCH
    for step in range(1, steps + 1):
        rows = [data[int(i)] for i in order.of_step(SEED, step, range(BATCH), BATCH)]
        optimizer.zero_grad()
        total = 0.0
        for first in range(0, BATCH, size):
            inputs, targets = (
                stacked([row[side] for row in rows[first : first + size]], dtype) for side in (0, 1)
            )
            for number, layer in enumerate(net):
                if drawing:
                    seed_all(SEED, "forward", step, first, number)
                with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                    inputs = layer(inputs)
                inputs = inputs.float() if narrow else inputs
            mean = loss(inputs, targets).mean() * (size / BATCH)
            mean.backward()
            total += mean.item()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        found.append(total)
    return found, net


def stacked(rows: list[Any], dtype: torch.dtype) -> Any:
    if isinstance(rows[0], dict):
        return {key: stacked([row[key] for row in rows], dtype) for key in rows[0]}
    tensor = torch.stack([torch.as_tensor(row) for row in rows])
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
