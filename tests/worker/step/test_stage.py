"""A model cut into stages trains as the unsplit reference does, whatever the cut and the order."""

import itertools
from typing import get_args

import numpy as np
import pytest
import torch

from oobleck.core.instructions import LayerPart
from oobleck.core.job.optimization import OptimizerSpec, ScheduleSpec
from oobleck.core.job.spec import Float8Recipe, JobSpec
from oobleck.worker.data.dataset import Dataset, row_digest, samples_digest
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.state.model_state import ModelState, StateError
from oobleck.worker.state.optimizer import clip_scale
from oobleck.worker.step.exchange import Exchange
from oobleck.worker.step.mailbox import wire
from oobleck.worker.step.stage import StageRunner
from support.reference import ReferenceStep, assert_same_weights, train_reference

CPU = torch.device("cpu")
FAST = OptimizerSpec(lr=1e-2, weight_decay=0.1)
SGD = OptimizerSpec(name="sgd", lr=0.3)
NESTEROV = OptimizerSpec(name="sgd", lr=0.5, momentum=0.9, nesterov=True, weight_decay=0.01)


class Pipeline:
    """Stages in one process; what the transport and the executor do is done here by hand."""

    def __init__(self, job: JobSpec, cuts: tuple[int, ...]) -> None:
        self.job = job
        self.data = Dataset(job.data, job.model.sequence_length, job.model.vocabulary)
        bounds = itertools.pairwise([0, *cuts, job.model.layer_count])
        self.ranges = [range(start, end) for start, end in bounds]
        self.states = [ModelState(job, CPU) for _ in self.ranges]
        for state, layers in zip(self.states, self.ranges, strict=True):
            for layer in layers:
                state.initialise(layer)

    def step(self, step: int) -> ReferenceStep:
        training = self.job.training
        stages = [
            StageRunner(state, layers, self.job, CPU)
            for state, layers in zip(self.states, self.ranges, strict=True)
        ]
        for state in self.states:
            state.zero_gradients()
        losses, digests = [], []
        for microbatch in range(training.microbatches):
            first = microbatch * training.microbatch
            positions = tuple(range(first, first + training.microbatch))
            rows = self.data.rows(training.seed, step, positions, training.global_batch)
            digests += [row_digest(row) for row in rows]
            keys = RowKeys(seed=training.seed, step=step, positions=positions)
            tokens = torch.from_numpy(rows)
            x = tokens[:, :-1]
            for stage in stages:
                x = stage.forward(microbatch, x, keys, tokens[:, 1:] if stage.last else None)
            losses.append(x[0].item())
            assert x[1] == training.microbatch, "each row weighs 1"
        for microbatch in reversed(range(training.microbatches)):  # another order than forwards
            gradient = None
            for stage in reversed(stages):
                gradient = stage.backward(microbatch, gradient)
            assert gradient is None, "the first stage has no input gradient"
        return ReferenceStep(
            step=step,
            loss=sum(losses) / len(losses),
            grad_norm=self.update(step),
            samples_digest=samples_digest(digests),
        )

    def update(self, step: int) -> float:
        head = self.job.model.layer_count - 1
        if self.job.model.tied:
            first = self.states[0].gradient_part(LayerPart(layer=0, part="tied"))
            last = self.states[-1].gradient_part(LayerPart(layer=head, part="tied"))
            first += last
            last.copy_(first)
        squared = self.states[0].squared_norm([LayerPart(layer=0, part="tied")])
        for state, layers in zip(self.states, self.ranges, strict=True):
            squared += state.squared_norm(LayerPart(layer=i, part="own") for i in layers)
        norm = squared**0.5
        for state in self.states:
            state.apply(step, scale=clip_scale(norm, self.job.training.clip))
        return norm

    def weights(self) -> dict[str, np.ndarray]:
        return {
            f"{layer}.{name}": parameter.detach().numpy()
            for state, layers in zip(self.states, self.ranges, strict=True)
            for layer in layers
            for name, parameter in state.module(layer).named_parameters()
        }


def check(
    pipeline: Pipeline, steps: list[ReferenceStep], *, rtol: float, loose: float | None = None
) -> None:
    """`rtol` is for losses, `loose` (as `rtol` if None) for gradient norms and weights."""
    reference = train_reference(pipeline.job)
    assert [step.samples_digest for step in steps] == [
        step.samples_digest for step in reference.steps
    ]
    loose = rtol if loose is None else loose
    for field, tolerance in (("loss", rtol), ("grad_norm", loose)):
        np.testing.assert_allclose(
            [getattr(step, field) for step in steps],
            [getattr(step, field) for step in reference.steps],
            rtol=tolerance,
        )
    assert_same_weights(pipeline.weights(), reference.weights, rtol=loose)


