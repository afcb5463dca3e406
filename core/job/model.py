"""The model of a job: a sequence of layers, whatever makes them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from oobleck.core.job.checks import PART, Limits, check_limits, check_paths
from oobleck.core.job.families import FAMILIES, Kind, Objective, decode_config, family_of
from oobleck.core.ties import Ties


class AnyModel:
    """Sequence of layers, as planning and a job's files see it.

    Subclasses are a model known by its kind (`ModelSpec`) and one of the user's
    (`oobleck.core.job.own.OwnModelSpec`).
    """

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
        from oobleck.core.job.own import model_from_tree

        return model_from_tree(tree)

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
        """True where part of the model is only in the initial weights and in no checkpoint."""
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
        examined.
        """
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(AnyModel):
    """Transformer whose layer 0 is the embedding and whose last layer is the head.

    The numbers of a Hugging Face family follow from `config`; `planner.job.model_file.family_model`
    makes such a spec.
    """

    kind: Literal["gpt", Kind] = "gpt"
    #: Transformer blocks; placement counts the embedding and the head as layers too.
    layers: int
    hidden: int
    heads: int
    sequence_length: int
    vocabulary: int = 256
    #: True if the head shares the token embedding's weight.
    tied: bool = True
    #: Largest dropout, where a family has several.
    dropout: float = 0.0
    #: All keys of the family as JSON; empty for the built-in model.
    config: str = ""
    #: Directory of the initial weights, the same on all nodes; None: random initial weights.
    weights: str | None = None
    LIMITS: ClassVar[Mapping[str, Limits]] = {
        "layers": Limits(at_least=1, at_most=512),
        "hidden": Limits(at_least=1, at_most=1 << 18),
        "heads": Limits(at_least=1),
        "sequence_length": Limits(at_least=1, at_most=1 << 22),
        "vocabulary": Limits(at_least=2, at_most=1 << 24),
        "dropout": PART,
    }

    def __post_init__(self) -> None:
        check_limits(self, self.LIMITS)
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
