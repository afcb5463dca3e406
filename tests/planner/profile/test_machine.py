"""Estimates for kinds of GPUs: believable times, and by which name a node's device is known."""

from dataclasses import replace

import pytest

from oobleck.core.job.file import parse_job
from oobleck.core.job.spec import Float8Recipe, JobSpec, Precision
from oobleck.core.profile import Profile
from oobleck.planner.profile.estimate import estimate_profile, flops_per_token
from oobleck.planner.profile.machine import (
    GPUS,
    NOMINAL,
    OTHER_GPU,
    machine_of,
    slowest_of,
    why_no_float8,
)

TOKENS = 8192
JOB = parse_job(
    f"name: l8\nmodel: {{preset: llama-3-8b, sequence_length: {TOKENS}}}\n"
    'data: {text: ["/x"]}\ntraining: {steps: 1, global_batch: 8, microbatch: 1, precision: bf16}\n'
)


def profile(name: str, job: JobSpec = JOB) -> Profile:
    return estimate_profile(
        job, gpus_per_node=8, memory_per_worker_bytes=70 << 30, machine=GPUS[name]
    )


def mfu(name: str) -> float:
    """Of a GPU that computed all layers, one after the other, without a bubble."""
    spent_s = sum(layer.forward_s[1] + layer.backward_s[1] for layer in profile(name).layers)
    return TOKENS * flops_per_token(JOB) / spent_s / GPUS[name].peak(JOB.training)


def test_messages_within_a_node_go_at_the_rate_of_two_channels() -> None:
    rates = {name: profile(name).links.intra_node_bytes_per_s for name in ("h100", "a100", "b200")}
    assert rates == {"h100": 20.6e9, "a100": 20e9, "b200": 40.1e9}
    with_sharing = profile(
        "h100", replace(JOB, training=replace(JOB.training, microbatch=8, global_batch=16))
    )
    exchange_s = with_sharing.layers[1].update_s[8] - with_sharing.layers[1].update_s[1] / 8
    assert exchange_s < 5 * 218e6 * 4 / GPUS["h100"].intra_node_bytes_per_s
    half = machine_of("cuda NVIDIA H100 80GB HBM3, shared by 2")
    assert half.link_bytes_per_s == 10.3e9


@pytest.mark.parametrize("name", GPUS)
def test_computing_alone_reaches_what_the_best_reach_and_no_more(name: str) -> None:
    assert 0.4 < mfu(name) < 0.6


def test_flops_per_token_are_six_for_each_parameter_and_those_of_attention() -> None:
    parameters, attention = 8.03e9 - 128256 * 4096, 12 * 32 * 4096 * TOKENS
    assert flops_per_token(JOB) == pytest.approx(6 * parameters + attention, rel=0.01)


def test_an_update_takes_time_on_a_gpu() -> None:
    block = profile("h100").layers[1]
    assert block.update_s[1] == pytest.approx(3e-3, rel=0.5), "218e6 parameters, 16 bytes each"
    nominal = estimate_profile(JOB, gpus_per_node=1, memory_per_worker_bytes=70 << 30)
    assert nominal.layers[1].update_s == {}


def test_peaks_follow_the_precision() -> None:
    h100, training = GPUS["h100"], JOB.training
    assert h100.peak(training) == 989e12
    assert h100.peak(replace(training, precision="fp32")) == 67e12
    assert h100.peak(replace(training, precision="fp32", float32_matmul="high")) == 494e12
    assert h100.peak(replace(training, precision="fp64", float32_matmul="high")) == 67e12
    assert h100.peak(replace(training, precision="fp8")) == 989e12


