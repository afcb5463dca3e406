"""Description of a user's model, found without training it: its layers in numbers.

Made at submission by a run of one micro-batch on torch's meta device and sent with the job, since
planning knows no torch. Owns the types; the worker makes the descriptions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from oobleck.core import codec
from oobleck.core.job.code import Json

#: Bytes of a number, by the name of its torch type.
ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
#: Types that every transport sends without packing.
_PLAIN = ("float16", "bfloat16", "float32", "float64")
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSketch:
    """Tensor of a micro-batch."""

    #: Shape of one row, without the dimension of rows.
    shape: tuple[int, ...]
    #: Name of the torch type, such as float32.
    dtype: str
    #: True if its gradient is sent back.
    gradient: bool

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.dtype} is no type that can be sent between workers")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"{self.shape} is no shape")

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def travels_plain(tensors: Sequence[TensorSketch]) -> bool:
    """Return whether the tensors are one that is sent as it is; others are packed row by row."""
    return len(tensors) == 1 and tensors[0].dtype in _PLAIN and tensors[0].row_bytes > 0


def packed_bytes(tensors: Sequence[TensorSketch]) -> list[int]:
    """Return the bytes of each tensor in a packed row, rounded up to an alignment that lets every
    type be read in place. The total is at least one unit, since a message is never empty."""
    sizes = [-(-tensor.row_bytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    return sizes if sum(sizes) else [*sizes, _ALIGNMENT]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSketch:
    """Tensor, or a tuple, list or dict of tensors."""

    #: In the order of `structure`.
    tensors: tuple[TensorSketch, ...]
    #: JSON of their nesting, as `oobleck.worker.models.tree` writes and reads it.
    structure: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return sum(tensor.row_bytes for tensor in self.tensors)

    @property
    def message_bytes(self) -> int:
        """Bytes of one row on its way to the next layer."""
        return self.row_bytes if travels_plain(self.tensors) else sum(packed_bytes(self.tensors))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSketch:
    """Layer in numbers; layers with equal numbers are alike, and measured once."""

    #: The module's class.
    name: str
    #: Counts of all parameters, and of those that are tied to another layer's.
    parameters: int
    tied: int
    #: Size of the largest parameter.
    largest: int
    #: Bytes of buffers and frozen parameters, which are not trained.
    constant_bytes: int = 0
    #: Operations of the forward of one row.
    flops: float
    #: Bytes kept from a row's forward to its backward, the input included.
    kept_bytes: int
    #: Output of the layer; in the last one, the loss of its rows alone.
    output: TreeSketch
    #: True if it draws from torch's generator in training, as dropout does.
    draws: bool
    #: True if hooks of its parameters need the gradients of whole micro-batches.
    whole: bool = False
    #: Index of the compiled code that the layer runs, where the job asks for compilation; None: not
    #: compiled.
    compiled: int | None = None
    #: Reason why it is not compiled although the job asks for it.
    not_compiled: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """Facts that an export needs about a model that transformers knows."""

    #: Text of its config.json; of adapters, their adapter_config.json.
    config: Json
    #: Prefix of the tensor names of a decoder layer there, up to the layer's number. Tensors of the
    #: first and of the last layer have their whole names.
    blocks: str
    #: Tensors that are not trained: their names in an export, and in the files of the initial
    #: weights.
    kept: tuple[tuple[str, str], ...] = ()
    #: True if the trained and exported tensors are adapters of peft.
    adapters: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """Group of layers that share parameters, with no layer outside the group."""

    #: Ascending.
    layers: tuple[int, ...]
    #: Each layer's names for them: the first names belong to one parameter, and so on.
    names: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if len(self.layers) < 2 or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"{self.layers} are no layers in ascending order")
        if len(self.names) != len(self.layers) or len(set(map(len, self.names))) != 1:
            raise ValueError(f"layers {self.layers} share different numbers of parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Model of the user's, with the shapes of its data."""

    kinds: tuple[LayerSketch, ...]
    #: Index in `kinds` of each layer.
    order: tuple[int, ...]
    #: Shapes of a micro-batch of the data.
    inputs: TreeSketch
    targets: TreeSketch
    #: No layer is in two groups.
    tied: tuple[Tie, ...]
    #: Fingerprint of the code that it was made from.
    code: str
    #: None if transformers does not know the model.
    foreign: Foreign | None = None

    def __post_init__(self) -> None:
        if not self.order:
            raise ValueError("a model has at least one layer")
        if any(not 0 <= kind < len(self.kinds) for kind in self.order):
            raise ValueError("a layer has a kind that there is not")
        tied = [layer for tie in self.tied for layer in tie.layers]
        if len(set(tied)) != len(tied) or any(not 0 <= n < len(self.order) for n in tied):
            raise ValueError(f"layers {tied} are tied, which are not layers of one group each")

    @property
    def layers(self) -> tuple[LayerSketch, ...]:
        return tuple(self.kinds[kind] for kind in self.order)

    def shared(self, layer: int) -> Mapping[str, tuple[int, str]]:
        """Return the parameters of `layer` that other layers share, each with the first layer that
        has it and that layer's name for it."""
        for tie in self.tied:
            if layer in tie.layers:
                own = tie.names[tie.layers.index(layer)]
                return {
                    name: (tie.layers[0], first)
                    for name, first in zip(own, tie.names[0], strict=True)
                }
        return {}

    def input_of(self, layer: int) -> TreeSketch:
        """Return the sketch of the input of `layer`."""
        return self.kinds[self.order[layer - 1]].output if layer else self.inputs


@lru_cache(maxsize=16)
def read_description(text: Json) -> Description:
    """Decode a description; raises ValueError."""
    return codec.decode(Description, text)
