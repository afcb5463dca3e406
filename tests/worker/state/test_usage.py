"""Parameters without a gradient in a step: left as they are, as torch's optimizers leave them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from oobleck.core.instructions import LayerPart, Share
from oobleck.core.job.code import Json
from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.optimization import OptimizerSpec, ScheduleSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.worker.models.checks.describe import describe
from oobleck.worker.runtime import code
from oobleck.worker.state import describe_optimizer
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.state.optimizer import learning_rate
from oobleck.worker.state.progress import Omissions, parameters_of
from support.gradient_models import Keyed

CPU = torch.device("cpu")
RATE, STEPS, LAYER = 1e-2, 8, 1
COSINE = ScheduleSpec(name="cosine", warmup=2)


@pytest.fixture(autouse=True)
def _allowed() -> Iterator[None]:
    code.allow((code.ANY,))
    yield
    code.allow(())


def make_job(optimizer: OptimizerSpec, schedule: ScheduleSpec, precision: str = "fp64") -> JobSpec:
    spec = OwnModelSpec(python="support.gradient_models:branches")
    job = JobSpec(
        name="unused",
        model=spec,
        data=DataSpec(python="support.gradient_models:Keyed"),
        training=TrainingSpec(
            steps=STEPS,
            global_batch=4,
            optimizer=optimizer,
            schedule=schedule,
            precision=precision,  # type: ignore[arg-type]
        ),
    )
    if optimizer.code is not None:
        sketch = describe_optimizer.describe(job.training)
        training = replace(job.training, optimizer=replace(optimizer, described=sketch))
        job = replace(job, training=training)
    inputs, target = Keyed()[0]
    target = target.double() if precision == "fp64" else target
    return replace(job, model=replace(spec, described=describe(job, (inputs, target))))


def torchs(name: str, **arguments: object) -> OptimizerSpec:
    return OptimizerSpec(
        python=f"torch.optim:{name}",
        lr=RATE,
        weight_decay=0.1,
        arguments=Json(json.dumps(arguments)),
    )


CONSTANT = ScheduleSpec()
CASES: list[Any] = [
    (
        OptimizerSpec(lr=RATE, weight_decay=0.1),
        partial(torch.optim.AdamW, betas=(0.9, 0.95), eps=1e-8),
        COSINE,
    ),
    (
        OptimizerSpec(name="sgd", lr=RATE, momentum=0.9, weight_decay=0.1),
        partial(torch.optim.SGD, momentum=0.9),
        COSINE,
    ),
    (
        torchs("SGD", momentum=0.9, dampening=0.3),
        partial(torch.optim.SGD, momentum=0.9, dampening=0.3),
        COSINE,
    ),
    (torchs("NAdam"), torch.optim.NAdam, COSINE),
    (torchs("RAdam"), torch.optim.RAdam, COSINE),
    (torchs("ASGD", t0=2.0), partial(torch.optim.ASGD, t0=2.0), COSINE),
    (
        torchs("Adagrad", initial_accumulator_value=0.1),
        partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
        COSINE,
    ),
]
IDS = [spec.label.partition(":")[2] or spec.label for spec, _, _ in CASES]
#: By step: the experts of the layer without a gradient. The last one is new to the optimizer late.
UNUSED = [{1, 2}, {2}, {2}, {0, 2}, set(), {1}, {1, 2}, set()]


@pytest.mark.parametrize(("spec", "make_oracle", "schedule"), CASES, ids=IDS)
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_the_update_is_that_of_torch(
    spec: OptimizerSpec, make_oracle: Any, schedule: ScheduleSpec, precision: str
) -> None:
    """By parameter on the whole layer; and in shares, and in pieces, to the last bit."""
    job = make_job(spec, schedule, precision)
    whole, pieces, *shares = (ModelState(job, CPU) for _ in range(5))
    module = whole.initialise(LAYER).module
    pieces.initialise(LAYER)
    for part, state in enumerate(shares):
        state.initialise(LAYER, part=part, parts=3)
    twins = {n: torch.nn.Parameter(p.detach().clone()) for n, p in module.named_parameters()}
    matrices, rest = (
        [p for p in twins.values() if (p.dim() > 1) == wide] for wide in (True, False)
    )
    oracle = make_oracle(
        [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=RATE
    )
    held = whole.layers[LAYER]
    names = [span.name for span in held.layout.parameters]
    keys = dict(zip(names, parameters_of(job).by_layer[LAYER], strict=True))
    missed: Any = {}
    for step, experts in enumerate(UNUSED, 1):
        gradient = held.gradient.normal_(generator=torch.Generator().manual_seed(step))
        unused = {name for name in keys if int(name.split(".")[2]) in experts}
        for span in held.layout.parameters:
            numbers = slice(span.offset, span.end)
            twins[span.name].grad = None
            if span.name in unused:
                gradient[numbers] = 0
            else:
                twins[span.name].grad = 0.5 * gradient[numbers].view(span.shape)
        for part in ("own", "tied"):
            for number in range(2):
                of = LayerPart(layer=LAYER, part=part, share=Share(number, number + 1, 2))
                pieces.layers[LAYER].gradient.copy_(gradient)
                pieces.set_reduced(of, pieces.gradient_part(of).clone())
        for state in shares:
            one = state.layers[LAYER]
            for numbers in one.numbers:
                one.gradient[one.columns(numbers)] = gradient[numbers.start : numbers.stop]
        omitted = Omissions(unused=frozenset(keys[name] for name in unused), missed=missed)
        for state in (whole, pieces, *shares):
            state.apply(step, scale=0.5, omitted=omitted)
        missed = omitted.after()
        for group in oracle.param_groups:
            group["lr"] = learning_rate(schedule, step, STEPS, RATE)
        oracle.step()
        tolerance = 1e-5 if precision == "fp32" else 1e-12
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(
                parameter.detach(), twins[name].detach(), rtol=tolerance, atol=tolerance / 1e3
            )
        assert torch.equal(pieces.layers[LAYER].storage, held.storage)
        for state in shares:
            one = state.layers[LAYER]
            for numbers in one.numbers:
                expected = held.storage[:, numbers.start : numbers.stop]
                assert torch.equal(one.storage[:, one.columns(numbers)], expected)


def test_what_is_used_is_seen_by_micro_batch_and_forgotten_with_the_gradient() -> None:
    job = make_job(OptimizerSpec(lr=RATE), CONSTANT)
    state = ModelState(job, CPU)
    for layer in (0, 1, 2):
        state.initialise(layer)
    keys = parameters_of(job).keys
    assert len(set(keys)) == len(keys)
    assert "2.experts.2.bias" not in keys, "it is layer 1's"

    def used() -> set[str]:
        return {key for key, one in zip(keys, state.used(), strict=True) if one}

    expert = state.layers[2].module.get_parameter("module.experts.2.bias")
    table = state.layers[0].module.get_parameter("module.table")
    for parameter in (expert, table):
        parameter.backward(torch.zeros_like(parameter))
    assert used() == {"1.experts.2.bias", "0.table"}
    state.zero_gradients(keeping=(0,))
    assert used() == {"0.table"}
    state.zero_gradients()
    assert used() == set()


def test_what_is_missed_is_counted_by_parameter() -> None:
    first = Omissions(unused=frozenset("ab")).after()
    assert first == {"a": 1, "b": 1}
    assert Omissions(unused=frozenset("b"), missed=first).after() == {"a": 1, "b": 2}
    assert Omissions(missed=first).after() is first


def test_a_built_in_model_leaves_nothing_out(make_job: Any) -> None:
    assert parameters_of(make_job()).keys == ()
    state = ModelState(make_job(), CPU)
    state.initialise(1)
    assert state.used() == []
    assert state.layers[1].gradients == ()
