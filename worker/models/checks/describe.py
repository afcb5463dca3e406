"""Description of a user's model for planning, from one pass over its layers without weights.

Large layers run on torch's meta device, which computes shapes alone. Small ones run for real in
host memory, and so do layers whose code needs numbers, as a mixture of experts may. Owns the
numbers, and what may pass between layers. `oobleck.worker.models.checks.check` looks for faults
that only real runs show.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from oobleck.core.codec import encode
from oobleck.core.job.code import Json
from oobleck.core.job.description import (
    ITEM_BYTES,
    Description,
    Foreign,
    LayerSketch,
    TensorSketch,
    Tie,
    TreeSketch,
)
from oobleck.core.job.model import MOST_LAYERS, OwnModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.model import at_step, same_parameters
from oobleck.worker.models import own
from oobleck.worker.models.base import is_hooked
from oobleck.worker.models.checks import built
from oobleck.worker.models.checks.rows import PER_ROW
from oobleck.worker.models.compiled import Compilation, Prepared
from oobleck.worker.models.float8 import is_apart
from oobleck.worker.models.tree import flatten, map_tensors, shown, structure, unflatten
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError, Problem

#: Names and shapes of the parameters of a layer.
_Shapes = tuple[tuple[str, tuple[int, ...]], ...]
#: Most numbers of a layer that is run for real without a try on the meta device, where torch loads
#: its compiler for many operations, which takes longer.
_SMALL = 1 << 22
#: Rows of the two runs of a layer: what grows with them has rows first.
_FEW, _MORE = 2, 3


#: Part of torch's error where torch.func is used beside hooks that count what autograd keeps.
_SAVED = "support saved tensor hooks"
_HOOKS_OF_SAVED = (
    "it uses torch.func, under which what a layer keeps for its backward cannot be counted; take "
    "the gradient by torch.autograd.grad(y, x, create_graph=True)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Forward of one layer: its output, and what it costs."""

    output: Any
    flops: int
    #: Bytes that autograd keeps, without the layer's own tensors.
    kept_bytes: int
    draws: bool
    device: str


def describe(job: JobSpec, sample: tuple[Any, Any], warnings: list[Problem] | None = None) -> Json:
    """Return the description of a job's model. `sample`: (inputs, targets) of its data, without
    rows; `warnings`: a list that receives warnings. Raises JobError with the layer and the fix,
    NodeError."""
    spec, precision = job.model, job.training.precision
    assert isinstance(spec, OwnModelSpec), "the others are known by their kind"
    dtype = torch.float64 if precision == "fp64" else torch.float32
    count = len(own.builders(spec))
    made_from = code.fingerprint(*own.sources(job))
    if not 1 <= count <= MOST_LAYERS:
        raise JobError(
            f"model: {spec.code.name} has {count} layers, and must have 1 to {MOST_LAYERS}; put "
            "several into one"
        )
    inputs, targets = (sketch_of_sample(side, dtype) for side in sample)
    numbers, target = (_repeated(side, dtype) for side in sample)
    tied = _tied(spec, count)
    incoming, giver = inputs, "the data"
    #: Input, parameter shapes, and sketch of each layer; layers with the same three are alike.
    found: list[tuple[TreeSketch, _Shapes, LayerSketch]] = []
    compilation = Compilation() if job.training.compile else None
    for number in range(count):
        shared = [
            name
            for tie in tied
            if number in tie.layers
            for name in tie.names[tie.layers.index(number)]
        ]
        settings = _settings()
        shapes, layer, numbers = _Layer(
            spec,
            number,
            _Values(incoming, numbers),
            giver,
            shared,
            job.training.seed,
            dtype,
            job.training.narrow,
        ).describe(_Values(targets, target) if number == count - 1 else None, compilation)
        if changed := [name for name, value in _settings().items() if settings[name] != value]:
            raise JobError(
                f"model: layer {number} ({layer.name}) calls {changed[0]} while it is built or "
                "run, which would hold for other layers too, on some workers; give dtype to what "
                "it makes, and use torch.no_grad() or torch.enable_grad() as a context"
            )
        found.append((incoming, shapes, layer))
        incoming, giver = layer.output, f"layer {number} ({layer.name})"
    _check_alike(tied, [dict(shapes) for _, shapes, _ in found])
    if precision == "fp8":
        narrow = found[:-1] if is_apart(found) else found
        examples = [found.index(kind) for kind in narrow]
        problems = built.look_at_float8(spec, examples, job.training.seed)
        if warnings is not None:
            warnings += problems
    built.check_tied(spec, job.training.seed, dtype, tied)
    kinds = list(dict.fromkeys(found))
    if warnings is not None and not spec.code.ours:
        for number in sorted({found.index(kind) for kind in kinds}):
            module = built.build(spec, number, job.training.seed)
            where = f"layer {number} ({type(module).__name__})"
            warnings += built.look_at_precision(where, module, precision)
    description = Description(
        kinds=tuple(layer for _, _, layer in kinds),
        order=tuple(map(kinds.index, found)),
        inputs=inputs,
        targets=targets,
        tied=tied,
        code=made_from,
        foreign=_foreign(spec),
    )
    return Json(encode(description).decode())