@pytest.mark.parametrize(
    ("cuts", "fields"),
    [
        pytest.param((), {}, id="one stage"),
        pytest.param((1, 3), {}, id="three stages"),
        pytest.param((1, 2, 3, 4), {"tied": False}, id="a stage per layer, untied"),
        pytest.param((2, 4), {"dropout": 0.2}, id="dropout"),
        pytest.param((2, 3), {"clip": 0.05}, id="clipped in every step"),
        pytest.param((2, 3), {"clip": None}, id="never clipped"),
        pytest.param(
            (1, 4), {"schedule": ScheduleSpec(name="cosine", warmup=2)}, id="cosine with warm-up"
        ),
        pytest.param(
            (1, 4),
            {"schedule": ScheduleSpec(name="linear", warmup=2, min_lr=1e-3)},
            id="linear with warm-up",
        ),
        pytest.param((2, 3), {"optimizer": SGD}, id="sgd"),
        pytest.param(
            (3,),
            {"optimizer": NESTEROV, "schedule": ScheduleSpec(name="linear"), "clip": 0.5},
            id="sgd with nesterov momentum",
        ),
        pytest.param((3,), {"global_batch": 12, "microbatch": 6}, id="two micro-batches"),
        pytest.param((3,), {"microbatch": 1, "seed": 5}, id="single samples"),
        pytest.param(
            (2,),
            {
                "tied": False,
                "dropout": 0.1,
                "clip": 0.3,
                "optimizer": OptimizerSpec(lr=2e-2, weight_decay=0.5, beta1=0.8, beta2=0.9),
                "schedule": ScheduleSpec(name="constant", warmup=3),
            },
            id="all at once",
        ),
    ],
)
def test_stages_train_as_the_unsplit_model_does(make_job, cuts, fields):
    job = make_job(**{"optimizer": FAST, **fields})
    pipeline = Pipeline(job, cuts)
    steps = [pipeline.step(step) for step in range(1, job.training.steps + 1)]
    check(pipeline, steps, rtol=1e-12)
    assert steps[-1].loss < steps[0].loss - 0.1, "it learns"


def test_fp32_agrees_within_its_rounding(make_job):
    job = make_job(precision="fp32", dropout=0.1, optimizer=OptimizerSpec(lr=1e-3))
    pipeline = Pipeline(job, (1, 3))
    steps = [pipeline.step(step) for step in range(1, job.training.steps + 1)]
    check(pipeline, steps, rtol=1e-6, loose=1e-4)


def test_bf16_agrees_in_the_loss(make_job):
    """Weights of tiny gradients may go elsewhere; what they add to the loss is as small."""
    job = make_job(precision="bf16", dropout=0.1, optimizer=FAST)
    pipeline = Pipeline(job, (1, 3))
    losses = [pipeline.step(step).loss for step in range(1, job.training.steps + 1)]
    expected = [step.loss for step in train_reference(job).steps]
    np.testing.assert_allclose(losses, expected, rtol=2e-3)
    exact = [step.loss for step in train_reference(make_job(dropout=0.1, optimizer=FAST)).steps]
    assert losses != exact, "it does compute in bfloat16"
    np.testing.assert_allclose(losses, exact, rtol=1e-2)


@pytest.mark.parametrize("recipe", get_args(Float8Recipe))
def test_fp8_agrees_in_the_loss_with_the_formula(make_job, recipe):
    job = make_job(precision="fp8", fp8_recipe=recipe, dropout=0.1, optimizer=FAST)
    pipeline = Pipeline(job, (1, 3))
    losses = [pipeline.step(step).loss for step in range(1, job.training.steps + 1)]
    expected = [step.loss for step in train_reference(job).steps]
    np.testing.assert_allclose(losses, expected, rtol=2e-3)
    narrow = Pipeline(make_job(precision="bf16", dropout=0.1, optimizer=FAST), (1, 3))
    wider = [narrow.step(step).loss for step in range(1, job.training.steps + 1)]
    assert losses != wider, "it does compute in float8"
    np.testing.assert_allclose(losses, wider, rtol=2e-2)


def test_layers_move_between_stages_in_mid_run_with_their_moments(make_job):
    job = make_job(dropout=0.1, optimizer=FAST)
    before = Pipeline(job, (1, 3))
    steps = [before.step(step) for step in (1, 2, 3)]
    after = Pipeline(job, (2,))
    for old, layers in zip(before.states, before.ranges, strict=True):
        for layer in layers:
            new = after.states[0 if layer < 2 else 1]
            new.drop(layer)
            new.allocate(layer, version=old.held()[layer]).storage.copy_(old.layers[layer].storage)
            new.complete(layer)
    steps += [after.step(step) for step in (4, 5, 6)]
    check(after, steps, rtol=1e-12)


