"""Parts of a transformers model, without weights, and the arguments of its layers.

A base model of transformers computes masks, rotary tables and positions once and hands them to
each of its layers. Here its own `forward` runs with stand-ins for the layers, which record their
arguments. Nothing is reimplemented, so a family's windows, scales and kinds of layers come out as
in transformers.

`prove` checks for every model that a chain of layers computes what the whole model does. It follows
the stand-ins' tensors through `forward`. Each must reach the next stand-in unchanged. The last must
pass through the final modules, mostly one norm, and become the result. Other arguments of a layer
must not depend on the tokens.
"""

import copy
import dataclasses
import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedModel

from oobleck.worker.models.huggingface.architecture import Architecture, configuration, senses
from oobleck.worker.models.huggingface.handed import Differ, Handed, moved
from oobleck.worker.models.own import without_draws
from oobleck.worker.models.tree import cached
from oobleck.worker.runtime.errors import JobError

#: Tokens of the proof: masks and tables are made alike for any number.
_FEW = 4
#: Parameters beside token embedding and decoder layers, which the proof makes: a norm, positions.
_MOST = 1 << 26
#: Errors that code of transformers raises if it was made for another config or another use.
REFUSALS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    AssertionError,
    ArithmeticError,
    ImportError,
    StrictDataclassError,
)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a whole model on the meta device. Do not change them: layers are copies."""

    #: The model without its layers.
    model: Any
    #: The attribute of the base model in `model`.
    inner: str
    #: The path of the list of layers in the base model.
    name: str
    layers: tuple[nn.Module, ...]
    #: True if a layer returns a tuple that begins with the hidden states.
    tuples: bool = False
    #: Modules of the base model after the layers, in order.
    final: tuple[str, ...] = ()
    #: The module that pools each row of the result to one vector; empty: none.
    pooler: str = ""
    #: True if the base model without layers accepts `no_mask`.
    masked: bool = True

    @property
    def base(self) -> Any:
        return getattr(self.model, self.inner)

    @property
    def prefix(self) -> str:
        """Prefix of a base model's parameter names in the whole model."""
        return f"{self.inner}."


class StandIn(nn.Module):
    """A stand-in for a layer: records its arguments and returns a tensor of its own."""

    def __init__(self, layer: nn.Module, tuples: bool) -> None:
        super().__init__()
        # The layer is no child, since it has no values.
        self._layer = (layer,)
        self._tuples = tuples
        self.taken: Any = None
        self.given: Tensor | None = None
        self.handed = Handed((), {})

    def __getattr__(self, name: str) -> Any:
        # A base model may ask a layer which kind it is.
        return getattr(vars(self)["_layer"][0], name)

    def forward(self, *positional: Any, **named: Any) -> Any:
        if positional:
            self.taken, *rest = positional
        else:
            self.taken, rest = named.pop("hidden_states"), []
        self.handed = Handed(tuple(rest), named)
        # The tensor has one number of its own, seen everywhere: a copy per layer would take
        # gigabytes.
        self.given = self.taken.new_zeros((), requires_grad=True).expand(self.taken.shape)
        return (self.given,) if self._tuples else self.given


class _DoesNotRun(JobError):
    """An error of a base model that fails with stand-ins."""


