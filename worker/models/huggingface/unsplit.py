"""A model of transformers cut open: its parts without weights, and what its layers are handed.

A base model of transformers computes masks, rotary tables and positions once and hands them to
each decoder layer. Here its own `forward` runs with stand-ins for the decoder layers, which note
what they are handed: nothing of it is written anew, so a family's windows, scales and kinds of
layers come out as they do there.

That a chain of layers computes what the whole model does is proved and not assumed, for every
model that is taken (`prove`): the stand-ins' tensors are followed through `forward`. Each must go
into the next one and the last into the final norm as it is, and all else that a layer is handed
must not depend on the tokens.
"""

import contextlib
import copy
import dataclasses
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from oobleck.worker.models.huggingface.architecture import Architecture, configuration
from oobleck.worker.models.huggingface.handed import Differ, Handed, moved
from oobleck.worker.runtime.errors import JobError

#: Tokens of the proof: masks and tables are made alike for any number.
_FEW = 4
#: Parameters beside token embedding and decoder layers, which the proof makes: a norm, positions.
_MOST = 1 << 26
#: What is raised by code of transformers that was made for another config or another use.
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
    """A whole model on the meta device, taken apart. Not to be changed: layers are copies of it."""

    #: The model without its decoder layers.
    model: Any
    #: What its list of decoder layers is called in the base model.
    name: str
    layers: tuple[nn.Module, ...]
    #: Whether a decoder layer gives a tuple whose first is the hidden states.
    tuples: bool = False
    #: What the base model calls its final norm.
    norm: str = ""

    @property
    def base(self) -> Any:
        return self.model.base_model

    @property
    def prefix(self) -> str:
        """What the names of a base model's parameters begin with in the whole model."""
        return f"{self.model.base_model_prefix}."


class StandIn(nn.Module):
    """In the place of a decoder layer: notes what it is handed and gives a tensor of its own."""

    def __init__(self, layer: nn.Module, tuples: bool) -> None:
        super().__init__()
        # No child: it has no values.
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
        # One number of its own, seen everywhere: a copy per layer would take gigabytes.
        self.given = self.taken.new_zeros((), requires_grad=True).expand(self.taken.shape)
        return (self.given,) if self._tuples else self.given


