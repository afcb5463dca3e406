"""Descriptions of users' models that nobody has."""

from collections.abc import Sequence

from oobleck.core.codec import encode
from oobleck.core.job.code import Json
from oobleck.core.job.description import Description, LayerSketch, TensorSketch, TreeSketch
from oobleck.core.job.model import OwnModelSpec

WORDS = TreeSketch(
    tensors=(TensorSketch(shape=(4,), dtype="int64", gradient=False),), structure="null"
)
#: A layer's output: numbers, and a mask for them.
HIDDEN = TreeSketch(
    tensors=(
        TensorSketch(shape=(4, 8), dtype="float32", gradient=True),
        TensorSketch(shape=(4,), dtype="bool", gradient=False),
    ),
    structure='["tuple",null,null]',
)
LAYER = LayerSketch(
    name="Block",
    parameters=100,
    tied=0,
    largest=80,
    flops=1e6,
    kept_bytes=500,
    output=HIDDEN,
    draws=False,
)


def model_of(
    *kinds: LayerSketch, order: Sequence[int] | None = None, python: str = "mine:model"
) -> OwnModelSpec:
    """`order`: of each layer, its kind; None: one layer of each."""
    description = Description(
        kinds=kinds,
        order=tuple(range(len(kinds)) if order is None else order),
        inputs=WORDS,
        targets=WORDS,
        tied=(),
        code=python,
    )
    return OwnModelSpec(python=python, described=Json(encode(description).decode()))