def _settings() -> dict[str, object]:
    """Return torch's process-wide settings, by the function that sets each."""
    return {
        "torch.set_default_dtype": torch.get_default_dtype(),
        "torch.set_grad_enabled": torch.is_grad_enabled(),
    }


def _foreign(spec: OwnModelSpec) -> Foreign | None:
    """Return transformers' names for the model's parameters; None where it does not know the
    model."""
    if spec.architecture is None:
        return None
    from oobleck.worker.models.huggingface.causal_lm import foreign  # it loads transformers

    return foreign(spec)


def sketch_of_sample(tree: Any, dtype: torch.dtype) -> TreeSketch:
    """Sketch a sample's inputs or targets; floats come in `dtype` where that is wider."""
    return TreeSketch(
        tensors=tuple(
            TensorSketch(
                shape=tuple(tensor.shape), dtype=_name(_widened(tensor, dtype)), gradient=False
            )
            for tensor in flatten(tree)
        ),
        structure=structure(tree),
    )


def _widened(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    wide = dtype == torch.float64 and tensor.is_floating_point()
    return dtype if wide else tensor.dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _repeated(tree: Any, dtype: torch.dtype) -> Any:
    """Return `_MORE` rows of a sample's inputs or targets."""

    def repeat(tensor: Tensor) -> Tensor:
        return tensor.to(_widened(tensor, dtype)).expand(_MORE, *tensor.shape)

    return map_tensors(repeat, tree)


@dataclass(frozen=True, slots=True)
class _Values:
    """The values that a layer or the loss takes."""

    sketch: TreeSketch
    #: `_MORE` rows in host memory, made from the data; None: a layer below ran on the meta device.
    numbers: Any

    def rows(self, count: int, device: str) -> Any:
        """Return leaves of `count` rows. Floats are from 0 to 1, so that they may be shares or have
        a logarithm. Numbers of other types are the data's own in host memory, since zero may be no
        length and no index."""
        known: Sequence[Tensor | None] = [None] * len(self.sketch.tensors)
        if device == "cpu" and self.numbers is not None:
            known = flatten(self.numbers)
        made = [
            _made(sketch, count, device)
            if tensor is None or tensor.is_floating_point()
            else tensor[:count].clone()
            for sketch, tensor in zip(self.sketch.tensors, known, strict=True)
        ]
        return unflatten(self.sketch.structure, made)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Layer on its way to a sketch."""

    spec: OwnModelSpec
    number: int
    incoming: _Values
    #: Layer whose output that is.
    giver: str
    #: Parameters of the layer that are tied.
    tied: Sequence[str]
    seed: int
    dtype: torch.dtype
    #: True: training computes in bfloat16, and its output is float32 again behind each layer.
    autocasts: bool

    def describe(
        self, targets: _Values | None, compilation: Compilation | None
    ) -> tuple[_Shapes, LayerSketch, Any]:
        """Return the shapes, the sketch, and `_MORE` rows of the output (None if they have no
        numbers). `targets`: of the last layer, whose loss counts with it; `compilation`: of the
        layers before, if the job wants it."""
        module = own.in_precision(built.build(self.spec, self.number, self.seed), self.dtype)
        where = f"layer {self.number} ({type(module).__name__})"
        small = sum(parameter.numel() for parameter in module.parameters()) <= _SMALL
        try:
            module, few, more = self._runs(module, targets, "cpu" if small else "meta")
        except JobError:
            raise
        except Exception as error:  # a user's layer may raise anything
            given = shown(self.incoming.rows(_FEW, "meta"))
            raise JobError(
                f"model: {where} fails on {given}, which {self.giver} gives for {_FEW} rows: "
                f"{_HOOKS_OF_SAVED if _SAVED in str(error) else code.described(error)}"
            ) from error
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        for name, parameter in trained.items():
            if not parameter.is_floating_point():
                raise JobError(
                    f"model: {where} trains {name} of type {_name(parameter.dtype)}; keep complex "
                    "numbers as two floats (torch.view_as_complex)"
                )
        self._check_tied(trained, where)
        sizes = [parameter.numel() for parameter in trained.values()]
        compiled, not_compiled = None, ""
        if compilation is not None:
            x = self.incoming.rows(_FEW, few.device)
            with at_step(1):
                compiled, not_compiled = compilation.look(module, x, draws=few.draws)
        whole = False
        if any(map(is_hooked, trained.values())):
            module = own.in_precision(own.build_real(self.spec, self.seed, self.number), self.dtype)
            whole = built.are_wanted_whole(module, where)
        shapes = tuple((name, tuple(p.shape)) for name, p in trained.items())
        sketch = LayerSketch(
            name=type(module).__name__,
            parameters=sum(sizes),
            tied=sum(trained[name].numel() for name in self.tied),
            largest=max(sizes, default=0),
            constant_bytes=own.constant_bytes(module),
            flops=few.flops / _FEW,
            kept_bytes=-(-few.kept_bytes // _FEW),
            output=_output(few.output, more.output, where),
            draws=few.draws,
            whole=whole,
            compiled=compiled,
            not_compiled=not_compiled,
        )
        numbers = None if more.device == "meta" else map_tensors(Tensor.detach, more.output)
        return shapes, sketch, numbers

    def _runs(
        self, module: nn.Module, targets: _Values | None, device: str
    ) -> tuple[nn.Module, _Run, _Run]:
        """Return the module that was run, and its runs with few rows and with more. `module`: on
        the meta device."""
        if device == "cpu":
            module = own.build_real(self.spec, self.seed, self.number)
            module = own.in_precision(module, self.dtype)
        try:
            few, more = (self._run(module, targets, rows, device) for rows in (_FEW, _MORE))
        except Exception:
            if device == "cpu":
                raise
            return self._runs(module, targets, "cpu")  # the layer may want numbers
        return module, few, more

    def _check_tied(self, trained: Mapping[str, Tensor], where: str) -> None:
        for name in self.tied:
            path = f"{self.number}.{name}"
            if name not in trained:
                has = ", ".join(trained) or "no parameters"
                raise JobError(f"model: tied names {path}, and {where} has {has}")

    def _run(self, module: nn.Module, targets: _Values | None, rows: int, device: str) -> _Run:
        """Run the layer forward with so many rows."""
        own_ones = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own_ones:
                kept[storage._cdata] = storage.nbytes()
            return tensor.detach()

        leaves = self.incoming.rows(rows, device)
        # A leaf cannot be written to, and torch's error would not say what to do.
        x = map_tensors(lambda tensor: tensor.clone(), leaves)
        versions = [tensor._version for tensor in flatten(x)]
        trained, hooked = _trained(module), _hooks(module)
        if isinstance(module, Prepared):
            module.prepare(x)  # values made once for all alike layers are not this layer's own cost
        made = None if targets is None else targets.rows(rows, device)
        flops = FlopCounterMode(display=False)
        packing = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with _Draws() as draws, flops, packing, at_step(1):
            what = f"model: layer {self.number} ({type(module).__name__})"
            with code.running(what, passing=(Exception,)):
                output = module(x)
            if versions != [tensor._version for tensor in flatten(x)]:
                raise JobError(
                    f"model: layer {self.number} ({type(module).__name__}) writes into what it is "
                    "given; make a new tensor, as x = x + y instead of x += y, and nn.ReLU() "
                    "instead of nn.ReLU(inplace=True)"
                )
            if changed := sorted(trained ^ _trained(module)):
                raise JobError(
                    f"model: layer {self.number} ({type(module).__name__}) makes {changed[0]} in "
                    "forward, or changes there whether it is trained; do so in __init__"
                )
            if made is not None:
                own.row_losses(self.spec, output, made, rows)
        # The hooks are read after the counter ends, which has hooks of its own meanwhile.
        if registered := sorted(name for name, _ in hooked ^ _hooks(module)):
            raise JobError(
                f"model: layer {self.number} ({type(module).__name__}) registers a hook of "
                f"{registered[0]} in forward, or removes one there; do so in __init__"
            )
        if self.autocasts:
            output = map_tensors(_float_again, output)
        return _Run(
            output=output,
            flops=flops.get_total_flops(),
            kept_bytes=sum(kept.values()),
            draws=draws.any,
            device=device,
        )


def _trained(module: nn.Module) -> set[str]:
    return {name for name, p in module.named_parameters() if p.requires_grad}


def _hooks(module: nn.Module) -> set[tuple[str, int]]:
    """Return the hooks of parameters, as names and torch's numbers of hooks."""
    return {
        (name, number)
        for name, p in module.named_parameters()
        for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)
        for number in hooks or ()
    }


