"""A checkpoint of a user's model goes with a job whose layers are the same, whatever its code is
called by now."""

from dataclasses import replace

import pytest

from oobleck.core.checkpoint import LayerFile, Manifest, misfit
from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from support.sketches import LAYER, model_of


def model(*sizes: int, python: str = "mine:model") -> OwnModelSpec:
    return model_of(*(replace(LAYER, parameters=size) for size in sizes), python=python)


TRAINING = TrainingSpec(steps=1, global_batch=8, microbatch=4)


def manifest(spec: OwnModelSpec) -> Manifest:
    files = tuple(
        LayerFile(name=f"layer-{number}", layer=number, bytes=1, sha256="0" * 64)
        for number in range(spec.layer_count)
    )
    return Manifest(
        job="own-1", step=1, created=0.0, model=spec, training=TRAINING, data="00", files=files
    )


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (model(10, 20, 30), ""),
        (model(10, 20, 30, python="mine.again:other"), ""),
        (model(10, 20), "the number of layers is 3 there and 2 here"),
        (model(10, 20, 30, 40), "the number of layers is 3 there and 4 here"),
        (model(10, 21, 30), 'model.layers[1] is "Block of 20" there and "Block of 21" here'),
    ],
)
def test_only_the_layers_count(now: OwnModelSpec, why: str) -> None:
    job = JobSpec(name="own", model=now, data=DataSpec(python="mine:data"), training=TRAINING)
    assert misfit(manifest(model(10, 20, 30)), job, "00") == why


@pytest.mark.parametrize(
    ("there", "here", "refused"),
    [("aa", "aa", False), ("aa", "bb", True), ("", "bb", False), ("aa", "", False)],
)
def test_adapters_go_with_the_base_that_they_were_trained_on(
    there: str, here: str, refused: bool
) -> None:
    spec = model(10, 20)
    job = JobSpec(name="own", model=spec, data=DataSpec(python="mine:data"), training=TRAINING)
    why = misfit(replace(manifest(spec), base=there), job, "00", here)
    assert why.startswith("model.weights, which it needs, are other ones by now") == refused
    assert bool(why) == refused
