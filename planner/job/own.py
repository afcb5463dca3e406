"""A model of the user's: the code that makes it, and what is known of it before it is run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from oobleck.planner.job.code import NO_ARGUMENTS, Code, Json, check_code
from oobleck.planner.job.description import Description, read_description
from oobleck.planner.job.spec import AnyModel, ModelSpec, check_paths

NOT_DESCRIBED = Json("")
#: Layers of a model at most.
MOST_LAYERS = 514
#: Keys that no model has but one of the user's.
OWN_KEYS = ("plugin", "python")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModelSpec(AnyModel):
    """What a function of the user's returns, an `oobleck.model.Model`."""

    #: An entry point of the group oobleck.models, or a function (package.module:function).
    plugin: str | None = None
    python: str | None = None
    #: Directory on every node that the function's module lies in; None: it is installed.
    path: str | None = None
    #: What it is called with.
    arguments: Json = NO_ARGUMENTS
    #: Where the data are tokens: of a row.
    sequence_length: int | None = None
    #: And how many there are.
    vocabulary: int = 256
    #: A `Description`, as JSON; empty: it was not made yet.
    described: Json = NOT_DESCRIBED

    def __post_init__(self) -> None:
        if self.plugin is None and self.python is None:
            raise ValueError("plugin: give plugin (an entry point) or python (a function)")
        check_code(plugin=self.plugin, python=self.python, path=self.path)
        check_paths("path", [self.path])
        if self.sequence_length is not None and not 1 <= self.sequence_length <= 1 << 22:
            raise ValueError(f"sequence_length: {self.sequence_length} is not in 1 to {1 << 22}")
        if not 2 <= self.vocabulary <= 1 << 24:
            raise ValueError(f"vocabulary: {self.vocabulary} is not in 2 to {1 << 24}")
        if self.described and len(self.description.order) > MOST_LAYERS:
            raise ValueError(
                f"described: {len(self.description.order)} layers are more than {MOST_LAYERS}; put "
                "several into one"
            )

    @property
    def code(self) -> Code:
        name = self.plugin or self.python
        assert name is not None, "it was checked"
        group = "oobleck.models" if self.plugin else None
        return Code(name=name, group=group, path=self.path, arguments=self.arguments)

    @property
    def description(self) -> Description:
        """Raises ValueError where it was not made."""
        if not self.described:
            raise ValueError("described: the model was not looked at; submit by oobleck submit")
        return read_description(self.described)

    @property
    def family(self) -> str:
        return "own"

    @property
    def tokens(self) -> int:
        return self.vocabulary

    @property
    def layer_count(self) -> int:
        return len(self.description.order)

    @property
    def order(self) -> tuple[int, ...]:
        return self.description.order

    @property
    def ties(self) -> bool:
        return bool(self.description.tied)

    @property
    def row_tokens(self) -> int:
        return self.sequence_length or 1

    @property
    def reads_tokens(self) -> bool:
        return self.sequence_length is not None

    @property
    def known(self) -> bool:
        return bool(self.described)

    @property
    def label(self) -> str:
        name = (self.plugin or self.python or "").replace(":", "-").rpartition(".")[2]
        return f"{name}-{self.layer_count}"


def model_from_tree(tree: Mapping[str, Any]) -> AnyModel:
    """Of either kind, from its fields; raises ValueError."""
    own = any(tree.get(key) is not None for key in OWN_KEYS)
    return msgspec.convert(tree, OwnModelSpec if own else ModelSpec)