def _float_again(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _made(sketch: TensorSketch, rows: int, device: str) -> Tensor:
    """Return a leaf: floats from 0 to 1, and zeros of any other type."""
    dtype, shape = getattr(torch, sketch.dtype), (rows, *sketch.shape)
    make = torch.rand if dtype.is_floating_point and device == "cpu" else torch.zeros
    return make(shape, dtype=dtype, device=device).requires_grad_(sketch.gradient)


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Watch for random draws; `any`: whether anything was drawn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.any = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.any |= not _drops_nothing(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _drops_nothing(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether `func` is an attention without dropout, which draws nothing."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
            return bool(given == 0.0)
    return False


def _leave_the_compiler_out(mode: object) -> None:
    """Mark `mode` as never compiled, which nothing here is. Else torch would load its compiler, a
    second and 100 MB, to mark it itself."""
    raw = getattr(getattr(mode, "__torch_dispatch__", None), "__wrapped__", None)
    if raw is not None:
        raw.__dynamo_disable = raw


_leave_the_compiler_out(getattr(flop_counter, "_FlopCounterMode", None))
_leave_the_compiler_out(_Draws)


def _output(few: Any, more: Any, where: str) -> TreeSketch:
    """Sketch the output of a layer from what it gave for few rows and for more. Raises JobError."""
    try:
        tensors, others, form = flatten(few), flatten(more), structure(few)
    except (TypeError, ValueError) as error:
        raise JobError(f"model: {where} gives {error}") from error
    if form != structure(more):
        raise JobError(f"model: {where} gives other things for {_FEW} rows than for {_MORE}")
    found = []
    for tensor, other in zip(tensors, others, strict=True):
        shape = tuple(tensor.shape)
        if not shape or (shape[0], *other.shape[:1]) != (_FEW, _MORE):
            aux = "" if shape else f". Give an auxiliary loss by row, too. {PER_ROW}"
            raise JobError(
                f"model: {where} gives a tensor of shape {list(shape)} for {_FEW} rows; the first "
                f"dimension must be the rows{aux}"
            )
        if shape[1:] != tuple(other.shape[1:]):
            raise JobError(
                f"model: {where} gives rows of shape {list(shape[1:])} and {list(other.shape[1:])};"
                " a row's shape must not depend on the others or on the numbers in it"
            )
        if tensor.is_inference():
            raise JobError(
                f"model: {where} gives a tensor of inference mode, which no layer behind it can be "
                "trained on; use torch.no_grad() in place of torch.inference_mode()"
            )
        if _name(tensor.dtype) not in ITEM_BYTES:
            raise JobError(f"model: {where} gives {tensor.dtype}, which cannot be sent")
        found.append(
            TensorSketch(shape=shape[1:], dtype=_name(tensor.dtype), gradient=tensor.requires_grad)
        )
    return TreeSketch(tensors=tuple(found), structure=form)


def _tied(spec: OwnModelSpec, count: int) -> tuple[Tie, ...]:
    """Return the ties: which layers share which parameters. Raises JobError."""
    try:
        same = same_parameters(own.user_model(spec).tied, count)
    except ValueError as error:
        raise JobError(f"model: {error}") from error
    by_layers: dict[tuple[int, ...], list[tuple[str, ...]]] = defaultdict(list)
    for places in same:
        layers, names = zip(*places, strict=True)
        by_layers[layers].append(names)
    for one, other in combinations(by_layers, 2):
        for layer in sorted(set(one) & set(other)):
            raise JobError(
                f"model: tied has layer {layer} share {by_layers[one][0][one.index(layer)]} in the "
                f"layers {list(one)}, and {by_layers[other][0][other.index(layer)]} in "
                f"{list(other)}; a layer may share with one set of layers alone: give all of them "
                "the same, or put two layers into one"
            )
    return tuple(
        Tie(layers=layers, names=tuple(zip(*names, strict=True)))
        for layers, names in by_layers.items()
    )


def _check_alike(tied: Sequence[Tie], shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
    """Raise JobError where one parameter has two shapes. `shapes`: by layer."""
    for tie in tied:
        for layer, names in zip(tie.layers, tie.names, strict=True):
            for first, name in zip(tie.names[0], names, strict=True):
                first_shape, shape = shapes[tie.layers[0]][first], shapes[layer][name]
                if shape != first_shape:
                    raise JobError(
                        f"model: tied pairs {tie.layers[0]}.{first} of shape "
                        f"{list(first_shape)} with {layer}.{name} of shape {list(shape)}; "
                        "both must have one shape"
                    )
