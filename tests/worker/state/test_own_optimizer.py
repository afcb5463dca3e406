"""Optimizers that a job names: what is found of a class, its update of flat pieces against torch's
own on whole parameters, and which classes are refused."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from oobleck.core.instructions import LayerPart
from oobleck.core.job.code import Json
from oobleck.core.job.optimization import OptimizerSpec, ScheduleSpec
from oobleck.core.job.spec import TrainingSpec
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError, NodeError
from oobleck.worker.state import optimizer
from oobleck.worker.state.describe_optimizer import describe
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.state.optimizer import learning_rate
from support import own_optimizers

CPU = torch.device("cpu")
HEAD = 4
RATE = 1e-2
SCHEDULE = ScheduleSpec(name="cosine", warmup=2)
SUPPORT = str(Path(own_optimizers.__file__).parent)


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    code.allow((SUPPORT,))
    yield
    code.allow(())


def given(name: str, *, weight_decay: float = 0.0, **arguments: object) -> OptimizerSpec:
    torchs = ":" in name
    return OptimizerSpec(
        python=name if torchs else f"own_optimizers:{name}",
        path=None if torchs else SUPPORT,
        lr=RATE,
        weight_decay=weight_decay,
        arguments=Json(json.dumps(arguments)),
    )


def described(spec: OptimizerSpec, **more: Any) -> OptimizerSpec:
    training = TrainingSpec(steps=9, global_batch=1, optimizer=spec, schedule=SCHEDULE, **more)
    return replace(spec, described=describe(training))


#: Of each class: its object for groups of parameters, and the rows, counters and other numbers.
CASES: list[tuple[OptimizerSpec, Callable[..., Any], tuple[str, ...]]] = [
    (
        given("torch.optim:RMSprop", weight_decay=0.1, centered=True, momentum=0.9),
        partial(torch.optim.RMSprop, centered=True, momentum=0.9),
        ("square_avg", "momentum_buffer", "grad_avg", "step"),
    ),
    (
        given("torch.optim:NAdam", weight_decay=0.1, decoupled_weight_decay=True),
        partial(torch.optim.NAdam, decoupled_weight_decay=True),
        ("exp_avg", "exp_avg_sq", "mu_product", "step"),
    ),
    (
        given("torch.optim:Adagrad", weight_decay=0.1, initial_accumulator_value=0.1),
        partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
        ("sum", "step"),
    ),
    (
        given("torch.optim:SGD", weight_decay=0.1, momentum=0.9, dampening=0.3),
        partial(torch.optim.SGD, momentum=0.9, dampening=0.3),
        ("momentum_buffer",),
    ),
    (given("torch.optim:SGD"), torch.optim.SGD, ()),
    (
        given("torch.optim:ASGD", t0=2.0, weight_decay=0.1),
        partial(torch.optim.ASGD, t0=2.0),
        ("ax", "eta", "mu", "step"),
    ),
    (given("torch.optim:Rprop"), torch.optim.Rprop, ("prev", "step_size", "step")),
    (
        given("torch.optim:AdamW", weight_decay=0.1, amsgrad=True),
        partial(torch.optim.AdamW, amsgrad=True),
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"),
    ),
    (given("Lion", weight_decay=0.1), own_optimizers.Lion, ("momentum", "steps")),
]
IDS = [spec.label.partition(":")[2] for spec, _, _ in CASES]


def fill(gradient: torch.Tensor, step: int, layer: int) -> None:
    gradient.normal_(generator=torch.Generator().manual_seed(100 * step + layer))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("spec", "make_oracle", "names"), CASES, ids=IDS)
def test_the_update_is_that_of_torch_on_whole_parameters(make_job, spec, make_oracle, names, parts):
    """Also where a layer is cut over workers, whose shares are put together again here."""
    spec = described(spec)
    assert spec.sketch.names == names
    job = make_job(steps=9, optimizer=spec, schedule=SCHEDULE)
    shares = [ModelState(job, CPU) for _ in range(parts)]
    for part, state in enumerate(shares):
        state.initialise(2, part=part, parts=parts)
    whole = ModelState(job, CPU)
    module = whole.initialise(2).module
    # torch's own, on whole parameters
    oracle = make_oracle(
        [
            {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        if spec.weight_decay
        else list(module.parameters()),
        lr=RATE,
    )
    for step in range(1, 10):
        fill(whole.layers[2].gradient, step, 2)
        for state in shares:
            held = state.layers[2]
            for numbers in held.numbers:
                mine = whole.layers[2].gradient[numbers.start : numbers.stop]
                held.gradient[held.columns(numbers)] = 2 * mine
            state.apply(step, scale=0.5)
        for group in oracle.param_groups:
            group["lr"] = learning_rate(SCHEDULE, step, 9, RATE)
        oracle.step()
        expected = torch.zeros(whole.layers[2].layout.size, dtype=torch.float64)
        for span in whole.layers[2].layout.parameters:
            expected[span.offset : span.end] = module.get_parameter(span.name).detach().flatten()
        for state in shares:
            held = state.layers[2]
            for numbers in held.numbers:
                found = held.storage[0, held.columns(numbers)]
                wanted = expected[numbers.start : numbers.stop]
                torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "spec", [CASES[1][0], CASES[5][0], CASES[8][0]], ids=["NAdam", "ASGD", "Lion"]
)
def test_a_layer_goes_on_alike_on_a_worker_that_was_not_there(make_job, spec):
    """Rows and the number of the step are all that there is to it, also for numbers of a class that
    follow from all steps before."""
    job = make_job(steps=9, optimizer=described(spec), schedule=SCHEDULE)
    source, target = ModelState(job, CPU), ModelState(job, CPU)
    source.initialise(2)
    for step in range(1, 9):
        fill(source.layers[2].gradient, step, 2)
        source.apply(step, scale=1.0)
        if step == 6:
            target.load(2, source.snapshot(2), version=6)
        if step > 6:
            fill(target.layers[2].gradient, step, 2)
            target.apply(step, scale=1.0)
    assert torch.equal(source.layers[2].storage, target.layers[2].storage)


def test_a_layer_that_is_behind_gets_the_numbers_of_its_own_step(make_job):
    job = make_job(steps=9, optimizer=described(CASES[1][0]), schedule=SCHEDULE)

    def trained() -> torch.Tensor:
        state = ModelState(job, CPU)
        state.initialise(2)
        for step in range(1, 8):
            fill(state.layers[2].gradient, step, 2)
            state.apply(step, scale=1.0)
        return state.layers[2].storage

    first, second = trained(), trained()
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "name", ["torch.optim:Adagrad", "torch.optim:NAdam", "torch.optim:RMSprop"]
)
def test_skipped_steps_count_as_steps_and_change_nothing(make_job, name):
    """As AdamW's bias correction has it here: its class finds the number of the job's step."""
    arguments = {"initial_accumulator_value": 0.1} if name.endswith("Adagrad") else {}
    job = make_job(steps=9, optimizer=described(given(name, **arguments)))
    state = ModelState(job, CPU)
    before = state.initialise(2).storage.clone()
    state.skip(1)
    assert torch.equal(state.layers[2].storage, before)
    fill(state.layers[2].gradient, 2, 2)
    gradient = state.layers[2].gradient.clone()
    state.apply(2, scale=1.0)
    parameter = nn.Parameter(before[0].clone())
    oracle = optimizer.make(given(name, **arguments), [parameter])
    parameter.grad = torch.zeros_like(parameter)  # a step that changes no rows
    oracle.step()
    parameter.grad = gradient
    oracle.step()
    torch.testing.assert_close(state.layers[2].storage[0], parameter.data, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("spec", [CASES[1][0], CASES[8][0]], ids=["NAdam", "Lion"])
def test_copies_of_the_tied_weight_stay_equal_to_the_last_bit(make_job, spec):
    fields = {"precision": "fp32", "vocabulary": 257, "optimizer": described(spec)}
    job = make_job(**fields, hidden=18)
    state = ModelState(job, CPU)
    for layer in range(HEAD + 1):
        state.initialise(layer)
    embedding, head = (LayerPart(layer=i, part="tied") for i in (0, HEAD))
    for step in range(1, 12):
        reduced = state.gradient_part(embedding)
        fill(reduced, step, 0)
        state.set_reduced(head, reduced)  # one for both, as sums leave it
        state.apply(step, scale=0.7)
    assert torch.equal(state.module(0).token.weight, state.module(HEAD).token.weight)


REFUSED = {
    "torch.optim:LBFGS": "LBFGS doesn't support per-parameter options",
    "torch.optim:Adafactor": r"keeps row_var of shape \[3, 1\] of a parameter of shape \[3, 5\]",
    "torch.optim:Muon": "Muon",
    "torch.optim:SparseAdam": "SparseAdam",
    "torch.optim:lr_scheduler": "is module; name a class or function that gives it",
    "Lamb": "does not update each number by itself",
    "Noisy": "must not draw random numbers",
    "Normed": "keeps norm, a number that depends on the gradients",
    "Remembering": "keeps more from step to step",
    "Grouping": "keeps more from step to step",
    "Writing": "writes into its parameters' gradients",
    "Late": "the same state of each parameter from its first step on",
    "History": "keeps gradients, a list",
    "Half": "keeps momentum as torch.bfloat16",
    "Asking": "failed in a step: TypeError: .* 'closure'",
    "no_optimizer": "makes str; name a class that extends torch.optim.Optimizer",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(JobError, match=REFUSED[name]) as caught:
        described(given(name))
    assert str(caught.value).startswith("optimizer: ")
    assert "\n" not in str(caught.value)


def test_a_decay_that_a_class_does_not_take_is_refused() -> None:
    with pytest.raises(JobError, match="Rprop cannot be used: it takes no weight_decay"):
        described(given("torch.optim:Rprop", weight_decay=0.1))


def test_classes_of_torch_are_allowed_everywhere_and_those_of_users_where_the_node_says() -> None:
    lion = described(given("Lion"))
    rmsprop = described(given("torch.optim:RMSprop"))
    code.allow(())
    optimizer.check(rmsprop)
    optimizer.check(OptimizerSpec())
    with pytest.raises(NodeError, match=r"does not allow the job to load own_optimizers:Lion"):
        optimizer.check(lion)


def test_another_code_than_was_looked_at_is_refused() -> None:
    spec = described(given("Lion"))
    optimizer.check(spec)
    other = replace(spec, described=Json(spec.described.replace(spec.sketch.code, "0" * 64)))
    with pytest.raises(NodeError, match="differs from that where the job was submitted"):
        optimizer.check(other)
    with pytest.raises(JobError, match="submit the job with 'oobleck submit'"):
        optimizer.check(given("Lion"))
