"""How measurements of several workers become one profile, and which stand for each other."""

from dataclasses import replace
from typing import Any

import pytest

from oobleck.core.job.file import parse_job
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.core.profile import LayerProfile, LinkMeasurement, Measurement, Profile
from oobleck.planner.profile.estimate import estimate_profile
from oobleck.planner.profile.measurement import (
    assemble_profile,
    check_fits,
    check_measured,
    profile_key,
)

JOB = JobSpec(
    name="job",
    model=ModelSpec(layers=3, hidden=8, heads=2, sequence_length=16),
    data=DataSpec(text=("x",)),
    training=TrainingSpec(steps=1, global_batch=8, microbatch=2),
)
INTER = LinkMeasurement(scope="inter_node", latency_s=1e-4, bytes_per_s=1e9)
INTRA = LinkMeasurement(scope="intra_node", latency_s=1e-5, bytes_per_s=1e10)


#: fp32: embedding of 256 tokens and 16 positions, a block, norm and head, all 8 wide.
PARAMETER_BYTES = {
    "embedding": 4 * (256 + 16) * 8,
    "block": 4 * (12 * 8 * 8 + 4 * 8),
    "head": 4 * (256 * 8 + 2 * 8),
}


def layer(name: str, seconds: float, *, kept: int = 10_000) -> LayerProfile:
    return LayerProfile(
        name=name,
        forward_s={1: seconds},
        backward_s={1: 2 * seconds},
        backward_input_s={1: seconds},
        update_s={1: seconds / 10},
        parameter_bytes=PARAMETER_BYTES[name],
        state_bytes=4 * PARAMETER_BYTES[name],
        activation_bytes=kept,
        output_bytes=2 * 16 * 8 * 4,
    )


def measured(seconds: float, device: str = "fast", *, kept: int = 10_000) -> Measurement:
    return Measurement(
        kinds=(
            layer("embedding", seconds / 10),
            layer("block", seconds, kept=kept),
            layer("head", seconds / 2),
        ),
        device=device,
        torch="2",
    )


def assembled(
    found: list[Measurement], links: tuple[LinkMeasurement, ...] = (INTER, INTRA)
) -> tuple[Profile, dict[str, object]]:
    return assemble_profile(JOB, found, links, gpus_per_node=2, memory_bytes=1000)


def test_blocks_are_measured_once_and_stand_for_all() -> None:
    profile, notes = assembled([measured(1.0)])
    names = [one.name for one in profile.layers]
    assert names == ["embedding", "block0", "block1", "block2", "head"]
    assert [one.forward_s[1] for one in profile.layers] == [0.1, 1.0, 1.0, 1.0, 0.5]
    assert (profile.microbatch, profile.gpus_per_node, profile.gpu_memory_bytes) == (2, 2, 1000)
    assert (profile.links.inter_node_bytes_per_s, profile.links.latency_s) == (1e9, 1e-4)
    assert profile.links.intra_node_bytes_per_s == 1e10
    assert notes["intra_node_link"] == notes["inter_node_link"] == "measured"
    check_fits(profile, JOB)


def test_of_one_kind_the_median_counts_and_among_kinds_the_slowest() -> None:
    fast = [measured(1.0), measured(1.1), measured(9.0)]
    assert assembled(fast)[0].layers[1].forward_s == {1: 1.1}
    profile, notes = assembled([*fast, measured(3.0, "slow"), measured(3.2, "slow")])
    assert profile.layers[1].forward_s[1] == pytest.approx(3.1)
    assert notes["devices"] == ["fast", "slow"]
    assert notes["workers"] == 5


def test_the_most_bytes_count() -> None:
    profile, _ = assembled([measured(1.0, kept=10_000), measured(1.0, kept=30_000)])
    assert profile.layers[2].activation_bytes == 30_000


@pytest.mark.parametrize(
    ("links", "rates", "told"),
    [
        ((INTER,), (1e9, 1e9), ("the inter-node link's", "measured")),
        ((INTRA,), (1e10, 1e10), ("measured", "the intra-node link's")),
        ((), (4e9, 3e9), ("estimated", "estimated")),
    ],
)
def test_a_link_that_was_not_measured_is_filled_in_and_said(
    links: tuple[LinkMeasurement, ...], rates: tuple[float, float], told: tuple[str, str]
) -> None:
    profile, notes = assembled([measured(1.0)], links)
    found = profile.links
    assert (found.intra_node_bytes_per_s, found.inter_node_bytes_per_s) == rates
    assert (notes["intra_node_link"], notes["inter_node_link"]) == told


def test_without_a_measurement_there_is_no_profile() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        assembled([])


