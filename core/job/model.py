"""The model of a job, a row of layers.

A model of ours is known by its kind. A user's model is known by the code that makes it, and by its
description from before it is run.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from oobleck.core.job.checks import Count, Part, check_paths
from oobleck.core.job.code import NO_ARGUMENTS, NOT_DESCRIBED, Code, Json, check_code
from oobleck.core.job.description import Description, read_description
from oobleck.core.job.families import FAMILIES, Kind, family_of
from oobleck.core.job.family import Objective, decode_config
from oobleck.core.ties import Ties

RowLength = Annotated[int, Meta(ge=1, le=1 << 22)]
Vocabulary = Annotated[int, Meta(ge=2, le=1 << 24)]
#: Layers of a model at most.
MOST_LAYERS = 514
#: Keys that only a user's model has.
OWN_KEYS = ("plugin", "python", "architecture")
#: Name suffixes of transformers' classes that take images.
_IMAGES = ("ForImageClassification", "ForImageClassificationLearned")
#: Name suffixes of classes with one label per row.
_BY_ROW = ("ForSequenceClassification", *_IMAGES)
#: Name suffixes of classes that learn from labels, not the next token.
_LABELLED = ("ForMaskedLM", "FlaubertWithLMHeadModel", "ForTokenClassification", *_BY_ROW)
#: The function that splits a model of transformers into layers.
_TRANSFORMERS = "oobleck.worker.models.huggingface.causal_lm:causal_lm"


class AnyModel:
    """A row of layers, as planning and the files of a job see it. It is known by its kind
    (`ModelSpec`), or is the user's (`OwnModelSpec`)."""

    __slots__ = ()

    @property
    def family(self) -> str:
        """Name of the family that builds its layers."""
        raise NotImplementedError

    @property
    def tokens(self) -> int:
        """Vocabulary size, where the model takes rows of tokens."""
        raise NotImplementedError

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> "AnyModel":
        """Build the model from its fields, as `oobleck.core.codec` reads them; raises
        ValueError."""
        own = any(tree.get(key) is not None for key in OWN_KEYS)
        return msgspec.convert(tree, OwnModelSpec if own else ModelSpec)

    @property
    def layer_count(self) -> int:
        """Count of units of placement."""
        raise NotImplementedError

    @property
    def order(self) -> tuple[int, ...]:
        """Kind of each layer as a number from 0; layers of a kind cost the same."""
        raise NotImplementedError

    @property
    def ties(self) -> Ties:
        """Groups of layers that share parameters."""
        raise NotImplementedError

    @property
    def row_tokens(self) -> int:
        """Tokens of a sample; 1 where samples are not tokens."""
        raise NotImplementedError

    @property
    def weighs_tokens(self) -> bool:
        """True if the loss weighs each sample by the number of its learned tokens."""
        return False

    @property
    def label(self) -> str:
        """Short name for files and tables."""
        raise NotImplementedError

    def may_share(self, layer: int) -> bool:
        """Return whether several workers may each compute some rows of a micro-batch in that
        layer."""
        return True

    def compiles(self, layer: int) -> bool:
        """Return whether the layer goes through torch's compiler where the job asks for it."""
        raise NotImplementedError

    @property
    def examples(self) -> tuple[int, ...]:
        """Layers, one of each kind."""
        return tuple(map(self.order.index, range(max(self.order) + 1)))

    @property
    def initial(self) -> str | None:
        """Directory of the initial weights, the same on all nodes; None: random initial weights."""
        return None

    @property
    def rests_on_files(self) -> bool:
        """True where checkpoints lack a part of the model, which is in the initial weights
        alone."""
        return False

    @property
    def reads_tokens(self) -> bool:
        """True where it takes rows of tokens."""
        return True

    @property
    def labelled(self) -> bool:
        """True if the model learns from labels of a data set, which plain text lacks."""
        return False

    @property
    def known(self) -> bool:
        """True where its layers are known; those of a user's model are known once it was
        examined."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(AnyModel):
    """Transformer whose layer 0 is the embedding and whose last layer is the head.

    The numbers of a Hugging Face family follow from `config`.
    """

    kind: Literal["gpt", Kind] = "gpt"
    #: Transformer blocks; placement counts the embedding and the head as layers too.
    layers: Annotated[int, Meta(ge=1, le=512)]
    hidden: Annotated[int, Meta(ge=1, le=1 << 18)]
    heads: Count
    sequence_length: RowLength
    vocabulary: Vocabulary = 256
    #: The head shares the token embedding's weight.
    tied: bool = True
    #: Share of dropout; in a family with several, the largest.
    dropout: Part = 0.0
    #: The family's own keys, all of them, as JSON; empty for the built-in model.
    config: str = ""
    #: Directory of the initial weights, the same on all nodes; None: random initial weights.
    weights: str | None = None

    def __post_init__(self) -> None:
        check_paths("weights", [self.weights])
        if self.hidden % self.heads:
            raise ValueError(
                f"heads: {self.heads} does not divide hidden ({self.hidden}); "
                "choose heads so that every head has the same width"
            )
        self._check_family()

    def _check_family(self) -> None:
        family = family_of(self.kind)
        if family is None:
            for name, given in (("config", self.config), ("weights", self.weights)):
                if given:
                    raise ValueError(
                        f"{name}: the built-in model takes none; leave it out or set kind to "
                        f"{' or '.join(FAMILIES)}"
                    )
            return
        complete = family.complete(decode_config(self.config or "{}"))
        for name, value in asdict(family.numbers(complete)).items():
            if getattr(self, name) != value:
                raise ValueError(f"{name}: {getattr(self, name)}, but the config says {value}")
        longest = family.positions(complete)
        if self.sequence_length > longest:
            raise ValueError(
                f"sequence_length: {self.sequence_length} is beyond the model's {longest} "
                f"positions; lower it, or raise config.{family.names['positions']}"
            )

    def compiles(self, layer: int) -> bool:
        # The others are a lookup, and a product that nothing can be fused with.
        return 0 < layer < self.layer_count - 1

    @property
    def objective(self) -> Objective:
        """Learning objective: the next token, or masked ones."""
        family = family_of(self.kind)
        return "causal" if family is None else family.objective

    @property
    def layer_count(self) -> int:
        """Count of layers: embedding, blocks, head."""
        return self.layers + 2

    @property
    def family(self) -> str:
        return self.kind

    @property
    def tokens(self) -> int:
        return self.vocabulary

    @property
    def order(self) -> tuple[int, ...]:
        return (0, *[1] * self.layers, 2)

    @property
    def ties(self) -> bool:
        return self.tied

    @property
    def row_tokens(self) -> int:
        return self.sequence_length

    @property
    def label(self) -> str:
        return f"{self.kind}-{self.layers}x{self.hidden}"

    @property
    def initial(self) -> str | None:
        return self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """Low-rank adapters; keys and defaults are those of peft's LoraConfig."""

    #: Linear layers of the model, by the ends of their names: q_proj matches that of every block.
    target_modules: tuple[str, ...] = ()
    r: Annotated[int, Meta(ge=1, le=1 << 16)] = 8
    lora_alpha: Annotated[int, Meta(ge=1, le=1 << 16)] = 8
    lora_dropout: Part = 0.0

    def __post_init__(self) -> None:
        if not self.target_modules or not all(self.target_modules):
            raise ValueError(
                "target_modules names no linear layer of the model; give some, such as "
                "[q_proj, v_proj]"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModelSpec(AnyModel):
    """A model made by a function that returns an `oobleck.model.Model`: the user's function, or
    ours that splits a model of transformers into layers."""

    #: An entry point of the group oobleck.models, or a function (package.module:function).
    plugin: str | None = None
    python: str | None = None
    #: Directory on every node that the function's module lies in; None: it is installed.
    path: str | None = None
    #: Keyword arguments of the function.
    arguments: Json = NO_ARGUMENTS
    #: Class of transformers instead, such as Qwen3ForCausalLM, with keys of its config, and a
    #: directory with initial weights, the same on all nodes.
    architecture: str | None = None
    config: Json = NO_ARGUMENTS
    weights: str | None = None
    #: Adapters that are trained in place of its weights.
    lora: LoraSpec | None = None
    #: Tokens of a row, where the data are tokens.
    sequence_length: RowLength | None = None
    #: Count of different tokens.
    vocabulary: Vocabulary = 256
    #: A `Description`, as JSON; empty: it was not made yet.
    described: Json = NOT_DESCRIBED

    def __post_init__(self) -> None:
        if sum(name is not None for name in (self.plugin, self.python, self.architecture)) != 1:
            raise ValueError(
                "plugin: give exactly one of plugin (an entry point), python (a function) and "
                "architecture (a class of transformers)"
            )
        check_code(plugin=self.plugin, python=self.python, path=self.path)
        for name in ("path", "weights"):
            check_paths(name, [getattr(self, name)])
        self._check_transformers()
        if self.described and len(self.description.order) > MOST_LAYERS:
            raise ValueError(
                f"described: {len(self.description.order)} layers are more than {MOST_LAYERS}; put "
                "several into one"
            )

    def _check_transformers(self) -> None:
        if self.architecture is None:
            for name, given in (("config", self.config != NO_ARGUMENTS), ("weights", self.weights)):
                if given:
                    raise ValueError(f"{name}: goes with architecture; put it into arguments")
            if self.lora is not None:
                raise ValueError("lora: goes with architecture; leave it out")
            return
        if self.lora is not None and self.weights is None:
            raise ValueError(
                "lora: adapts a trained model; give its directory as weights, the same on all nodes"
            )
        if self.arguments != NO_ARGUMENTS:
            raise ValueError("arguments: architecture takes none; put them into config")
        if self.sequence_length is None and not self.architecture.endswith(_IMAGES):
            raise ValueError("sequence_length: is missing; give the tokens of a row")

    @property
    def code(self) -> Code:
        if self.architecture is not None:
            arguments = {
                "architecture": self.architecture,
                "config": json.loads(self.config or NO_ARGUMENTS),
                "weights": self.weights,
                "sequence_length": self.sequence_length,
                "lora": None if self.lora is None else asdict(self.lora),
            }
            text = Json(json.dumps(arguments))
            return Code(name=_TRANSFORMERS, group=None, path=None, arguments=text, ours=True)
        name = self.plugin or self.python
        assert name is not None, "it was checked"
        group = "oobleck.models" if self.plugin else None
        return Code(name=name, group=group, path=self.path, arguments=self.arguments)

    @property
    def description(self) -> Description:
        """Description of the model. Raises ValueError where it was not made."""
        if not self.described:
            raise ValueError("described: the model was not looked at; submit by oobleck submit")
        return read_description(self.described)

    @property
    def family(self) -> str:
        return "own" if self.architecture is None else "huggingface"

    @property
    def tokens(self) -> int:
        if self.architecture is not None and self.known:
            return self.description.layers[-1].output.tensors[0].shape[-1]
        return self.vocabulary

    @property
    def initial(self) -> str | None:
        return self.weights

    @property
    def rests_on_files(self) -> bool:
        foreign = self.description.foreign if self.known else None
        return self.lora is not None or bool(foreign and foreign.kept)

    @property
    def layer_count(self) -> int:
        return len(self.description.order)

    @property
    def order(self) -> tuple[int, ...]:
        return self.description.order

    def may_share(self, layer: int) -> bool:
        # Draws and some hooks depend on the whole micro-batch.
        sketch = self.description.layers[layer]
        return not (sketch.draws or sketch.whole)

    def compiles(self, layer: int) -> bool:
        return self.known and self.description.layers[layer].compiled is not None

    @property
    def ties(self) -> Ties:
        return tuple(tie.layers for tie in self.description.tied)

    @property
    def row_tokens(self) -> int:
        return self.sequence_length or 1

    @property
    def weighs_tokens(self) -> bool:
        return self.architecture is not None and not self.architecture.endswith(_BY_ROW)

    @property
    def reads_tokens(self) -> bool:
        return self.sequence_length is not None

    @property
    def labelled(self) -> bool:
        return self.architecture is not None and self.architecture.endswith(_LABELLED)

    @property
    def learns_next_tokens(self) -> bool:
        return self.architecture is not None and not self.labelled

    @property
    def known(self) -> bool:
        return bool(self.described)

    @property
    def label(self) -> str:
        given = self.plugin or self.python or self.architecture or ""
        name = given.replace(":", "-").rpartition(".")[2]
        return f"{name}-{self.layer_count}"
