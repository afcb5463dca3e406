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

A layer is a unit of placement: a worker builds those that it holds, and no others. Its input is the
output of the layer before it, or the inputs of a micro-batch. That is one tensor, or a tuple, list
or dict of tensors, passed as one argument. Every tensor has the micro-batch's rows as its first
dimension. No row may affect the result of another: rows are computed wherever there is room.
"""

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oobleck.core.purpose import derive

#: Held while a thread seeds torch's generator and draws from it: threads share the generator.
GENERATOR = threading.RLock()

#: Seed and purpose of the draws of a model's function itself, outside its layer builders.
FUNCTION = (0, "function")
#: Step being computed; unset in threads that compute none.
_step: ContextVar[int] = ContextVar("step")

#: Value passed between layers: a tensor, or a tuple, list or dict of tensors, all with rows first.
Tensors = Any


@dataclass(frozen=True, kw_only=True)
class Model:
    """Model of a user, returned by the function that the job names."""

    #: Builders: each builds one layer when it is called. Each child of an `nn.Sequential` is a
    #: layer; the Sequential is built whole wherever one is needed.
    layers: Sequence[Callable[[], nn.Module]] | nn.Sequential
    #: Function of (output of the last layer, targets).
    #:  It returns one number per row, (rows,), and training lowers their mean over the global
    #: batch. Or it returns a pair (sums, weights) of these, such as a row's sum of token losses and
    #: its number of tokens. Training then lowers the global batch's sum of sums divided by its sum
    #: of weights. Weights are at least 0, without a gradient.
    loss: Callable[[Tensors, Tensors], Tensor | tuple[Tensor, Tensor]]
    #: Pairs of parameters that are one and the same, of any two layers.
    #:
    #: Each is given by layer and name, such as ("0.weight", "5.projection.weight"). All places of a
    #: parameter are trained by the sum of their gradients. A layer shares with one set of layers
    #: only; sharing within a layer needs no entry.
    tied: Sequence[tuple[str, str]] = ()
    #: Function of (output, targets) to named numbers per row, (rows,) each. Evaluations report
    #: their means over the samples beside the loss.
    metrics: Callable[[Tensors, Tensors], Mapping[str, Tensor]] | None = field(default=None)

    def __post_init__(self) -> None:
        """Raise ValueError if layers, loss or metrics are of the wrong kind."""
        if isinstance(self.layers, nn.Sequential):
            _check_sequential(self.layers)
        else:
            object.__setattr__(self, "layers", _builders(self.layers))
        for name, function in (("loss", self.loss), ("metrics", self.metrics)):
            if isinstance(function, type) and issubclass(function, nn.Module):
                raise ValueError(
                    f"{name} is the class {_class(function)}; give an instance, as "
                    f'{_class(function)}(reduction="none")'
                )
            if not callable(function) and (name == "loss" or function is not None):
                raise ValueError(
                    f"{name} is {type(function).__name__}; give a function of (output, targets)"
                )


def _check_sequential(layers: nn.Sequential) -> None:
    """Raise ValueError if `layers` does more than call its children in order."""
    kind = type(layers)
    if kind.forward is not nn.Sequential.forward or kind.__call__ is not nn.Module.__call__:
        raise ValueError(
            f"layers is {kind.__name__}, whose forward is its own, and only its children are "
            "called; put what it adds into a layer"
        )
    hooks = [layers._forward_hooks, layers._forward_pre_hooks]
    hooks += [layers._backward_hooks, layers._backward_pre_hooks]
    if any(hooks):
        raise ValueError(
            "layers is an nn.Sequential with a hook, and only its children are called; put the "
            "hook on one of them"
        )


def _builders(layers: Any) -> list[Callable[[], nn.Module]]:
    """Return the layer builders. Raises ValueError for the first entry that is none."""
    if isinstance(layers, Mapping | str | nn.ModuleDict) or not isinstance(layers, Iterable):
        raise ValueError(
            f"layers is {_class(type(layers))}; give a list with a builder for each layer"
        )
    found = list(layers)
    for number, build in enumerate(found):
        if isinstance(build, nn.Module):
            name = _class(type(build))
            whole = all(isinstance(one, nn.Module) for one in found)
            raise ValueError(
                f"layers[{number}] is a {name} that was built already; give a builder, as "
                f"partial({name}, ...){', or nn.Sequential(*layers) for all' if whole else ''}"
            )
        if not callable(build):
            raise ValueError(
                f"layers[{number}] is {type(build).__name__}; give a builder of a layer, as "
                "partial(nn.Linear, ...)"
            )
    return found


def _class(kind: type) -> str:
    """Return the class name as users write it."""
    return f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else kind.__name__


def initial(make: Callable[[], Model], seed: int) -> nn.Sequential:
    """Return all layers in one process, with the initial weights of a job of that `seed`.

    Use them to compare with, or to load trained weights into. `make`: the function that the job
    names, with its arguments. Its own draws, outside layer builders, are the same for every seed.
    """
    with drawing(*FUNCTION):
        model = make()
    if isinstance(model.layers, nn.Sequential):
        with drawing(seed, "model"):
            layers = make().layers
        assert isinstance(layers, nn.Sequential), "it was one a moment ago"
        whole = layers
    else:
        whole = nn.Sequential()
        for number, build in enumerate(model.layers):
            with drawing(seed, number):
                whole.append(build())
    for (layer, name), *others in same_parameters(model.tied, len(whole)):
        parameter = whole.get_parameter(f"{layer}.{name}")
        for other, alias in others:
            owner, _, last = f"{other}.{alias}".rpartition(".")
            setattr(whole.get_submodule(owner), last, parameter)
    return whole


def step() -> int:
    """Return the number, from 1, of the training step being computed.

    Call it in a layer's forward, the loss or the metrics; anywhere else it raises RuntimeError. The
    number is the same on every worker and plan. It stays the same when a layer is recomputed for
    its backward, and after a loss or a restart. An evaluation has the number of the step whose
    state it evaluates.
    """
    if torch.compiler.is_compiling():
        # Compiled code would keep the number, and the layer might catch an exception.
        torch._dynamo.graph_break("oobleck.model.step()")
    try:
        return _step.get()
    except LookupError:
        raise RuntimeError(
            "oobleck.model.step() is known only in a layer's forward, in the loss and in the "
            "metrics, in the thread that calls them: take it there, and keep the number for a "
            "backward or a thread; in a loop of your own use it within oobleck.model.at_step(n)"
        ) from None


@contextmanager
def at_step(number: int) -> Iterator[None]:
    """Make `step` return `number` inside the block, for your own training loop or test."""
    token = _step.set(number)
    try:
        yield
    finally:
        _step.reset(token)


def same_parameters(
    tied: Sequence[tuple[str, str]], layers: int
) -> list[tuple[tuple[int, str], ...]]:
    """Return the places, by layer and name, of each parameter that several layers share; ascending.
    Raises ValueError if `tied` is invalid for that many layers."""
    found: list[set[tuple[int, str]]] = []
    for pair in tied:
        if isinstance(pair, str):
            raise ValueError(
                f"tied has {pair!r}; give pairs of parameters, as [({pair!r}, "
                f'"{layers - 1}.weight")]'
            )
        places = {_place(path, layers) for path in pair}
        if len(pair) != 2 or len({layer for layer, _ in places}) != 2:
            raise ValueError(
                f"tied has {pair}; a pair is a parameter of one layer and one of another, such as "
                f'("0.weight", "{layers - 1}.weight"); within a layer share the parameter itself'
            )
        joined = [one for one in found if one & places]
        found = [one for one in found if one not in joined] + [places.union(*joined)]
    for one in found:
        for layer in {layer for layer, _ in one}:
            names = sorted(name for other, name in one if other == layer)
            if len(names) > 1:
                raise ValueError(
                    f"tied makes {names[0]} and {names[1]} of layer {layer} one parameter; share "
                    "it in the layer"
                )
    return sorted(tuple(sorted(one)) for one in found)


def _place(path: str, layers: int) -> tuple[int, str]:
    number, _, name = str(path).partition(".")
    try:
        layer = int(number)
    except ValueError:
        raise ValueError(
            f"tied names {path!r}; begin with the layer's number, as in 0.weight"
        ) from None
    if not -layers <= layer < layers:
        raise ValueError(f"tied names {path!r}, and there are layers 0 to {layers - 1}")
    return layer % layers, name


@contextmanager
def drawing(seed: int, layer: int | str) -> Iterator[None]:
    """Draw initial values of `layer` with torch, numpy and random inside the block. Later draws are
    as if nothing had been drawn."""
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
    """Seed torch's generators for `purpose`."""
    number = derive(*purpose) >> 1
    # torch.manual_seed would format the whole stack while no GPU is in use.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.cuda.manual_seed_all(number)
