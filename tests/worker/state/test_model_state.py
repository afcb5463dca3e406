"""Flat layer state: layout, views, versions, moving a layer, and the update over slices."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from oobleck.core.instructions import LayerPart
from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.spec import DataSpec
from oobleck.worker.models.checks.describe import describe
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.state.layout import check_no_decay, layout, pack, unpack
from oobleck.worker.state.model_state import ModelState, StateError, norms_of
from oobleck.worker.step.stage import StageRunner

CPU = torch.device("cpu")
HEAD = 4


def make_state(job, layers=range(5)):
    state = ModelState(job, CPU)
    for layer in layers:
        state.initialise(layer)
    return state


def backward_once(state, job):
    rows = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    runner = StageRunner(state, range(5), job, CPU)
    runner.forward(0, rows[:, :-1], RowKeys(seed=0, step=1, positions=(0, 1)), rows[:, 1:])
    runner.backward(0)


@pytest.mark.parametrize("tied", [True, False])
def test_the_flat_order_is_tied_then_decayed_then_the_rest(make_job, tied):
    spec = make_job(tied=tied).model
    cuts = {
        i: (layout(spec, i).tied, layout(spec, i).decayed, layout(spec, i).size)
        for i in (0, 1, HEAD)
    }
    tokens, positions, block = 256 * 16, 8 * 16, 12 * 16 * 16
    assert cuts == {
        0: (tokens * tied, tokens + positions, tokens + positions),
        1: (0, block, block + 4 * 16),
        HEAD: (tokens * tied, tokens, tokens + 2 * 16),
    }
    for layer in range(5):
        end = 0
        for span in layout(spec, layer).parameters:
            assert span.offset == end
            end = span.end


def test_tied_vectors_follow_tied_matrices_and_are_not_decayed(make_job):
    """Behind a gap, where the matrices do not end with a whole cut, which no file has."""
    spec = OwnModelSpec(python="support.own_models:twins")
    code.allow((code.ANY,))
    job = replace(make_job(), model=spec, data=DataSpec(python="support.own_models:Pairs"))
    row = torch.zeros(3)
    job = replace(job, model=replace(spec, described=describe(job, (row, row))))
    state = ModelState(job, CPU)
    held = [state.initialise(layer) for layer in (0, 1)]
    spared = {
        pattern: [layout(job.model, layer, (pattern,)) for layer in (0, 1)]
        for pattern in ("*.bias", "0.weight", "1.weight", "1.*")
    }
    code.allow(())
    assert torch.equal(held[0].storage, held[1].storage)
    for pattern, both in spared.items():
        decayed = 16 if pattern == "*.bias" else 0  # the bias is not decayed in any case
        for flat in both:
            assert (flat.tied_decayed, flat.tied) == (decayed, decayed + 3 if decayed else 12)
    flat = held[1].layout
    assert (flat.tied_decayed, flat.tied, flat.decayed, flat.size) == (16, 19, 19, 19)
    assert [(len(one.gradient), one.decayed) for one in held[1].slices()] == [
        (16, True),
        (3, False),
    ]
    snapshot = held[1].storage.clone()
    content = b"".join(pack(snapshot, flat, ADAMW.state, {}))
    assert torch.equal(unpack(content, flat, ADAMW.state, snapshot.dtype), snapshot)


def test_parameters_and_gradients_stay_views_through_backward_and_update(make_job):
    job = make_job()
    state = make_state(job)
    for step in (1, 2):
        state.zero_gradients()
        backward_once(state, job)
        backward_once(state, job)
        for layer, held in state.layers.items():
            values = dict(held.module.named_parameters())
            for span in layout(job.model, layer).parameters:
                flat = held.storage[0, span.offset : span.end]
                gradient = held.gradient[span.offset : span.end]
                assert values[span.name].data_ptr() == flat.data_ptr()
                assert values[span.name].grad.data_ptr() == gradient.data_ptr()
                assert gradient.abs().sum() > 0
        state.apply(step, scale=0.5)


def test_gradients_of_micro_batches_add_up(make_job):
    job = make_job()
    state = make_state(job)
    backward_once(state, job)
    once = [held.gradient.clone() for held in state.layers.values()]
    backward_once(state, job)
    for held, gradient in zip(state.layers.values(), once, strict=True):
        torch.testing.assert_close(held.gradient, 2 * gradient, rtol=1e-14, atol=0)
    state.zero_gradients()
    assert all(held.gradient.eq(0).all() for held in state.layers.values())


def test_parts_are_views_and_the_norm_is_over_the_parts_asked_for(make_job):
    state = make_state(make_job(precision="fp32"))
    tied, own = LayerPart(layer=HEAD, part="tied"), LayerPart(layer=HEAD, part="own")
    state.gradient_part(tied).fill_(2.0)
    state.gradient_part(own).fill_(3.0)
    assert state.layers[HEAD].gradient.unique().tolist() == [2.0, 3.0]
    assert state.gradient_part(tied).is_contiguous()
    assert state.squared_norm([own]) == pytest.approx(9.0 * 32, rel=1e-14)
    assert state.squared_norm([own, tied]) == pytest.approx(9.0 * 32 + 4.0 * 256 * 16, rel=1e-14)
    assert state.squared_norm([]) == 0.0
    assert state.squared_norm([LayerPart(layer=1, part="tied")]) == 0.0
    state.layers[1].gradient[3] = float("inf")
    assert state.squared_norm([LayerPart(layer=1, part="own")]) == float("inf")


def test_the_norm_of_large_fp32_gradients_does_not_overflow(make_job):
    state = make_state(make_job(precision="fp32"))
    part = LayerPart(layer=1, part="own")
    state.gradient_part(part).fill_(1e30)
    size = state.gradient_part(part).numel()
    assert state.squared_norm([part]) == pytest.approx(1e60 * size, rel=1e-6)


ADAMW = OptimizerSpec(lr=3e-4, weight_decay=0.1)
OPTIMIZERS = [
    pytest.param(
        ADAMW, partial(torch.optim.AdamW, lr=3e-4, betas=(0.9, 0.95), eps=1e-8), id="adamw"
    ),
    pytest.param(
        OptimizerSpec(name="sgd", lr=0.1, weight_decay=0.1),
        partial(torch.optim.SGD, lr=0.1),
        id="sgd",
    ),
    pytest.param(
        OptimizerSpec(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        id="momentum",
    ),
    pytest.param(
        OptimizerSpec(name="sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        id="nesterov",
    ),
]


@pytest.mark.parametrize(("spec", "make_oracle"), OPTIMIZERS)
def test_the_update_is_that_of_torch_by_parameter(make_job, spec, make_oracle):
    """Moments, bias correction by version, and decay of matrices only; over three steps."""
    state = make_state(make_job(optimizer=spec), [2])
    assert state.layers[2].storage.shape[0] == 1 + spec.moments
    module = state.module(2)
    twins = {n: torch.nn.Parameter(p.detach().clone()) for n, p in module.named_parameters()}
    oracle = make_oracle(
        [
            {"params": [p for p in twins.values() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in twins.values() if p.dim() == 1], "weight_decay": 0.0},
        ],
        foreach=False,
    )
    for step in (1, 2, 3):
        source = torch.Generator().manual_seed(step)
        for name, parameter in module.named_parameters():
            parameter.grad.normal_(generator=source)
            twins[name].grad = parameter.grad * 0.25
        state.apply(step, scale=0.25)
        oracle.step()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter, twins[name], rtol=1e-12, atol=1e-15)
    assert state.held() == {2: 3}


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_that_the_job_names_are_not_decayed(make_job, tied):
    """A tied one is spared in both of its layers, by its name in either."""
    spared = {(0, "token.weight"), (2, "mlp_in.weight")}
    spared |= {(HEAD, "token.weight")} if tied else set()
    spec = replace(ADAMW, no_decay=("0.tok*", "2.mlp_in.weight"))
    state = make_state(make_job(optimizer=spec, tied=tied))
    twins = {
        (layer, name): torch.nn.Parameter(parameter.detach().clone())
        for layer in range(HEAD + 1)
        for name, parameter in state.module(layer).named_parameters()
    }
    assert spared <= twins.keys(), twins.keys()
    decayed = [p for key, p in twins.items() if p.dim() > 1 and key not in spared]
    rest = [p for key, p in twins.items() if p.dim() == 1 or key in spared]
    oracle = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=3e-4,
        betas=(0.9, 0.95),
    )
    for step in (1, 2):
        for (layer, name), twin in twins.items():
            parameter = state.module(layer).get_parameter(name)
            parameter.grad.normal_(generator=torch.Generator().manual_seed(step))
            twin.grad = parameter.grad.clone()
        state.apply(step, scale=1.0)
        oracle.step()
        for (layer, name), twin in twins.items():
            parameter = state.module(layer).get_parameter(name)
            torch.testing.assert_close(parameter, twin, rtol=1e-12, atol=1e-15)


def test_a_pattern_that_no_parameter_has_is_refused(make_job):
    model = make_job().model
    check_no_decay(model, ("*.bias", "0.*"))
    with pytest.raises(
        JobError, match=r"no parameter's name matches 9\.\*; names are 0\.token\.weight, "
    ):
        check_no_decay(model, ("*.bias", "9.*"))


@pytest.mark.parametrize(
    "spec", [ADAMW, OptimizerSpec(name="sgd", lr=0.1, momentum=0.9, nesterov=True)]
)
def test_copies_of_the_tied_weight_stay_equal_to_the_last_bit(make_job, spec):
    """The head and the embedding lie differently in memory; the update must not show it."""
    for precision, vocabulary in (("fp32", 257), ("fp64", 251)):
        fields = {"precision": precision, "vocabulary": vocabulary, "optimizer": spec}
        state = make_state(make_job(**fields, hidden=18))
        embedding, head = (LayerPart(layer=i, part="tied") for i in (0, HEAD))
        for step in range(1, 20):
            source = torch.Generator().manual_seed(step)
            state.gradient_part(embedding).normal_(generator=source)
            state.gradient_part(head).copy_(state.gradient_part(embedding))
            state.apply(step, scale=0.7)
        assert torch.equal(state.module(0).token.weight, state.module(HEAD).token.weight)


def test_a_layer_goes_on_alike_after_it_was_moved(make_job):
    """Weights, moments and version are all that there is to a layer."""
    job = make_job()

    def update(state, steps):
        for step in steps:
            for layer, held in state.layers.items():
                held.gradient.normal_(generator=torch.Generator().manual_seed(step * 10 + layer))
            state.apply(step, scale=1.0)

    source = make_state(job, [1, 2])
    update(source, range(1, 4))
    target = ModelState(job, CPU)
    target.allocate(2, version=source.held()[2]).storage.copy_(source.layers[2].storage)
    target.complete(2)
    update(source, range(4, 6))
    update(target, range(4, 6))
    assert torch.equal(source.layers[2].storage, target.layers[2].storage)
    assert target.held() == {2: 5}


def test_an_allocated_layer_is_not_held_before_it_is_complete(make_job):
    state = make_state(make_job(), [1])
    state.allocate(2, version=1)
    assert state.held() == {1: 0}
    with pytest.raises(StateError, match="layer 2 is not held"):
        state.module(2)
    state.apply(1, scale=1.0)
    state.complete(2)
    assert state.held() == {1: 1, 2: 1}
    state.drop(1)
    state.drop(1)
    assert state.held() == {2: 1}


def test_applying_a_step_again_changes_nothing(make_job):
    state = make_state(make_job(), [1])
    state.layers[1].gradient.fill_(1.0)
    state.apply(1, scale=1.0)
    before = state.layers[1].storage.clone()
    state.apply(1, scale=1.0)
    assert torch.equal(state.layers[1].storage, before)


def test_a_gap_in_the_steps_is_refused_before_anything_is_changed(make_job):
    state = make_state(make_job(), [1, 2])
    state.layers[2].version = 1
    before = state.layers[2].storage.clone()
    with pytest.raises(
        StateError, match=r"step 2 cannot be applied to layers at versions \{1: 0\}"
    ):
        state.apply(2, scale=1.0)
    assert torch.equal(state.layers[2].storage, before)
    assert state.held() == {1: 0, 2: 1}


def test_a_skipped_step_counts_but_changes_no_weight(make_job):
    state = make_state(make_job(), [1])
    state.layers[1].gradient.fill_(float("nan"))
    before = state.layers[1].storage.clone()
    state.skip(1)
    assert torch.equal(state.layers[1].storage, before)
    assert state.held() == {1: 1}


def test_storage_is_one_message(make_job):
    for precision, dtype in (
        ("fp64", torch.float64),
        ("fp32", torch.float32),
        ("bf16", torch.float32),
    ):
        storage = make_state(make_job(precision=precision), [1]).layers[1].storage
        assert storage.is_contiguous()
        assert storage.dtype == dtype
        assert storage.shape == (3, 12 * 16 * 16 + 4 * 16)


def test_transfers_that_broke_off_are_forgotten(make_job):
    state = ModelState(make_job(), CPU)
    state.initialise(1)
    state.allocate(2, version=1)
    state.drop_partial()
    assert list(state.layers) == [1]


def test_a_gpus_norms_are_those_of_the_pieces():
    """One call for all of them, in float64, of numbers that float32 would add up wrongly."""
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(size, generator=draw) * 10.0**size for size in (1, 5)]
    given += [torch.randn(700_000, generator=draw)]
    pieces, whole = (
        torch.stack(norms_of(given, torch.device(kind))).square().sum().item()
        for kind in ("cpu", "cuda")
    )
    exact = sum(one.double().square().sum().item() for one in given)
    assert pieces == pytest.approx(exact, rel=1e-14)
    assert whole == pytest.approx(exact, rel=1e-14)
    assert len(norms_of(given, torch.device("cuda"))) == len(given)
    assert norms_of([], torch.device("cuda")) == []
