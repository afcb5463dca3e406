"""The estimated profile has true byte counts; profile files survive their text."""

from dataclasses import replace

import pytest

from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, Precision, ResourceSpec, TrainingSpec
from oobleck.core.profile import format_profile, parse_profile
from oobleck.planner.cost.ends import plan_end_s
from oobleck.planner.profile.estimate import estimate_profile
from support.plans import plan_of_cuts


def job(precision: Precision = "fp32", memory: int | None = None) -> JobSpec:
    return JobSpec(
        name="job",
        model=ModelSpec(layers=2, hidden=16, heads=2, sequence_length=16, vocabulary=32),
        data=DataSpec(text=("x",)),
        training=TrainingSpec(steps=1, global_batch=8, microbatch=2, precision=precision),
        resources=ResourceSpec(memory_per_worker_bytes=memory),
    )


@pytest.mark.parametrize(("precision", "item"), [("fp32", 4), ("bf16", 4), ("fp8", 4), ("fp64", 8)])
def test_parameters_are_those_of_the_built_in_model(precision: Precision, item: int) -> None:
    profile = estimate_profile(job(precision), gpus_per_node=1, memory_per_worker_bytes=1 << 30)
    embedding = 32 * 16 + 16 * 16
    block = 12 * 16 * 16 + 2 * 2 * 16
    head = 2 * 16 + 32 * 16
    counts = [layer.parameter_bytes // item for layer in profile.layers]
    assert counts == [embedding, block, block, head]
    # In a bf16 or fp8 job all but the embedding compute with a copy of half the size.
    copies = [0, *(count * 2 * (precision in ("bf16", "fp8")) for count in counts[1:])]
    assert [la.state_bytes - 4 * la.parameter_bytes for la in profile.layers] == copies
    # Neither the gradient nor that copy moves with a layer.
    assert [la.travelling_bytes for la in profile.layers] == [3 * item * n for n in counts]


def test_the_counts_match_the_model_that_is_trained() -> None:
    model = pytest.importorskip("oobleck.worker.models.registry")
    spec = job().model
    profile = estimate_profile(job(), gpus_per_node=1, memory_per_worker_bytes=1 << 30)
    for number, layer in enumerate(profile.layers):
        parameters = sum(p.numel() for p in model.build_layer(spec, number).parameters())
        assert layer.parameter_bytes == 4 * parameters, layer.name


def test_messages_carry_one_hidden_state_per_token_and_the_head_sends_none() -> None:
    profile = estimate_profile(job(), gpus_per_node=1, memory_per_worker_bytes=1 << 30)
    assert [layer.output_bytes for layer in profile.layers] == [2 * 16 * 16 * 4] * 3 + [0]


def test_a_margin_goes_off_the_machines_memory() -> None:
    profile = estimate_profile(job(), gpus_per_node=1, memory_per_worker_bytes=10 << 30)
    assert profile.gpu_memory_bytes == 9 << 30


def test_in_bf16_activations_and_messages_are_half_as_large() -> None:
    wide, narrow = (
        estimate_profile(job(precision), gpus_per_node=1, memory_per_worker_bytes=1 << 30).layers[1]
        for precision in ("fp32", "bf16")
    )
    assert wide.activation_bytes == 2 * narrow.activation_bytes
    assert wide.output_bytes == 2 * narrow.output_bytes


def test_sums_in_bf16_send_half_and_keep_a_copy_of_it() -> None:
    wide = job()
    narrow = replace(wide, training=replace(wide.training, gradient_sums="bf16"))
    full, half = (
        estimate_profile(each, gpus_per_node=2, memory_per_worker_bytes=1 << 30)
        for each in (wide, narrow)
    )
    for before, after in zip(full.layers, half.layers, strict=True):
        assert before.summed_bytes == before.parameter_bytes == 2 * after.summed_bytes
        assert after.parameter_bytes == before.parameter_bytes
        assert 2 * after.sum_bytes == 3 * before.sum_bytes
        assert after.exchange_bytes == before.exchange_bytes, "a rounded copy, and rounded shares"
        assert after.update_s[2] < before.update_s[2]
    plan = plan_of_cuts(([4], 2), ([4], 2))
    ends = dict.fromkeys(plan.workers, 0.0)
    slow, fast = (plan_end_s(plan, ends, each, tied=wide.model.ties) for each in (full, half))
    sent = sum(layer.parameter_bytes for layer in full.layers)
    rate = full.links.inter_node_bytes_per_s
    assert slow - fast == pytest.approx(sent / 2 / rate, rel=0.2)


def test_the_jobs_budget_takes_the_place_of_the_machines() -> None:
    profile = estimate_profile(job(memory=5000), gpus_per_node=2, memory_per_worker_bytes=1 << 30)
    assert (profile.gpu_memory_bytes, profile.gpus_per_node) == (5000, 2)


def test_times_are_for_the_numbers_of_workers_that_share_a_micro_batch_evenly() -> None:
    profile = estimate_profile(job(), gpus_per_node=4, memory_per_worker_bytes=1 << 30)
    for layer in profile.layers:
        assert set(layer.forward_s) == {1, 2}
        assert layer.forward_s[2] == layer.forward_s[1] / 2
        assert layer.update_s[2] > layer.update_s[1] == 0
        assert layer.exchange_bytes == 3 * layer.parameter_bytes
    embedding, block, *_ = estimate_profile(
        job("bf16"), gpus_per_node=4, memory_per_worker_bytes=1 << 30
    ).layers
    assert embedding.exchange_bytes == 3 * embedding.parameter_bytes
    assert block.exchange_bytes == 2.5 * block.parameter_bytes
    alone = estimate_profile(job(), gpus_per_node=1, memory_per_worker_bytes=1 << 30)
    assert all(layer.exchange_bytes == 0 for layer in alone.layers)


def test_a_profile_survives_its_text() -> None:
    profile = estimate_profile(job(), gpus_per_node=2, memory_per_worker_bytes=1 << 30)
    assert parse_profile(format_profile(profile)) == profile