def test_lost_moments_would_be_noticed(make_job):
    """The tolerance of these tests can tell a recovery that forgets a moment."""
    job = make_job(optimizer=FAST)
    pipeline = Pipeline(job, (2,))
    steps = [pipeline.step(step) for step in (1, 2, 3)]
    pipeline.states[1].layers[3].storage[2].zero_()
    steps += [pipeline.step(step) for step in (4, 5, 6)]
    with pytest.raises(AssertionError):
        check(pipeline, steps, rtol=1e-6)


def test_receive_buffers_fit_what_stages_exchange(make_job):
    for precision in ("fp64", "fp32", "bf16"):
        job = make_job(precision=precision)
        pipeline = Pipeline(job, (2,))
        first, last = (
            StageRunner(state, layers, job, CPU)
            for state, layers in zip(pipeline.states, pipeline.ranges, strict=True)
        )
        keys = RowKeys(seed=0, step=1, positions=(0, 1))
        tokens = torch.from_numpy(pipeline.data.rows(0, 1, (0, 1), 6))
        activation = first.forward(0, tokens[:, :-1], keys)
        last.forward(0, activation, keys, tokens[:, 1:])
        gradient = last.backward(0)
        between = wire(job, 1)
        for sent, packing in ((activation, between.values), (gradient, between.gradients)):
            assert sent.shape == (2, *packing.shape) == (2, 8, 16)
            assert sent.dtype == packing.dtype == last.activation_dtype
            assert sent.is_contiguous()
            assert not sent.requires_grad


def test_settling_drops_what_is_in_flight(make_job):
    job = make_job()
    pipeline = Pipeline(job, ())
    stage = StageRunner(pipeline.states[0], range(5), job, CPU)
    keys = RowKeys(seed=0, step=1, positions=(0, 1))
    tokens = torch.from_numpy(pipeline.data.rows(0, 1, (0, 1), 6))
    stage.forward(3, tokens[:, :-1], keys, tokens[:, 1:])
    stage.settle()
    with pytest.raises(KeyError):
        stage.backward(3)


def test_the_last_stage_insists_on_targets_and_every_stage_on_its_layers(make_job):
    job = make_job()
    state = ModelState(job, CPU)
    keys = RowKeys(seed=0, step=1, positions=(0, 1))
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match="needs targets"):
        StageRunner(state, range(5), job, CPU).forward(0, tokens, keys)
    with pytest.raises(StateError, match="layer 0 is not held"):
        StageRunner(state, range(2), job, CPU).forward(0, tokens, keys)


def test_what_autograd_has_added_is_noted_though_a_sum_cannot_start(make_job):
    """A lost peer may show when the first of several layers is told of; the others have it too."""
    job = make_job()
    pipeline = Pipeline(job, ())
    (state,) = pipeline.states
    stage = StageRunner(state, range(5), job, CPU)
    keys = RowKeys(seed=0, step=1, positions=(0, 1))
    tokens = torch.from_numpy(pipeline.data.rows(0, 1, (0, 1), 6))
    stage.forward(0, tokens[:, :-1], keys, tokens[:, 1:], by_layer=False)

    def lose_a_peer(layer: int) -> None:
        assert layer == 4
        raise TransportError("gone")

    with pytest.raises(TransportError):
        stage.backward(0, on_layer=lose_a_peer)
    for layer in range(5):
        assert (state.layers[layer].gradient.abs().sum() > 0) == (0 in state.layers[layer].added)


class _PeerLost(Exchange):
    """Of a stage on several workers, one of which is lost in the sum of a layer's micro-batch."""

    shared = True

    def __init__(self, layer: int, microbatch: int) -> None:
        self._lost = layer, microbatch

    def add(self, layer, microbatch):
        if (layer, microbatch) == self._lost:
            raise TransportError("gone")
        return super().add(layer, microbatch)


@pytest.mark.parametrize("lost", range(5))
def test_a_sum_that_fails_leaves_no_part_of_a_micro_batch_that_counts(make_job, lost):
    """The first micro-batch's sum of a layer has taken the second one's norms along: it must not
    count where the sum of the rest of the second one fails, be it in the last layer that is due."""
    job = make_job()
    pipeline = Pipeline(job, ())
    (state,) = pipeline.states
    stage = StageRunner(state, range(5), job, CPU, exchange=_PeerLost(lost, microbatch=1))
    tokens = torch.from_numpy(pipeline.data.rows(0, 1, (0, 1), 6))
    keys = RowKeys(seed=0, step=1, positions=(0, 1))
    for microbatch in range(2):
        stage.forward(microbatch, tokens[:, :-1], keys, tokens[:, 1:], split=True)
        stage.backward_input(microbatch)
    stage.backward_weight(0)
    with pytest.raises(TransportError):
        stage.backward_weight(1)
    stage.settle()
    whole = [layer for layer in range(5) if state.layers[layer].added]
    assert whole == [layer for layer in range(5) if layer > lost]
    assert all(state.layers[layer].added == {0, 1} for layer in whole)