def test_blocks_gain_in_float8_what_their_linear_layers_do() -> None:
    def of(precision: Precision, recipe: Float8Recipe = "tensorwise") -> Profile:
        training = replace(JOB.training, precision=precision, fp8_recipe=recipe, compile=True)
        return profile("h100", replace(JOB, training=training))

    before, after, mixed = of("bf16"), of("fp8"), of("fp8", "rowwise_with_gw_hp")
    weights = 218e6
    products_s = 2 * weights * TOKENS / (0.6 * 989e12)
    casts_s = 5 * (weights + TOKENS * (3 * 4096 + 14336)) / (0.8 * 3350e9)
    for block in (1, 32):
        gain_s = before.layers[block].forward_s[1] - after.layers[block].forward_s[1]
        assert gain_s == pytest.approx(products_s / 2 - casts_s, rel=0.01)
        back = [one.layers[block].backward_s[1] for one in (before, after, mixed)]
        assert back[0] - back[1] == pytest.approx(2 * gain_s)
        assert back[0] - back[2] == pytest.approx(gain_s), "weight gradients are in bf16"
        assert after.layers[block].mapped_bytes > before.layers[block].mapped_bytes
    for other in (0, 33):
        assert before.layers[other] == after.layers[other]


@pytest.mark.parametrize(
    ("kind", "board"),
    [
        ("cuda NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("cuda NVIDIA H100 80GB HBM3, A100-SXM4-40GB, shared by 2", "A100-SXM4-40GB"),
        ("cuda NVIDIA H100 80GB HBM3", ""),
        ("cuda NVIDIA B200", ""),
        ("cuda NVIDIA L4", ""),
        ("cpu AMD EPYC, 1 thread", ""),
    ],
)
def test_boards_that_are_known_to_lack_float8_are_named(kind: str, board: str) -> None:
    why = why_no_float8(kind)
    assert why == (board and f"{board} has no products in float8 (training.precision: fp8)")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("cuda NVIDIA H100 80GB HBM3", "h100"),
        ("cuda NVIDIA H200", "h200"),
        ("cuda NVIDIA A100-SXM4-80GB", "a100"),
        ("cuda A100-SXM4-40GB", "a100-40gb"),
        ("cuda NVIDIA B200", "b200"),
        ("cuda NVIDIA GH200 480GB", "h100"),
        ("cuda NVIDIA A100-SXM4-80GB, NVIDIA H100 80GB HBM3", "a100"),
        ("cuda NVIDIA H100 PCIe", OTHER_GPU.name),
        ("cuda NVIDIA H100 NVL", OTHER_GPU.name),
        ("cuda NVIDIA A100 80GB PCIe", OTHER_GPU.name),
        ("cuda NVIDIA A100-SXM4-40GB MIG 1g.5gb", OTHER_GPU.name),
        ("cuda NVIDIA H100 80GB HBM3 MIG 3g.40gb", OTHER_GPU.name),
        ("cuda NVIDIA H100 PCIe, NVIDIA H100 80GB HBM3", OTHER_GPU.name),
        ("cuda NVIDIA L4", OTHER_GPU.name),
        ("cpu AMD EPYC H100, 1 thread", NOMINAL.name),
        ("", NOMINAL.name),
    ],
)
def test_a_device_is_known_by_its_name(kind: str, name: str) -> None:
    assert machine_of(kind).name == name


def test_workers_that_share_a_gpu_have_a_part_of_it() -> None:
    half, whole = machine_of("cuda NVIDIA H100 80GB HBM3, shared by 2"), GPUS["h100"]
    assert 2 * half.flops_per_s(JOB.training) == whole.flops_per_s(JOB.training)
    assert 2 * half.memory_bytes == whole.memory_bytes
    assert 2 * (half.memory_bytes_per_s or 0) == whole.memory_bytes_per_s
    assert machine_of("cuda NVIDIA L4, shared by 2") == OTHER_GPU.shared(2)


def test_the_slowest_kind_counts() -> None:
    h100, a100 = "cuda NVIDIA H100 80GB HBM3", "cuda NVIDIA A100-SXM4-80GB"
    assert slowest_of({h100, a100}, JOB.training).name == "a100"
    assert slowest_of({h100, h100 + ", shared by 4"}, JOB.training) == GPUS["h100"].shared(4)
    assert slowest_of({h100, "cpu AMD EPYC, 1 thread"}, JOB.training) is NOMINAL
    assert slowest_of((), JOB.training) is NOMINAL
