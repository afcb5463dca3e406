"""What a profile says of a user's model, by its description."""

from dataclasses import replace

import pytest

from oobleck.planner.codec import encode
from oobleck.planner.job.code import Json
from oobleck.planner.job.description import (
    Description,
    LayerSketch,
    TensorSketch,
    TreeSketch,
)
from oobleck.planner.job.own import OwnModelSpec
from oobleck.planner.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.planner.profile.estimate import estimate_profile

HIDDEN = TreeSketch(
    tensors=(
        TensorSketch(shape=(4, 8), dtype="float32", gradient=True),
        TensorSketch(shape=(4,), dtype="bool", gradient=False),
    ),
    structure='["tuple",null,null]',
)
WORDS = TreeSketch(
    tensors=(TensorSketch(shape=(4,), dtype="int64", gradient=False),), structure="null"
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


def job(*kinds: LayerSketch, order: tuple[int, ...]) -> JobSpec:
    description = Description(
        kinds=kinds, order=order, inputs=WORDS, targets=WORDS, tied=(), code="c0de"
    )
    return JobSpec(
        name="own",
        model=OwnModelSpec(python="mine:model", described=Json(encode(description).decode())),
        data=DataSpec(python="mine:data"),
        training=TrainingSpec(steps=1, global_batch=8, microbatch=4),
    )


def test_bytes_and_times_are_those_of_the_description() -> None:
    small = replace(LAYER, parameters=0, largest=0, flops=0.0, kept_bytes=0)
    profile = estimate_profile(
        job(LAYER, small, order=(0, 0, 1)), gpus_per_node=1, memory_per_worker_bytes=1 << 30
    )
    first, second, last = profile.layers
    assert [layer.name for layer in profile.layers] == ["layer0", "layer1", "layer2"]
    assert first.parameter_bytes == 100 * 4
    assert first.output_bytes == 4 * (4 * 8 * 4 + 4)
    assert last.output_bytes == 0
    # What it is given is kept too, where that is more.
    assert (first.activation_bytes, last.activation_bytes) == (4 * 500, 4 * (4 * 8 * 4 + 4))
    assert first.forward_s[1] == second.forward_s[1] > last.forward_s[1] > 0


@pytest.mark.parametrize("draws", [False, True])
def test_a_layer_that_draws_is_not_shared(draws: bool) -> None:
    profile = estimate_profile(
        job(LAYER, replace(LAYER, draws=draws), order=(0, 1)),
        gpus_per_node=4,
        memory_per_worker_bytes=1 << 30,
    )
    assert [sorted(layer.forward_s) for layer in profile.layers] == [
        [1, 2, 4],
        [1] if draws else [1, 2, 4],
    ]
