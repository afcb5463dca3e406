"""What a profile says of a user's model, by its description."""

from dataclasses import replace

import pytest

from oobleck.core.job.description import LayerSketch
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.planner.profile.estimate import estimate_profile
from oobleck.planner.profile.measurement import check_fits
from support.sketches import LAYER, model_of


def job(*kinds: LayerSketch, order: tuple[int, ...]) -> JobSpec:
    return JobSpec(
        name="own",
        model=model_of(*kinds, order=order),
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
    # Packed, each tensor begins at a multiple of 16 bytes.
    assert first.output_bytes == 4 * (4 * 8 * 4 + 16)
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


def test_a_profile_that_shares_a_layer_that_draws_is_refused() -> None:
    still, drawing = (job(LAYER, replace(LAYER, draws=d), order=(0, 1)) for d in (False, True))
    profile = estimate_profile(still, gpus_per_node=4, memory_per_worker_bytes=1 << 30)
    check_fits(profile, still)
    with pytest.raises(ValueError, match=r'^layers\[1\]\.forward_s\["4"\]: .*"1" alone'):
        check_fits(profile, drawing)
