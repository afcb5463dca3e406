"""Models of transformers as layers, if their layers form one chain under a head.

The family's own classes compute. Layer 0 is the base model without layers and final norm. Each of
its layers follows. The last layer is the final norm and the head. Between layers travel hidden
states, and with them routing sums or ids if the loss or the head needs them. Masks and rotary
tables are made anew for each layer (`unsplit`).
"""

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oobleck.core.job.code import NO_ARGUMENTS, Json
from oobleck.core.job.description import Foreign
from oobleck.core.job.model import LoraSpec, OwnModelSpec
from oobleck.model import Model, Tensors
from oobleck.worker.models.compiled import Prepared
from oobleck.worker.models.huggingface import pretrained
from oobleck.worker.models.huggingface.architecture import (
    Architecture,
    choose,
    configuration,
    fresh_configuration,
)
from oobleck.worker.models.huggingface.balancing import (
    Balance,
    balance_of,
    balancing_losses,
    recorded,
    routing_sums,
)
from oobleck.worker.models.huggingface.lora import adapt, adapter_config, choose_adapters
from oobleck.worker.models.huggingface.unsplit import (
    fill,
    front,
    handed,
    no_mask,
    take_apart,
    without_cache,
)
from oobleck.worker.models.own import without_draws
from oobleck.worker.models.tree import shown
from oobleck.worker.runtime.errors import JobError

#: Name that a layer gives its part of transformers.
_PART = "part."
#: Targets that are not counted, as in transformers.
_IGNORED = -100


def causal_lm(
    architecture: str | None = None,
    config: Mapping[str, Any] | None = None,
    weights: str | None = None,
    *,
    sequence_length: int | None = None,
    lora: Mapping[str, Any] | None = None,
) -> Model:
    """Return the model `architecture`, such as `Qwen3ForCausalLM`, as transformers computes it.

    `config` has keys of its config class; missing keys have transformers' defaults. `weights` is a
    directory as `save_pretrained` writes it. Its config.json gives the architecture and the keys
    that `config` lacks; its safetensors give the initial weights. Without `weights`, transformers'
    initialisation draws them. Rows are full: there is no padding mask.

    Layer 0 takes ids (b, T), or pixels (b, channels, height, width) if the model classifies images.
    The loss of language models and of labels per token is the mean cross entropy over the global
    batch's tokens, except those with target -100. The loss of labels per row is `label_losses`.

    With `output_router_logits: true` in the config, a causal model adds the experts' load-balancing
    loss times `router_aux_loss_coef`. It is computed for each row alone, as transformers does for a
    batch of that row, and weighted by the row's tokens. Its sums, (b, 2, experts), travel with the
    hidden states.

    `lora` has keys of peft's LoraConfig. With it, only adapters on the named linear layers are
    trained.

    Raises JobError, a ValueError, with the key at fault and the fix.
    """
    chosen = choose(architecture, config, weights)
    found = configuration(chosen)
    if chosen.task == "image":
        if sequence_length is not None:
            raise JobError(
                f"model.sequence_length: {chosen.name} takes images, whose size is the config's "
                "image_size; leave it out"
            )
    elif sequence_length is None:
        raise JobError("model.sequence_length: is missing; give the tokens of a row")
    most = getattr(found, "max_position_embeddings", None)
    if sequence_length is not None and isinstance(most, int) and 0 < most < sequence_length:
        raise JobError(
            f"model.sequence_length: {sequence_length} is beyond the config's "
            f"max_position_embeddings {most}; shorten it, or set that key"
        )
    parts = take_apart(chosen, torch.get_default_dtype())
    if chosen.task == "sequence" and getattr(found, "pad_token_id", None) is None:
        raise JobError(
            f"model.config: {chosen.name} looks for the last token of a row that is not "
            "pad_token_id, which is null; set it to a number that the data pads with"
        )
    last = len(parts.layers) + 1
    if weights is not None:
        for number in range(last + 1):
            pretrained.check(chosen, foreign_names(chosen, number))
    adapters = None if lora is None else choose_adapters(chosen, lora)
    return Model(
        layers=[partial(build, chosen, number, adapters) for number in range(last + 1)],
        loss=_loss(chosen),
        # Frozen weights are the same in both anyway.
        tied=[] if adapters else list(_tied(chosen, last)),
    )


