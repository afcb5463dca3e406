"""Models of users: layers that the job's code builds, and their initial weights.

A layer is built on torch's meta device where its shapes alone are wanted. Its tensors besides
trained parameters (buffers, tables, frozen weights) are constants of the job. A worker that holds
the layer builds it for real, from the same draws, so they are never sent or saved. A layer that
refers to its parameters by hooks or in a closure is built for real too. These parameters stay the
same objects and get other memory.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from oobleck.core.job.code import Code
from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.model import FUNCTION, GENERATOR, Model, drawing, seed_all
from oobleck.worker.models.base import Layer, RowLosses, is_hooked, split_linear
from oobleck.worker.models.compiled import run_compiled
from oobleck.worker.models.tree import Tree, cached, flatten, shown
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError, NodeError
from oobleck.worker.runtime.random import RowKeys

#: Methods of tensors, and functions of torch.nn.init, that draw.
_DRAWS = frozenset(
    {
        "normal_",
        "uniform_",
        "trunc_normal_",
        "kaiming_uniform_",
        "kaiming_normal_",
        "xavier_uniform_",
        "xavier_normal_",
        "orthogonal_",
        "sparse_",
        "bernoulli_",
        "exponential_",
        "random_",
        "log_normal_",
        "cauchy_",
        "geometric_",
    }
)


#: Metrics of an evaluation.
MOST_METRICS = 256


class OwnLayer(Layer):
    """A layer of the user's, with what passes between layers as its input and output."""

    def __init__(self, spec: OwnModelSpec, layer: int, module: nn.Module) -> None:
        super().__init__(layer)
        self.module = module
        #: True: it was built with its initial weights.
        self.drawn = False
        self._spec = spec
        #: True: it draws from torch's generator while it trains.
        self._draws = spec.known and spec.description.layers[layer].draws

    def forward(self, x: Any, rows: RowKeys) -> Any:
        with code.running(f"model: layer {self.layer} ({type(self.module).__name__})"):
            if self.module.training != rows.training:
                self.module.train(rows.training)
            if not (self._draws and rows.training and rows.positions):
                return self._called(x)
            with GENERATOR:
                # The seed is by micro-batch, which is never split where layers draw: equal on any
                # plan.
                seed_all(rows.seed, "forward", rows.step, rows.positions[0], self.layer)
                return self._called(x)

    def _called(self, x: Any) -> Any:
        return run_compiled(self.module, x) if self.compiled else self.module(x)

    def row_losses(self, output: Tree, targets: Tree) -> RowLosses:
        return row_losses(self._spec, output, targets, len(flatten(targets)[0]))

    def metric_sums(self, output: Tree, targets: Tree) -> dict[str, float]:
        return metric_sums(self._spec, output, targets, len(flatten(targets)[0]))

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from ((n, p) for n, p in self.module.named_parameters() if p.requires_grad)


@cached(maxsize=2)
def user_model(spec: OwnModelSpec) -> Model:
    """Return the result of the job's function, without layers that are built already.

    It is the same in every process, whichever layer is built first. Raises JobError, NodeError.
    """
    with drawing(*FUNCTION):
        made = code.call(spec.code, "model")
    if not isinstance(made, Model):
        raise JobError(
            f"model: {spec.code.name} returned {type(made).__name__}; return an "
            "oobleck.model.Model(layers=[...], loss=...)"
        )
    if isinstance(made.layers, nn.Sequential):
        return replace(made, layers=[_Child(spec, number) for number in range(len(made.layers))])
    return made


def sources(job: JobSpec) -> list[Code]:
    """Return the code that is described, and must be the same on all nodes."""
    assert isinstance(job.model, OwnModelSpec)
    return [job.model.code, *([job.data.code] if job.data.code else [])]


def check_code(job: JobSpec) -> None:
    """Raise NodeError where the job's model is the user's, and this node has other code than it was
    described from."""
    if not isinstance(job.model, OwnModelSpec):
        return
    if code.fingerprint(*sources(job)) != job.model.description.code:
        raise NodeError(
            f"model: the code of {job.model.code.name}, or of the data, on this machine is not "
            "what it was where the job was submitted; give every node the same code, and submit "
            "again"
        )


def builders(spec: OwnModelSpec) -> Sequence[Callable[[], nn.Module]]:
    """Return the builder of each layer, which builds on the device of the context. Raises JobError,
    NodeError."""
    return list(user_model(spec).layers)


