"""A bf16 job trains in float32, computes with a copy in bfloat16, and adds gradients in float32."""

from dataclasses import replace

import pytest
import torch

from oobleck.core.job.spec import JobSpec
from oobleck.worker.checkpoint.output import write_layers, write_manifest
from oobleck.worker.runtime.errors import NodeError
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.runtime.timeline import Stopwatch, Timeline
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.state.precision import check
from oobleck.worker.step.exchange import StageExchange
from oobleck.worker.step.stage import StageRunner
from support import foreign
from support.meeting import Party
from support.outputs import read_output

CPU = torch.device("cpu")
LAYERS = range(5)


def made(job: JobSpec) -> ModelState:
    state = ModelState(job, CPU)
    for layer in range(job.model.layer_count):
        state.initialise(layer)
    return state


def run(stage: StageRunner, job: JobSpec, m: int, rows: slice = slice(None)) -> float:
    source = torch.Generator().manual_seed(m)
    model = job.model
    tokens = torch.randint(model.vocabulary, (2, model.sequence_length), generator=source)[rows]
    keys = RowKeys(seed=0, step=1, positions=tuple(range(2 * m, 2 * m + 2))[rows])
    found = stage.forward(m, tokens, keys, tokens.flip(1))
    stage.backward(m)
    return found[0].item()


def test_blocks_and_head_compute_with_a_rounded_copy_of_their_version(make_job):
    state = made(make_job(precision="bf16"))
    before = {}
    for version in range(3):
        for layer in LAYERS:
            module, held = state.module(layer), state.layers[layer]
            for name, weight in state.weights(layer):
                assert weight.dtype == torch.float32
                used = module.get_parameter(name)
                assert used.dtype == (torch.bfloat16 if layer else torch.float32)
                assert torch.equal(used, weight.to(used.dtype))
                assert used.grad.dtype == torch.float32
                assert not torch.equal(weight, before.get((layer, name), torch.zeros(0)))
                before[layer, name] = weight.clone()
            held.gradient.normal_()
        state.apply(version + 1, scale=1.0)


@pytest.mark.parametrize("backward", [False, True])
def test_a_torch_without_products_in_float8_is_the_nodes_fault(backward, make_job, monkeypatch):
    """Those of the backward alone, or all."""
    job = make_job(precision="fp8", fp8_recipe="rowwise")
    check(job, CPU)
    known = torch._scaled_mm

    def lacks(*given, use_fast_accum, **more):
        if backward and use_fast_accum:
            return known(*given, use_fast_accum=True, **more)
        raise NotImplementedError("no kernel for 'aten::_scaled_mm'\nand more")

    monkeypatch.setattr(torch, "_scaled_mm", lacks)
    with pytest.raises(
        NodeError, match=r"for this device \(no kernel for 'aten::_scaled_mm'\); set"
    ):
        check(job, CPU)
    check(make_job(precision="bf16"), CPU)


def test_the_copy_is_made_once_per_version(make_job):
    state = made(make_job(precision="bf16"))
    held = state.layers[1]
    weight = state.module(1).mlp_in.weight
    held.storage[0].add_(1.0)  # which nobody does
    assert state.module(1).mlp_in.weight is weight
    assert weight.abs().max() < 1
    state.apply(1, scale=1.0)
    state.module(1)
    assert weight.min() > 0.5


def test_micro_batches_are_added_up_in_float32(make_job):
    job = make_job(precision="bf16")
    together, apart = made(job), made(job)
    total = {layer: torch.zeros_like(state.gradient) for layer, state in apart.layers.items()}
    for m in range(20):
        run(StageRunner(together, LAYERS, job, CPU), job, m)
        apart.zero_gradients()
        run(StageRunner(apart, LAYERS, job, CPU), job, m)
        for layer, state in apart.layers.items():
            one = state.gradient
            assert not torch.equal(one, one.bfloat16().float())
            total[layer] += one
    for layer in LAYERS:
        found = together.layers[layer].gradient
        torch.testing.assert_close(
            found, total[layer], rtol=1e-5, atol=1e-6 * found.abs().max().item()
        )
    wide = total[1]
    assert not torch.equal(wide, wide.bfloat16().float())


def test_what_is_written_is_what_was_trained(make_job, tmp_path):
    job = make_job(precision="bf16")
    state = made(job)
    for layer in LAYERS:
        state.layers[layer].gradient.normal_()
    state.apply(1, scale=1.0)
    write_layers(tmp_path, state, LAYERS)
    write_manifest(tmp_path, job, "1-small", 1)
    found = read_output(tmp_path)
    for layer in LAYERS:
        for name, weight in state.weights(layer):
            assert torch.equal(torch.from_numpy(found[f"{layer}.{name}"]), weight)
            if layer and weight.dim() > 1:
                assert not torch.equal(weight, weight.bfloat16().float())


@pytest.mark.parametrize("kind", foreign.TINY)
def test_families_compute_close_to_float32(make_job, kind):
    spec = foreign.spec(kind, sequence_length=8, dropout=0.1)
    losses = {}
    for precision in ("fp32", "bf16"):
        job = replace(make_job(precision=precision), model=spec)
        state = made(job)
        stage = StageRunner(state, range(job.model.layer_count), job, CPU)
        losses[precision] = [run(stage, job, m) for m in range(3)]
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=5e-3)


@pytest.mark.parametrize(
    ("resident", "sums"),
    [(True, torch.float32), (False, torch.float32), (False, torch.bfloat16)],
)
def test_workers_of_a_stage_gather_the_copy_and_sum_in_float32(make_job, resident, sums):
    job = make_job(precision="bf16")
    whole = made(job)
    states = [ModelState(job, CPU) for _ in range(2)]
    for part, state in enumerate(states):
        for layer in LAYERS:
            state.initialise(layer, part=part, parts=2)
    sent = []
    with Party(2) as party:
        party.meet()

        def work(part):
            transport, state = party.transports[part], states[part]
            send = transport.send

            def note(tensor, peer, tag):
                sent.append((tag % 4 // 2, tensor.dtype))  # weights are of the even kinds
                return send(tensor, peer, tag)

            transport.send = note
            exchange = StageExchange(
                state,
                LAYERS,
                transport,
                [0, 1],
                sums=sums,
                resident=set(LAYERS) if resident else (),
                timeline=Timeline(),
                stopwatch=Stopwatch.on(CPU),
            )
            stage = StageRunner(state, LAYERS, job, CPU, exchange=exchange)
            exchange.begin(dict.fromkeys(LAYERS, 3))
            for m in range(3):
                run(stage, job, m, slice(part, part + 1))
            exchange.end()

        party.everywhere(lambda transport: work(transport.rank))
    for m in range(3):
        run(StageRunner(whole, LAYERS, job, CPU), job, m)
    assert set(sent) == {(0, torch.bfloat16), (0, torch.float32), (1, sums)}
    for layer in LAYERS:
        for state in states:
            shared = state.layers[layer]
            assert shared.gradient.dtype == torch.float32
            place = 0
            for numbers in shared.numbers:
                expected = whole.layers[layer].gradient[numbers.start : numbers.stop]
                found = shared.gradient[place : place + len(numbers)]
                place += len(numbers)
                assert torch.allclose(found, expected, rtol=5e-2, atol=2e-4), layer