def _loss(
    architecture: Architecture,
) -> Callable[[Tensors, Tensors], Tensor | tuple[Tensor, Tensor]]:
    if architecture.task in ("sequence", "image"):
        config = configuration(architecture)
        return partial(label_losses, problem=config.problem_type, labels=config.num_labels)
    balance = balance_of(architecture) or Balance(0.0, 0, ())
    return partial(row_losses, coefficient=balance.coefficient, chosen=balance.chosen)


def build(architecture: Architecture, number: int, lora: LoraSpec | None = None) -> nn.Module:
    """Build one layer, with its initial weights; on the meta device without."""
    last = len(take_apart(architecture, torch.get_default_dtype()).layers) + 1
    layer: nn.Module
    if number == 0:
        layer = Embedding(architecture)
    else:
        layer = Head(architecture) if number == last else Block(architecture, number - 1)
    if lora is not None:
        adapt(layer, _prefix(architecture, number), lora)
    return layer


def foreign_names(architecture: Architecture, number: int) -> dict[str, str]:
    """Map the name that layer `number` gives a parameter or a kept buffer to its name in the state
    of the whole model. `from_pretrained` understands the latter."""
    with torch.device("meta"), without_draws():
        layer = build(architecture, number)
    prefix = _prefix(architecture, number)
    return {name: prefix + name.removeprefix(_PART) for name in layer.state_dict()}


def _prefix(architecture: Architecture, number: int) -> str:
    """Return the prefix that the layer's modules have in the whole model."""
    parts = take_apart(architecture, torch.get_default_dtype())
    block = 0 < number <= len(parts.layers)
    return f"{parts.prefix}{parts.name}.{number - 1}." if block else ""