def built_whole(spec: OwnModelSpec) -> list[nn.Module] | None:
    """Return the layers of an nn.Sequential, from one build on the meta device. None: the model is
    no nn.Sequential."""
    if not any(isinstance(build, _Child) for build in builders(spec)):
        return None
    with torch.device("meta"), without_draws():
        return list(code.call(spec.code, "model").layers)


class _Child:
    """Builder of one layer of an nn.Sequential; it builds all of it."""

    def __init__(self, spec: OwnModelSpec, number: int) -> None:
        self._spec = spec
        self._number = number

    def __call__(self) -> nn.Module:
        made = code.call(self._spec.code, "model")
        child: nn.Module = made.layers[self._number]
        return child


class without_draws(TorchFunctionMode):  # it is used like a function
    """Mode in which a function that draws random numbers into a tensor leaves it as it is. On the
    meta device a draw loads torch's compiler: a second, and 100 MB of every process."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in _DRAWS:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


class _Watch(without_draws):
    """A `without_draws` that also records the tensors made within."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = super().__torch_function__(func, types, args, kwargs)
        several = found if isinstance(found, list | tuple) else (found,)
        self._made += [weakref.ref(one) for one in several if isinstance(one, Tensor)]
        return found

    def outlived_by(self, known: Iterable[Tensor]) -> bool:
        """Return whether a recorded tensor besides `known` is alive, e.g. in a closure."""
        ids = {id(tensor) for tensor in known}
        return any(made is not None and id(made) not in ids for made in (r() for r in self._made))


def build(spec: OwnModelSpec, layer: int) -> nn.Module:
    """Build the module of `layer` on the device of the context. Raises JobError."""
    # A NodeError passes, for instance if only this node lost its files of weights.
    with code.running(f"model: layer {layer}", " cannot be built"):
        made = builders(spec)[layer]()
    if not isinstance(made, nn.Module):
        raise JobError(
            f"model: layer {layer} is built as {type(made).__name__}, and must be an nn.Module"
        )
    return made


def build_real(spec: OwnModelSpec, seed: int, layer: int) -> nn.Module:
    """Build the module of `layer` in host memory. Its initial weights are a function of (spec,
    seed, layer) alone."""
    with _seeded(spec, seed, layer), torch.device("cpu"):
        return build(spec, layer)


def _seeded(spec: OwnModelSpec, seed: int, layer: int) -> AbstractContextManager[None]:
    """Return a context in which `layer` draws its initial values: those of an nn.Sequential are
    drawn one after the other."""
    whole = isinstance(builders(spec)[layer], _Child)
    return drawing(seed, "model" if whole else layer)


def build_layer(spec: OwnModelSpec, layer: int) -> OwnLayer:
    """Build the layer on the meta device: shapes alone."""
    with torch.device("meta"), without_draws():
        return _wrapped(spec, layer, build(spec, layer))


def empty_layer(spec: OwnModelSpec, seed: int, layer: int) -> OwnLayer:
    """Build a layer with all but the memory of its parameters, which is missing or to be
    replaced."""
    with _seeded(spec, seed, layer), torch.device("meta"), _Watch() as watch:
        module = build(spec, layer)
    kept = (
        next(constants(module), None) is not None
        or any(map(is_hooked, module.parameters()))
        or watch.outlived_by(module.parameters())
        or _refers_to_parameters(module)
    )
    if not kept:
        return _wrapped(spec, layer, module)
    made = _wrapped(spec, layer, build_real(spec, seed, layer))
    made.drawn = True
    return made


def _refers_to_parameters(module: nn.Module) -> bool:
    """Return whether an object besides the modules themselves refers to a parameter of `module`."""
    places = Counter(
        id(parameter) for part in module.modules() for parameter in part._parameters.values()
    )
    # Count the references that these calls themselves make, on a module of our own.
    alone = max(_references(nn.LayerNorm(1, bias=False, device="meta")).values())
    counts = _references(module)
    return any(count - alone > places[number] - 1 for number, count in counts.items())


def _references(module: nn.Module) -> dict[int, int]:
    """Return the reference count of each parameter, by its id."""
    return {id(parameter): sys.getrefcount(parameter) for parameter in module.parameters()}