class _Words(nn.Module):
    """In the place of the token embedding: the tensor that it was made with."""

    def __init__(self, embedded: Tensor) -> None:
        super().__init__()
        self.embedded = embedded
        # Some base models draw it by name.
        self.weight = nn.Parameter(embedded.new_zeros(1, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedded


@lru_cache(maxsize=4)
def take_apart(architecture: Architecture, dtype: torch.dtype) -> Parts:
    """The parts, in that precision; proved to be a chain. Raises JobError."""
    model = _whole(architecture, dtype)
    base = model.base_model
    count = getattr(configuration(architecture), "num_hidden_layers", 0)
    lists = [
        name
        for name, child in base.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    if base is model or len(lists) != 1 or count < 1:
        raise _unfit(architecture, "its decoder layers are not one list in its base model")
    layers = tuple(getattr(base, lists[0]))
    setattr(base, lists[0], nn.ModuleList())
    parameters = [id(p) for layer in layers for p in layer.parameters()]
    if len(set(parameters)) != len(parameters):
        raise _unfit(architecture, "its decoder layers share parameters")
    if (
        sum(p.numel() for p in base.parameters()) - base.get_input_embeddings().weight.numel()
        > _MOST
    ):
        raise _unfit(architecture, "its base model has large parts beside its decoder layers")
    try:
        return prove(architecture, Parts(model, lists[0], layers))
    except JobError as error:
        # Which of both a family's layers give shows in what its base model makes of it.
        with contextlib.suppress(JobError):
            return prove(architecture, Parts(model, lists[0], layers, tuples=True))
        raise error from None


def _whole(architecture: Architecture, dtype: torch.dtype) -> Any:
    """The model on the meta device; leaves the random numbers of the process as they were."""
    config = copy.deepcopy(configuration(architecture))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return architecture.model_class(config)
    except REFUSALS as error:
        raise JobError(
            f"model.config: {architecture.name} cannot be built with it: {_line(error)}; correct it"
        ) from error
    finally:
        torch.set_default_dtype(before)


def prove(architecture: Architecture, parts: Parts) -> Parts:
    """`parts` with the name of the final norm. Raises JobError where they are no chain."""
    run = _run(architecture, parts, 1, _FEW)
    for before, after in zip(run.stands, run.stands[1:], strict=False):
        if not _is(after.taken, before.given):
            raise _unfit(architecture, "something happens between two of its decoder layers")
    norms = [call for call in run.calls if _is(call.taken, run.stands[-1].given)]
    if len(norms) != 1:
        raise _unfit(architecture, "its last decoder layer does not go into one final norm")
    if not _is(run.out, norms[0].given) or run.out._version != norms[0].version:
        raise _unfit(architecture, "something happens between its final norm and its head")
    _merge(architecture, run.stands, _run(architecture, parts, 2, _FEW).stands)
    parts = dataclasses.replace(parts, norm=norms[0].name)
    mask = no_mask(torch.device("cpu"))
    _, embedded = _call(architecture, parts, front(parts), 1, _FEW, attention_mask=mask)
    taken = run.stands[0].taken
    if embedded.shape != taken.shape or not torch.equal(embedded, taken):
        raise _unfit(architecture, "its final norm is used in front of its decoder layers too")
    return parts


def front(parts: Parts) -> Any:
    """A base model that gives what its first decoder layer takes; on the meta device."""
    base = copy.deepcopy(parts.base)
    setattr(base, parts.norm, nn.Identity())
    return base


def no_mask(device: torch.device) -> Tensor:
    """A mask that is taken as it is: with no layers none has to be made, which would take memory of
    the length squared, and on a GPU a wait."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def _is(one: Any, other: Any) -> bool:
    """Whether both are one tensor, or one is a view of all of the other in its shape."""
    return (
        isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and (one.data_ptr(), one.shape, one.stride())
        == (other.data_ptr(), other.shape, other.stride())
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """Of a child of the base model."""

    name: str
    taken: Any
    given: Any
    #: Of what it gave, at that time: a later one has been written to.
    version: int | None


@dataclass(frozen=True, slots=True)
class _Run:
    stands: list[StandIn]
    calls: list[_Call]
    #: What the base model gave.
    out: Any


def _run(architecture: Architecture, parts: Parts, rows: int, length: int) -> _Run:
    """With stand-ins for the decoder layers. Raises JobError."""
    base = copy.deepcopy(parts.base)
    stands = [StandIn(layer, parts.tuples) for layer in parts.layers]
    setattr(base, parts.name, nn.ModuleList(stands))
    calls, out = _call(architecture, parts, base, rows, length)
    if any(stand.given is None for stand in stands):
        raise _unfit(architecture, "not all of its decoder layers are called")
    return _Run(stands, calls, out)


def _call(
    architecture: Architecture,
    parts: Parts,
    base: Any,
    rows: int,
    length: int,
    **options: Any,
) -> tuple[list[_Call], Any]:
    """The own forward of `base` on the CPU, with nothing of size in it: calls and result. Other
    `rows`, other tokens and hidden states. Raises JobError."""
    width = parts.base.get_input_embeddings().embedding_dim
    dtype = next(parts.layers[0].parameters()).dtype
    with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
        ids = torch.arange(rows * length).view(rows, length) * rows % 7
        values = torch.linspace(-1.0, rows, width, dtype=dtype).requires_grad_()
        # Not the leaf itself, in which nothing may be written.
        embedded = values.expand(rows, length, width) * 1
        base.set_input_embeddings(_Words(embedded))
        calls: list[_Call] = []
        for name, child in base.named_children():
            child.register_forward_hook(partial(_note, calls, name))
        try:
            with torch.random.fork_rng(devices=[]):
                fill(base, architecture, parts.base, torch.device("cpu"))
                # What is dropped is the same in all runs.
                torch.default_generator.manual_seed(0)
                return calls, base(input_ids=ids, use_cache=False, **options)[0]
        except JobError:
            raise
        except REFUSALS as error:
            raise _unfit(
                architecture,
                f"its base model does not run with layers that give hidden states ({_line(error)})",
            ) from error


def _note(calls: list[_Call], name: str, _: Any, taken: Any, given: Any) -> None:
    version = given._version if isinstance(given, Tensor) else None
    calls.append(_Call(name, taken[0] if taken else None, given, version))


@torch.no_grad()
def materialise(module: nn.Module, owner: Any, device: torch.device) -> list[str]:
    """Give a module that is on the meta device its values, as `owner`, a model of transformers,
    does; the names of those that got none.

    Values that are there stay: those that were loaded are marked as transformers marks them.
    """
    made: list[tuple[str, Tensor, int]] = []
    for path, part in module.named_modules():
        for values in (part._parameters, part._buffers):
            for name, value in values.items():
                if value is None or not value.is_meta:
                    continue
                new = torch.empty_like(value, device=device)
                if isinstance(value, nn.Parameter):
                    new = nn.Parameter(new, value.requires_grad)
                values[name] = new
                made.append((f"{path}.{name}", new, new._version))
    module.apply(owner._init_weights)
    return [name for name, value, version in made if value._version == version]


def fill(module: nn.Module, architecture: Architecture, owner: Any, device: torch.device) -> None:
    """As `materialise`. Raises JobError where a value is missing."""
    untouched = materialise(module, owner, device)
    if untouched:
        raise JobError(
            f"model.architecture: transformers has no initial value for {untouched[0]} of "
            f"{architecture.name}; give model.weights that have it, or another architecture"
        )


@lru_cache(maxsize=8)
def handed(
    architecture: Architecture, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[Handed, ...]:
    """What the decoder layers are handed for rows of `length` tokens, the first layer's first.

    For one row, which stands for all: nothing of it depends on the tokens. A tensor that several
    layers share is here once. Raises JobError.
    """
    parts = take_apart(architecture, dtype)
    one, two = (_run(architecture, parts, rows, length).stands for rows in (1, 2))
    return moved(_merge(architecture, one, two), device)


def _merge(architecture: Architecture, one: list[StandIn], two: list[StandIn]) -> list[Handed]:
    """What the layers are handed for one row, from runs with one and with two other ones."""
    try:
        return [ours.handed.common(others.handed) for ours, others in zip(one, two, strict=True)]
    except Differ as error:
        raise _unfit(
            architecture,
            "its decoder layers are handed more than hidden states and what follows from positions",
        ) from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _unfit(architecture: Architecture, why: str) -> JobError:
    return JobError(
        f"model.architecture: {architecture.name} cannot be cut into layers: {why}; give another "
        "one, or write the model as layers of your own (oobleck.model)"
    )