def test_the_key_holds_all_that_matters_and_nothing_else() -> None:
    def key(job: JobSpec = JOB, **changes: object) -> str:
        machines = {"devices": ["a", "b"], "worker_slots": 1, "workers_per_host": 2}
        machines["several_nodes"] = True
        return profile_key(job, **{**machines, **changes})  # type: ignore[arg-type]

    assert key().startswith("gpt-3x8-b2-fp32-")
    training = JOB.training
    same = [
        key(replace(JOB, name="other", fault_tolerance=0)),
        key(replace(JOB, training=replace(training, steps=7, seed=3, global_batch=16))),
        key(devices=["b", "a", "a"]),
    ]
    assert set(same) == {key()}
    different = [
        key(replace(JOB, model=replace(JOB.model, dropout=0.1))),
        key(replace(JOB, training=replace(training, microbatch=4))),
        key(replace(JOB, training=replace(training, precision="bf16"))),
        key(replace(JOB, training=replace(training, float32_matmul="high"))),
        key(replace(JOB, training=replace(training, gradient_sums="bf16"))),
        key(replace(JOB, training=replace(training, compile=True))),
        key(devices=["a"]),
        key(worker_slots=2),
        key(workers_per_host=4),
        key(several_nodes=False),
    ]
    assert len({key(), *different}) == 11


def test_a_profile_of_another_model_is_refused_with_the_fix() -> None:
    profile, _ = assembled([measured(1.0)])
    deeper = replace(JOB, model=replace(JOB.model, layers=4))
    with pytest.raises(
        ValueError, match=r"has 5 layers, and the model has 6 .* profile this model"
    ):
        check_fits(profile, deeper)
    wider = replace(JOB, training=replace(JOB.training, microbatch=4))
    with pytest.raises(ValueError, match="measured with microbatch 2, and the job has 4"):
        check_fits(profile, wider)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"hidden": 16}, r"layers\[0\].parameter_bytes: 8704, .* has 17408: .* profile this model"),
        ({"vocabulary": 512}, r"layers\[0\].parameter_bytes: 8704, .* has 16896"),
        ({"sequence_length": 17}, r"layers\[0\].output_bytes: 1024, .* has 1088"),
    ],
)
def test_a_profile_of_a_model_of_as_many_layers_is_told_by_its_bytes(
    model: dict[str, int], message: str
) -> None:
    profile, _ = assembled([measured(1.0)])
    other = replace(JOB, model=replace(JOB.model, **model))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        check_fits(profile, other)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (
            {"optimizer": OptimizerSpec(name="sgd", lr=0.1, momentum=0.9)},
            r"layers\[0\].state_bytes: 34816, .* \(sgd, 1 moment\) .* 26112: .* profile again",
        ),
        (
            {"recompute": "layer"},
            r"layers\[1\].activation_bytes: 10000, as with recompute none, .* has layer; profile",
        ),
    ],
)
def test_a_profile_for_another_optimizer_or_recomputation_is_told_by_its_bytes(
    training: dict[str, Any], message: str
) -> None:
    profile, _ = assembled([measured(1.0)])
    with pytest.raises(ValueError, match=message):
        check_fits(profile, replace(JOB, training=replace(JOB.training, **training)))


def test_a_profile_with_recomputation_is_refused_without() -> None:
    profile, _ = assembled([measured(1.0, kept=1024)])
    with pytest.raises(ValueError, match="as with recompute layer, and the job has none"):
        check_fits(profile, JOB)
    check_fits(profile, replace(JOB, training=replace(JOB.training, recompute="layer")))


@pytest.mark.parametrize(
    "model", ["kind: gpt, layers: 2, hidden: 64, heads: 4", "preset: gpt2", "preset: llama-2-7b"]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_an_estimate_fits_its_own_job(model: str, precision: str, recompute: str) -> None:
    job = parse_job(
        f"name: own\nmodel: {{{model}, sequence_length: 32}}\ndata: {{text: [x]}}\n"
        "fault_tolerance: 0\ntraining: {steps: 1, global_batch: 2, microbatch: 2, "
        f"precision: {precision}, recompute: {recompute}}}\n"
    )
    check_fits(estimate_profile(job, gpus_per_node=1, memory_per_worker_bytes=1 << 30), job)


def test_what_is_stored_has_the_names_and_nodes_too() -> None:
    profile, _ = assembled([measured(1.0)])
    check_measured(profile, JOB, gpus_per_node=2)
    with pytest.raises(ValueError, match="gpus_per_node: 2, and the nodes have 1"):
        check_measured(profile, JOB, gpus_per_node=1)
    renamed = (replace(profile.layers[0], name="other"), *profile.layers[1:])
    with pytest.raises(ValueError, match=r"layers\[0\].name: 'other', and the model has 'emb"):
        check_measured(replace(profile, layers=renamed), JOB, gpus_per_node=2)