class _Words(nn.Module):
    """A stand-in for the token embedding: returns the tensor that it was made with."""

    def __init__(self, embedded: Tensor) -> None:
        super().__init__()
        self.embedded = embedded
        # Some base models draw the weight by name.
        self.weight = nn.Parameter(embedded.new_zeros(1, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedded


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a module in the base model: its first argument and its result."""

    name: str
    taken: Any
    given: Any
    #: Versions of both tensors at the call; a later version means an in-place write since.
    taken_version: int | None
    version: int | None


@dataclass(frozen=True, slots=True)
class _Run:
    stands: list[StandIn]
    calls: list[_Call]
    #: The base model's result: hidden states, and one vector per row if it pools.
    out: Any
    pooled: Any


@cached(maxsize=4)
def take_apart(architecture: Architecture, dtype: torch.dtype) -> Parts:
    """Return the parts of the model in that precision, and prove that they are a chain. Raises
    JobError."""
    model = _whole(architecture, dtype)
    inner = _inner(model)
    base: Any = getattr(model, inner, None)
    count = getattr(configuration(architecture), "num_hidden_layers", 0)
    lists = [] if base is None else _lists(base, count)
    if len(lists) != 1 or count < 1:
        if several := senses(architecture.model_class):
            raise JobError(f"model.architecture: {architecture.name} {several}")
        raise _unfit(architecture, "its layers are not one list in its base model")
    layers = tuple(base.get_submodule(lists[0]))
    base.set_submodule(lists[0], nn.ModuleList())
    parameters = [id(p) for layer in layers for p in layer.parameters()]
    if len(set(parameters)) != len(parameters):
        raise _unfit(architecture, "its layers share parameters")
    if architecture.task == "causal" and _sees_ahead(architecture, layers):
        raise JobError(
            f"model.config: {architecture.name} sees the tokens that it has to predict unless it "
            "is a decoder; set is_decoder to true"
        )
    embedding = _embedding_size(architecture, base)
    if sum(p.numel() for p in base.parameters()) - embedding > _MOST:
        raise _unfit(architecture, "its base model has large parts beside its layers")
    try:
        return prove(architecture, Parts(model, inner, lists[0], layers))
    except JobError as error:
        # Layers of a family give a tensor or a tuple; its base model shows which one it takes.
        try:
            return prove(architecture, Parts(model, inner, lists[0], layers, tuples=True))
        except _DoesNotRun:
            raise error from None


def _inner(model: Any) -> str:
    """Return the attribute of the base model in `model`; empty if none is found."""
    if model.base_model is not model:
        return str(model.base_model_prefix)
    # In a few models the attribute is not `base_model_prefix`.
    bases = [name for name, child in model.named_children() if isinstance(child, PreTrainedModel)]
    return bases[0] if len(bases) == 1 else ""


def _sees_ahead(architecture: Architecture, layers: tuple[nn.Module, ...]) -> bool:
    """Return whether a causal language model uses an encoder's layers, which see later tokens."""
    if getattr(configuration(architecture), "is_decoder", None) is not False:
        return False
    # The layers of a few decoders ignore that key.
    parts = (part for layer in layers for part in layer.modules())
    return any(getattr(part, "is_decoder", None) is False for part in parts)


def _embedding_size(architecture: Architecture, base: Any) -> int:
    """Return the parameter count of the embedding of tokens or image patches. Raises JobError."""
    try:
        embedding = base.get_input_embeddings()
        if architecture.task == "image" or isinstance(embedding.embedding_dim, int):
            return sum(p.numel() for p in embedding.parameters())
    except (NotImplementedError, AttributeError):
        pass
    raise _unfit(architecture, "its base model has no one embedding of what it takes")


def _lists(base: nn.Module, count: int) -> list[str]:
    """Return the paths in `base` of lists of `count` modules, none within another list. If `base`
    itself has such lists, return only these."""
    found: list[str] = []
    within: list[str] = []
    for name, child in base.named_modules():
        if isinstance(child, nn.ModuleList) and not name.startswith(tuple(within)):
            within.append(f"{name}.")
            found += [name] if len(child) == count else []
    return [name for name in found if "." not in name] or found


def _whole(architecture: Architecture, dtype: torch.dtype) -> Any:
    """Build the model on the meta device. The random numbers of the process stay as they were.
    Raises JobError."""
    config = copy.deepcopy(configuration(architecture))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), without_draws(), torch.random.fork_rng(devices=[]):
            return architecture.model_class(config)
    except REFUSALS as error:
        raise JobError(
            f"model.config: {architecture.name} cannot be built with it: {_line(error)}; correct it"
        ) from error
    finally:
        torch.set_default_dtype(before)


def prove(architecture: Architecture, parts: Parts) -> Parts:
    """Return `parts` with the modules after the layers. Raises JobError if they are no chain."""
    run = _run(architecture, parts, 1, _FEW)
    for before, after in zip(run.stands, run.stands[1:], strict=False):
        if not _is(after.taken, before.given):
            raise _unfit(architecture, "something happens between two of its layers")
    final = _final(architecture, run)
    _merge(architecture, run.stands, _run(architecture, parts, 2, _FEW).stands)
    parts = dataclasses.replace(parts, final=final, pooler=_pooler(architecture, run))
    taken = run.stands[0].taken
    for masked in True, False:
        found = dataclasses.replace(parts, masked=masked)
        try:
            embedded = _call(architecture, found, front(found), 1, _FEW, masked=masked)[1][0]
        except JobError:
            if not masked:
                raise
            continue  # no mask, or one of another form
        if _same(embedded, taken):
            return found
    raise _unfit(architecture, "its final norm is used in front of its layers too")


def _same(embedded: Tensor, taken: Tensor) -> bool:
    return embedded.shape == taken.shape and torch.equal(embedded, taken)


def _final(architecture: Architecture, run: _Run) -> tuple[str, ...]:
    """Return the modules between the last layer and the result, in order. Raises JobError."""
    given: Any = run.stands[-1].given
    version: int | None = 0
    names: list[str] = []
    while not _is(run.out, given):
        calls = [call for call in _outermost(run.calls, given) if call.name not in names]
        if len(calls) != 1 or calls[0].taken_version != version:
            raise _unfit(
                architecture,
                "something happens between its final norm and its head"
                if names
                else "its last layer does not go into one final norm",
            )
        given, version = calls[0].given, calls[0].version
        names.append(calls[0].name)
    if run.out._version != version:
        raise _unfit(architecture, "something happens between its final norm and its head")
    return tuple(names)


def _pooler(architecture: Architecture, run: _Run) -> str:
    """Return the module that makes the pooled result; empty if none does. Raises JobError."""
    if not isinstance(run.pooled, Tensor):
        return ""
    calls = [call for call in _outermost(run.calls, run.out) if _is(run.pooled, call.given)]
    if len(calls) != 1 or calls[0].version != run.pooled._version:
        raise _unfit(architecture, "its pooled result does not come from one module")
    return calls[0].name


def _outermost(calls: list[_Call], taken: Any) -> list[_Call]:
    """Return the outermost calls that took `taken` and gave a tensor."""
    found = [call for call in calls if _is(call.taken, taken) and isinstance(call.given, Tensor)]
    return [c for c in found if not any(c.name.startswith(f"{o.name}.") for o in found)]


def front(parts: Parts) -> Any:
    """Return a base model whose result is its first layer's input; on the meta device."""
    base = copy.deepcopy(parts.base)
    for name in filter(None, (*parts.final, parts.pooler)):
        base.set_submodule(name, nn.Identity())
    return base


def no_mask(device: torch.device) -> Tensor:
    """Return a small mask that the model uses as it is. Without layers it needs no full mask, whose
    memory grows with the length squared, and which makes the host wait for a GPU."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def _is(one: Any, other: Any) -> bool:
    """Return whether both are one tensor, or one is a view of all of the other in its shape."""
    return (
        isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and (one.data_ptr(), one.shape, one.stride())
        == (other.data_ptr(), other.shape, other.stride())
    )


def _run(architecture: Architecture, parts: Parts, rows: int, length: int) -> _Run:
    """Run the base model with stand-ins for the layers. Raises JobError."""
    base = copy.deepcopy(parts.base)
    stands = [StandIn(layer, parts.tuples) for layer in parts.layers]
    base.set_submodule(parts.name, nn.ModuleList(stands))
    calls, out = _call(architecture, parts, base, rows, length)
    if any(stand.given is None for stand in stands):
        raise _unfit(architecture, "not all of its layers are called")
    return _Run(stands, calls, out[0], getattr(out, "pooler_output", None))


def _call(
    architecture: Architecture,
    parts: Parts,
    base: Any,
    rows: int,
    length: int,
    *,
    masked: bool = False,
) -> tuple[list[_Call], Any]:
    """Run `base`'s own forward on the CPU, without large tensors; return calls and result.
    Different `rows` have different tokens and hidden states. Raises JobError."""
    dtype = next(parts.layers[0].parameters()).dtype
    with torch.device("cpu"):
        given = (_pixels if architecture.task == "image" else _words)(
            architecture, base, rows, length, dtype
        )
        calls: list[_Call] = []
        for name, child in base.named_modules():
            if name and not f"{name}.".startswith(f"{parts.name}."):
                child.register_forward_hook(partial(_note, calls, name), with_kwargs=True)
        options = {"attention_mask": no_mask(torch.device("cpu"))} if masked else {}
        try:
            with torch.random.fork_rng(devices=[]):
                fill(base, architecture, parts.base, torch.device("cpu"))
                if rows > 1 and architecture.weights is not None:
                    _alter_constants(base)
                # The same values are dropped in all runs.
                torch.default_generator.manual_seed(0)
                named = {architecture.input_name: given}
                return calls, base(**named, **without_cache(base), **options)
        except JobError:
            raise
        except REFUSALS as error:
            raise _unfit(
                architecture,
                f"its base model does not run with layers that give hidden states "
                f"alone ({_line(error)})",
                _DoesNotRun,
            ) from error


@torch.no_grad()
def _alter_constants(base: nn.Module) -> None:
    """Change constants of `base` that may be in files of weights. Layers' arguments must not depend
    on them: here they have their initial values instead of the files'."""
    for value in base.state_dict(keep_vars=True).values():
        if value.is_floating_point() and not value.requires_grad:
            value.add_(1.0)


def _words(
    architecture: Architecture, base: Any, rows: int, length: int, dtype: torch.dtype
) -> Tensor:
    """Return ids, and make `base` embed other numbers for other `rows`."""
    ids = torch.arange(rows * length).view(rows, length) * rows % 7
    padding = getattr(configuration(architecture), "pad_token_id", None)
    if rows > 1 and padding is not None:
        ids[-1, -1] = padding  # a mask that leaves out padding would depend on the tokens
    width = base.get_input_embeddings().embedding_dim
    values = torch.linspace(-1.0, rows, width, dtype=dtype).requires_grad_()
    # The result is not the leaf itself, so that in-place writes are allowed.
    base.set_input_embeddings(_Words(values.expand(rows, length, width) * 1))
    return ids


def _pixels(
    architecture: Architecture, base: Any, rows: int, length: int, dtype: torch.dtype
) -> Tensor:
    """Return images of the config's size, with other numbers for other `rows`."""
    config = configuration(architecture)
    size, channels = config.image_size, config.num_channels
    high, wide = size if isinstance(size, list | tuple) else (size, size)
    values = torch.linspace(-1.0, rows, wide, dtype=dtype).requires_grad_()
    return values.expand(rows, channels, high, wide) * 1


def without_cache(module: Any) -> dict[str, bool]:
    """Return arguments that make a transformers model keep no keys and values."""
    known = inspect.signature(module.forward).parameters
    return {"use_cache": False} if "use_cache" in known else {}


def _note(
    calls: list[_Call], name: str, _: Any, taken: Any, named: dict[str, Any], given: Any
) -> None:
    first = taken[0] if taken else named.get("hidden_states")
    versions = (one._version if isinstance(one, Tensor) else None for one in (first, given))
    calls.append(_Call(name, first, given, *versions))


@torch.no_grad()
def materialise(module: nn.Module, owner: Any, device: torch.device) -> list[str]:
    """Give a module on the meta device its initial values, as `owner`, a model of transformers,
    does. Return the names of tensors that got none. Loaded values, which transformers marks,
    stay."""
    made: list[tuple[str, Tensor, int]] = []
    #: New tensors by the old one's id, since a tensor may have two names.
    new: dict[int, Tensor] = {}
    for path, part in module.named_modules():
        for values in (part._parameters, part._buffers):
            for name, value in values.items():
                if value is None or not value.is_meta:
                    continue
                if id(value) not in new:
                    empty = torch.empty_like(value, device=device)
                    new[id(value)] = (
                        nn.Parameter(empty, value.requires_grad)
                        if isinstance(value, nn.Parameter)
                        else empty
                    )
                    made.append((f"{path}.{name}", new[id(value)], new[id(value)]._version))
                values[name] = new[id(value)]
    module.apply(owner._init_weights)
    return [name for name, value, version in made if value._version == version]


def fill(module: nn.Module, architecture: Architecture, owner: Any, device: torch.device) -> None:
    """Fill `module` by `materialise`. Raises JobError where a value is missing."""
    untouched = materialise(module, owner, device)
    if untouched:
        raise JobError(
            f"model.architecture: transformers has no initial value for {untouched[0]} of "
            f"{architecture.name}; give model.weights that have it, or another architecture"
        )


@cached(maxsize=8)
def handed(
    architecture: Architecture, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[Handed, ...]:
    """Return the arguments of each layer, in order, for rows of `length` tokens.

    They are for one row, and serve for all since none depends on the tokens. Layers that share a
    tensor share it here too. Raises JobError.
    """
    parts = take_apart(architecture, dtype)
    one, two = (_run(architecture, parts, rows, length).stands for rows in (1, 2))
    return moved(_merge(architecture, one, two), device)


def _merge(architecture: Architecture, one: list[StandIn], two: list[StandIn]) -> list[Handed]:
    """Return the layers' arguments for one row, from runs with one row and with two other rows."""
    try:
        return [ours.handed.common(others.handed) for ours, others in zip(one, two, strict=True)]
    except Differ as error:
        raise _unfit(
            architecture,
            "its layers are handed more than hidden states and what follows from positions",
        ) from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _unfit(architecture: Architecture, why: str, kind: type[JobError] = JobError) -> JobError:
    return kind(
        f"model.architecture: {architecture.name} cannot be cut into layers: {why}; give another "
        "one, or write the model as layers of your own (oobleck.model)"
    )