class Embedding(nn.Module):
    """The layer from ids (b, T) or pixels to hidden states (b, T, hidden). It passes ids on if the
    head looks for a row's last token."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self._architecture = architecture
        parts = take_apart(architecture, torch.get_default_dtype())
        self._masked = parts.masked
        self._options = without_cache(parts.base)
        # The part is under its name in the whole model, so that its parameters are called as there.
        self.part = nn.ModuleDict({parts.prefix[:-1]: front(parts)})
        _fill(self, architecture, parts.base, foreign="")

    def forward(self, x: Tensors) -> Tensors:
        _check_input(self._architecture, x)
        (base,) = self.part.values()
        options = {"attention_mask": no_mask(x.device)} if self._masked else {}
        named = {self._architecture.input_name: x}
        embedded: Tensor = base(**named, **self._options, **options)[0]
        return (embedded, x) if self._architecture.task == "sequence" else embedded


def _check_input(architecture: Architecture, x: Tensors) -> None:
    """Raise JobError unless the inputs are the one tensor that the model takes."""
    image = architecture.task == "image"
    what, size = ("pixels", 4) if image else ("ids of tokens", 2)
    if isinstance(x, Tensor) and x.dim() == size and x.is_floating_point() == image:
        return
    where = f" with {', '.join(map(repr, x))}" if isinstance(x, dict) else ""
    found = f"{shown(x)}" if isinstance(x, Tensor) else f"a {type(x).__name__}{where}"
    kinds = "floats (channels, height, width)" if image else "integers (tokens,)"
    raise JobError(
        f"model.architecture: {architecture.name} takes one tensor of {what} for each sample, "
        f"{kinds}, and the data gives {found}; give {architecture.input_name} alone as inputs. "
        "Rows are full, so there is no attention_mask, and labels are the targets"
    )


class Block(Prepared):
    """A layer of the model, from hidden states (b, T, hidden) to hidden states.

    Routing sums or ids may travel beside them.
    """

    def __init__(self, architecture: Architecture, index: int) -> None:
        super().__init__()
        self._architecture = architecture
        self._index = index
        balance = balance_of(architecture)
        self._recorders, self._chosen = (balance.recorders, balance.chosen) if balance else ((), 0)
        parts = take_apart(architecture, torch.get_default_dtype())
        self.part = copy.deepcopy(parts.layers[index])
        _fill(self, architecture, parts.base, foreign=f"{parts.prefix}{parts.name}.{index}.")

    def forward(self, x: Any) -> Any:
        return self.compute(self.prepare(x))

    def prepare(self, x: Tensors) -> Any:
        hidden, beside = x if isinstance(x, tuple) else (x, None)
        layers = handed(self._architecture, hidden.shape[1], hidden.device, hidden.dtype)
        extra = layers[self._index].to(len(hidden))
        return hidden, beside, extra.positional, extra.named

    def compute(self, prepared: Any) -> Tensors:
        hidden, beside, positional, named = prepared
        logits: list[Tensor] = []
        with recorded(self.part, self._recorders, logits):
            out = self.part(hidden, *positional, **named)
        out = out[0] if isinstance(out, tuple) else out
        for found in logits:
            added = routing_sums(found.view(len(hidden), -1, found.shape[-1]), self._chosen)
            beside = added if beside is None else beside + added
        return out if beside is None else (out, beside)


#: Fields of a base model's result that heads get, in order.
_GIVEN = ("last_hidden_state", "pooler_output")


class _Result(tuple[Tensor, ...]):
    """A base model's result: hidden states and, if it pools, one vector per row.

    All other fields are None.
    """

    def __getattr__(self, name: str) -> Tensor | None:
        return dict(zip(_GIVEN, self, strict=False)).get(name)


class _Tail(nn.Module):
    """A base model reduced to its modules after the layers, under their own names. It can also be
    the part of a base model that has all the layers."""

    def __init__(self, base: nn.Module, layers: str, final: Sequence[str], pooler: str) -> None:
        """Copy the modules at `final` and `pooler`. All paths, `layers` too, are within `base`."""
        super().__init__()
        self._final, self._pooler = final, pooler
        inner, _, rest = layers.partition(".")
        if rest:
            # Some heads call the part with the layers directly.
            within = [one.removeprefix(f"{inner}.") for one in final if one.startswith(f"{inner}.")]
            tail = _Tail(base.get_submodule(inner), rest, within, "")
            self.add_module(inner, tail)
        for path in filter(None, (*final, pooler)):
            if not (rest and path.startswith(f"{inner}.")):
                self.add_module(path, copy.deepcopy(base.get_submodule(path)))

    def forward(self, *given: Any, **named: Any) -> _Result:
        hidden = named.get("inputs_embeds")
        if hidden is None:  # the head of an image model hands its input on as pixels
            hidden = named["pixel_values"] if "pixel_values" in named else given[0]
        for path in self._final:
            hidden = self.get_submodule(path)(hidden)
        return _Result(
            (hidden, self.get_submodule(self._pooler)(hidden)) if self._pooler else (hidden,)
        )


class Head(nn.Module):
    """The last layer, from hidden states (b, T, hidden) to logits, (b, T, classes) or (b, classes).
    Routing sums travel beside them, if any."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self._task = architecture.task
        parts = take_apart(architecture, torch.get_default_dtype())
        base = parts.base
        tail = _Tail(base, parts.name, parts.final, parts.pooler)
        # The copy has the tail in the place of its base model, which is not copied.
        self.part = copy.deepcopy(parts.model, {id(base): tail})
        self._options = without_cache(self.part)
        _fill(self, architecture, parts.model, foreign="")

    def forward(self, x: Tensors) -> Tensors:
        hidden, beside = x if isinstance(x, tuple) else (x, None)
        named: dict[str, Any] = dict(self._options)
        match self._task:
            case "image":
                named["pixel_values"] = hidden
            case "sequence":
                named |= {"inputs_embeds": hidden, "input_ids": beside}
            case _:
                named["inputs_embeds"] = hidden
                if beside is not None:
                    # The routers' sums came with the hidden states; ask for no logits.
                    named["output_router_logits"] = False
        logits = self.part(**named).logits
        return logits if beside is None or self._task == "sequence" else (logits, beside)


def row_losses(
    output: Tensors, targets: Tensor, *, coefficient: float = 0.0, chosen: int = 0
) -> tuple[Tensor, Tensor]:
    """Return each row's sum of token losses and its number of learned tokens; see `causal_lm`."""
    logits, sums = output if isinstance(output, tuple) else (output, None)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(
        wide.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="none"
    )
    rows, counted = losses.view(targets.shape).sum(1), (targets != _IGNORED).sum(1)
    if sums is not None:
        rows = rows + counted * coefficient * balancing_losses(sums, chosen)
    return rows, counted


