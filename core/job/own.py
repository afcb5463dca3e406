"""The user's model: the code that makes it, and its description before it runs."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import msgspec

from oobleck.core.job.checks import Limits, check_limits, check_paths
from oobleck.core.job.code import NO_ARGUMENTS, NOT_DESCRIBED, Code, Json, check_code
from oobleck.core.job.description import Description, read_description
from oobleck.core.job.lora import LoraSpec
from oobleck.core.job.model import AnyModel, ModelSpec
from oobleck.core.ties import Ties

#: Most layers of a model.
MOST_LAYERS = 514
#: Keys that only a user's model has.
OWN_KEYS = ("plugin", "python", "architecture")
#: Name suffixes of transformers' classes that take images.
_IMAGES = ("ForImageClassification", "ForImageClassificationLearned")
#: Name suffixes of classes with one label per row.
_BY_ROW = ("ForSequenceClassification", *_IMAGES)
#: Name suffixes of classes that learn from labels, not the next token.
_LABELLED = ("ForMaskedLM", "FlaubertWithLMHeadModel", "ForTokenClassification", *_BY_ROW)
#: Our function that splits a model of transformers into layers.
_TRANSFORMERS = "oobleck.worker.models.huggingface.causal_lm:causal_lm"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModelSpec(AnyModel):
    """Model made by a function that returns an `oobleck.model.Model`: the user's function, or ours
    that splits a model of transformers into layers."""

    #: Entry point of the group oobleck.models, or a function (package.module:function).
    plugin: str | None = None
    python: str | None = None
    #: Directory on every node that holds the function's module; None: it is installed.
    path: str | None = None
    #: Arguments of the function.
    arguments: Json = NO_ARGUMENTS
    #: Alternatively a class of transformers, such as Qwen3ForCausalLM, with keys of its config and
    #: a directory of initial weights, the same on all nodes.
    architecture: str | None = None
    config: Json = NO_ARGUMENTS
    weights: str | None = None
    #: Adapters to train in place of its weights.
    lora: LoraSpec | None = None
    #: Tokens of a row, where the data are tokens.
    sequence_length: int | None = None
    #: Vocabulary size, where the data are tokens.
    vocabulary: int = 256
    #: JSON of a `Description`; empty: not made yet.
    described: Json = NOT_DESCRIBED
    LIMITS: ClassVar[Mapping[str, Limits]] = {
        name: ModelSpec.LIMITS[name] for name in ("sequence_length", "vocabulary")
    }

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
        check_limits(self, self.LIMITS)
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
            told = Json(json.dumps(arguments))
            return Code(name=_TRANSFORMERS, group=None, path=None, arguments=told, ours=True)
        name = self.plugin or self.python
        assert name is not None, "it was checked"
        group = "oobleck.models" if self.plugin else None
        return Code(name=name, group=group, path=self.path, arguments=self.arguments)

    @property
    def description(self) -> Description:
        """Description of the model. Raises ValueError where it was not made."""
        if not self.described:
            raise ValueError("described: the model was not examined yet; submit by oobleck submit")
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
        # Random draws and some hooks depend on the whole micro-batch; compiled code is made for its
        # number of rows.
        sketch = self.description.layers[layer]
        return not (sketch.draws or sketch.whole) and sketch.compiled is None

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


def model_from_tree(tree: Mapping[str, Any]) -> AnyModel:
    """Build a built-in or a user's model from its fields; raises ValueError."""
    own = any(tree.get(key) is not None for key in OWN_KEYS)
    return msgspec.convert(tree, OwnModelSpec if own else ModelSpec)
