"""A model of your own, as a list of layers.

    from functools import partial
    from torch import nn
    from oobleck.model import Model

    def tagger(words: int, width: int, tags: int) -> Model:
        return Model(
            layers=[
                partial(nn.Embedding, words, width),
                partial(Block, width),
                partial(nn.Linear, width, tags),
            ],
            loss=per_row,
        )

A layer is a unit of placement: a worker builds those that it holds, and no others. Each takes what
the layer before it gives, the first one the inputs of a micro-batch: one tensor, or a tuple, list
or dict of tensors, passed as one argument. Every tensor has the micro-batch's rows as its first
dimension, and no row may change what becomes of another: rows are computed where there is room.
"""

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oobleck.planner.purpose import derive

#: Held by whoever seeds torch's generator and draws from it: threads share it.
GENERATOR = threading.RLock()

#: What passes between layers: a tensor, or a tuple, list or dict of such, all with rows first.
Tensors = Any


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the function that a job names as its model returns."""

    #: Each builds one layer when it is called. Of an `nn.Sequential`, which is built whole wherever
    #: it is needed, each child is a layer.
    layers: Sequence[Callable[[], nn.Module]] | nn.Sequential
    #: (output of the last layer, targets) to one number per row, (rows,). Their mean over the
    #: global batch is what is trained.
    loss: Callable[[Tensors, Tensors], Tensor]
    #: Pairs of parameters that are one and the same, each by layer and name, such as
    #: ("0.weight", "5.projection.weight"): one in the first layer and one in the last. Both are
    #: trained by the sum of their gradients. Those within one layer need no word.
    tied: Sequence[tuple[str, str]] = ()
    #: (output, targets) to named numbers per row, (rows,) each: their means over the samples are
    #: told with every evaluation, beside the loss.
    metrics: Callable[[Tensors, Tensors], Mapping[str, Tensor]] | None = field(default=None)


def initial(make: Callable[[], Model], seed: int) -> nn.Sequential:
    """All layers in one process, with the weights that a job of that `seed` begins with: to compare
    with, or to load what was trained into. `make`: what the job names, with its arguments."""
    with drawing(seed, "model"):
        model = make()
    if isinstance(model.layers, nn.Sequential):
        whole = model.layers
    else:
        whole = nn.Sequential()
        for number, build in enumerate(model.layers):
            with drawing(seed, number):
                whole.append(build())
    for first, last in model.tied:
        owner, _, name = last.rpartition(".")
        setattr(whole.get_submodule(owner), name, whole.get_parameter(first))
    return whole


@contextmanager
def drawing(seed: int, layer: int | str) -> Iterator[None]:
    """Within, torch, numpy and random draw the initial values of `layer`; later draws are as if
    nothing had been drawn."""
    with GENERATOR, torch.random.fork_rng(devices=[]):
        before = random.getstate(), np.random.get_state()
        purpose = (seed, "initial", layer)
        seed_all(*purpose)
        random.seed(derive(*purpose))
        np.random.seed(derive(*purpose) % (1 << 32))
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def seed_all(*purpose: object) -> None:
    """Have torch draw next what is for `purpose`."""
    number = derive(*purpose) >> 1
    # Not torch.manual_seed, which formats the whole stack while no GPU is in use.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.cuda.manual_seed_all(number)