def label_losses(
    logits: Tensor, targets: Tensor, *, problem: str | None, labels: int
) -> Tensor | tuple[Tensor, Tensor]:
    """Return one loss per row for logits (b, labels), by transformers' `problem_type`. If that is
    None, `labels` and the targets' type decide.

    - single_label_classification: cross entropy; targets (b,) of integers. It comes with weights
      (b,), which are 0 for rows with label -100 and 1 for others.
    - regression, also chosen for one label: mean squared error
    - multi_label_classification: mean binary cross entropy; targets (b, labels) of floats
    """
    if problem is None:
        several = "multi_label" if targets.is_floating_point() else "single_label"
        problem = "regression" if labels == 1 else f"{several}_classification"
    single = problem == "single_label_classification"
    shape = (len(logits),) if single else tuple(logits.shape)
    if targets.numel() != math.prod(shape) or (single and targets.is_floating_point()):
        kinds = "one integer" if single else f"{labels} numbers" if labels > 1 else "one number"
        raise JobError(
            f"model.architecture: the loss of a {problem} takes {kinds} as the target of each "
            f"sample, and the data gives {shown(targets)} for {len(logits)} rows; correct the "
            "data, or the config's problem_type or num_labels"
        )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if single:
        wanted = targets.view(shape).long()
        losses = F.cross_entropy(wide, wanted, ignore_index=_IGNORED, reduction="none")
        return losses, (wanted != _IGNORED).long()
    loss = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
    return loss(wide, targets.view(shape).to(wide.dtype), reduction="none").flatten(1).mean(1)


def _tied(architecture: Architecture, last: int) -> Iterator[tuple[str, str]]:
    """Yield pairs of a parameter of layer 0 and its tied one in the head. Ties within the head need
    no pair."""
    parts = take_apart(architecture, torch.get_default_dtype())
    ahead = set(foreign_names(architecture, 0).values())
    for theirs, ours in parts.model.get_expanded_tied_weights_keys().items():
        if ours in ahead:
            yield f"0.{_PART}{ours}", f"{last}.{_PART}{theirs}"


def _fill(layer: nn.Module, architecture: Architecture, owner: Any, foreign: str) -> None:
    """Give the layer its initial weights, where it is not built on the meta device."""
    device = torch.empty(0).device
    if device.type == "meta":
        return
    if architecture.weights is not None:
        names = {name: foreign + name.removeprefix(_PART) for name in layer.state_dict()}
        pretrained.load(layer, architecture, names, device)
    fill(layer, architecture, owner, device)


def foreign(spec: OwnModelSpec) -> Foreign:
    """Return these facts for a model that is named by its architecture. Raises JobError."""
    chosen = choose(spec.architecture, json.loads(spec.config or NO_ARGUMENTS), spec.weights)
    parts = take_apart(chosen, torch.get_default_dtype())
    blocks = f"{parts.prefix}{parts.name}."
    if spec.lora is not None:
        config = adapter_config(chosen, spec.lora)
        return Foreign(config=config, blocks=blocks, adapters=True)
    return Foreign(
        config=_export_config(chosen),
        blocks=blocks,
        kept=tuple(_kept(chosen, len(parts.layers) + 2)) if chosen.weights is not None else (),
    )


def _export_config(architecture: Architecture) -> Json:
    config = fresh_configuration(architecture)
    config.architectures = [architecture.name]
    keys = json.loads(config.to_json_string())
    # transformers takes the weights' own precision then: the one that was trained in.
    keys.pop("dtype", None)
    return Json(json.dumps(keys))


def _kept(architecture: Architecture, count: int) -> Iterator[tuple[str, str]]:
    """Yield the tensors of an export that are not trained, with their names in the files that the
    model began with. Only those files have them. Raises JobError."""
    for number in range(count):
        with torch.device("meta"), without_draws():
            layer = build(architecture, number)
        names = foreign_names(architecture, number)
        parameters = layer.named_parameters(remove_duplicate=False)
        trained = {names[name] for name, p in parameters if p.requires_grad}
        kept = [full for full in names.values() if full not in trained]
        # Several may come from the same pieces.
        yield from dict.fromkeys(
            pair for full in kept for pair in pretrained.stored(architecture, full, trained)
        )