def _wrapped(spec: OwnModelSpec, layer: int, module: nn.Module) -> OwnLayer:
    if not spec.compiles(layer):  # compiled layers get all gradients in one piece
        split_linear(module)
    return OwnLayer(spec, layer, module)


def constants(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors of `module` that are not trained: buffers, frozen parameters, and plain
    attributes."""
    yield from module.buffers()
    yield from (p for p in module.parameters() if not p.requires_grad)
    for part in module.modules():
        for value in vars(part).values():
            yield from _tensors(value)


def _tensors(value: object, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, list | tuple) and depth:
        for item in value:
            yield from _tensors(item, depth - 1)
    elif isinstance(value, dict) and depth:
        for item in value.values():
            yield from _tensors(item, depth - 1)
    elif (
        depth
        and not isinstance(value, nn.Module | type | ModuleType)
        and hasattr(value, "__dict__")
    ):
        for item in vars(value).values():
            yield from _tensors(item, depth - 1)


def values(layer: OwnLayer) -> dict[str, Tensor]:
    """Return the values that its trained parameters were built with; none where only their shapes
    were."""
    return {name: p.detach() for name, p in layer.trained()} if layer.drawn else {}


@torch.no_grad()
def initialise(
    module: OwnLayer, spec: OwnModelSpec, seed: int, begun: Mapping[str, Tensor] | None = None
) -> None:
    """Give the parameters of `module` their initial values: those of a tied one are of the first
    layer that has it. `begun`: its `values`, so that it need not be built again."""
    fresh: dict[str, Tensor] = dict(
        begun or build_real(spec, seed, module.layer).named_parameters()
    )
    for name, (layer, name_there) in spec.description.shared(module.layer).items():
        if layer != module.layer:
            fresh[name] = build_real(spec, seed, layer).get_parameter(name_there)
    for name, parameter in module.trained():
        parameter.copy_(fresh[name])


def row_losses(spec: OwnModelSpec, output: Tree, targets: Tree, rows: int) -> RowLosses:
    """Return the user's losses and weights, (rows,) each; weights None: the loss gives none. Raises
    JobError if it gives anything else."""
    with code.running(
        "model: the loss", lambda: f" failed on {shown(output)} and {shown(targets)}"
    ):
        found = user_model(spec).loss(output, targets)
    pair = found if isinstance(found, tuple | list) and len(found) == 2 else (found,)
    if any(not isinstance(one, Tensor) or one.shape != (rows,) for one in pair):
        what = ", ".join(
            str(list(one.shape)) if isinstance(one, Tensor) else type(one).__name__ for one in pair
        )
        raise JobError(
            f"model: the loss gave {what} for {rows} rows, and must give one number per row, as "
            'torch\'s losses do with reduction="none" and a mean over the other dimensions, or a '
            "pair (sums, weights) of such"
        )
    if len(pair) == 1:
        return pair[0], None
    sums, weights = pair
    if weights.requires_grad or weights.is_complex():
        raise JobError(
            "model: the loss gave weights with a gradient, or complex ones; the "
            "weights divide the loss and are not trained, so give weights.detach(), real numbers"
        )
    return sums, weights


def metric_sums(spec: OwnModelSpec, output: Tree, targets: Tree, rows: int) -> dict[str, float]:
    """Return the user's metrics, summed over rows. Raises JobError."""
    metrics = user_model(spec).metrics
    if metrics is None:
        return {}
    with code.running("model: the metrics"):
        found = metrics(output, targets)
        if len(found) > MOST_METRICS:
            raise JobError(f"model: {len(found)} metrics are more than {MOST_METRICS}; give fewer")
        return {str(name): _summed(name, values, rows) for name, values in found.items()}


def in_precision(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert the floats of `module` to `dtype`, and return it. Complex numbers keep their type."""
    made: nn.Module = module._apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
    )
    return made


def constant_bytes(module: nn.Module) -> int:
    """Return the bytes of its buffers and frozen parameters, each once."""
    held = [*module.buffers(), *(p for p in module.parameters() if not p.requires_grad)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())


def _summed(name: object, values: Any, rows: int) -> float:
    if not isinstance(values, Tensor) or values.shape != (rows,):
        what = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise JobError(
            f"model: the metric {name} gave {what} for {rows} rows; give one number per row"
        )
    return float(values.double().sum())
