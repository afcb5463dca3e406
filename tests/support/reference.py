"""The oracle: the same job trained by plain PyTorch in one process, with the unsplit model.

It shares the built-in layers' code, initial weights and the choice of inputs and targets with the
worker, and nothing else: no flat state, no stages, no sums over workers, a truly shared tied
weight, and torch's own clipping and scheduling. Of the Hugging Face kinds it trains transformers'
own model, which draws dropout elsewhere: leave that out. Call it in a test or, since its arguments
and results can be pickled, in a process of its own.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import lr_scheduler

from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.worker.data.dataset import Dataset, row_digest, samples_digest
from oobleck.worker.data.objective import IGNORED, inputs_and_targets
from oobleck.worker.models.base import Layer
from oobleck.worker.models.registry import build_layer, initialise_parameters
from oobleck.worker.runtime.random import RowKeys
from support.float8 import emulate

#: Relative difference of losses that another order of sums explains.
LOSS_TOLERANCE = {"fp32": 1e-6, "fp64": 1e-12}


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over a micro-batch's targets, as torch computes it."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStep:
    """What a line of metrics.jsonl says, as far as it does not depend on time and plan."""

    step: int
    loss: float
    grad_norm: float
    samples_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRun:
    steps: list[ReferenceStep]
    #: Loss on the held-out samples by step.
    evaluations: dict[int, float]
    #: By `<layer>.<parameter>`, as `support.outputs.read_output` names them.
    weights: dict[str, NDArray[np.floating]]


class _Layers(torch.nn.Module):
    """The built-in model."""

    def __init__(self, layers: list[Layer], *, tied: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        if tied:
            self.layers[-1].token.weight = self.layers[0].token.weight

    def forward(self, x: Tensor, keys: RowKeys) -> Tensor:
        for layer in self.layers:
            x = layer(x, keys)
        return x

    def weights(self) -> dict[str, Tensor]:
        return {
            f"{layer.layer}.{name}": parameter
            for layer in self.layers
            for name, parameter in layer.named_parameters()
        }


class _Narrow(_Layers):
    """The layers of any kind, untied, as a bf16 or fp8 job computes: with copies of weights."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__(layers, tied=False)

    def forward(self, x: Tensor, keys: RowKeys) -> Tensor:
        first, *others = self.layers
        with torch.autocast(x.device.type, enabled=False):
            x = first(x, keys).bfloat16()
            for each in others:
                copies = {name: weight.bfloat16() for name, weight in each.named_parameters()}
                x = torch.func.functional_call(each, copies, (x, keys))
        return x


class _Foreign(torch.nn.Module):
    """transformers' model, whole; weights under the names of `layers`."""

    def __init__(self, spec: ModelSpec, layers: list[Layer]) -> None:
        super().__init__()
        from support import foreign

        assert spec.dropout == 0.0
        dtype = next(layers[0].parameters()).dtype
        self.whole = foreign.unsplit(spec, layers).to(dtype)
        self._names = foreign.names(spec, layers)
        foreign.freeze_key_biases(self.whole)

    def forward(self, x: Tensor, keys: RowKeys) -> Tensor:
        logits: Tensor = self.whole(x).logits
        return logits

    def weights(self) -> dict[str, Tensor]:
        found = self.whole.state_dict()
        return {ours: found[theirs] for ours, theirs in self._names.items()}


def _build(job: JobSpec, device: torch.device) -> _Layers | _Foreign:
    dtype = torch.float64 if job.training.precision == "fp64" else torch.float32
    layers = [build_layer(job.model, i).to(dtype) for i in range(job.model.layers + 2)]
    for layer in layers:
        initialise_parameters(layer, job.model, job.training.seed)
    if job.training.precision == "fp8":
        emulate(layers[1:-1], job.training.fp8_recipe, torch.bfloat16)
    if job.model.kind == "gpt":
        return _Layers(layers, tied=job.model.tied).to(device)
    if job.training.narrow:
        assert not job.model.tied
        return _Narrow(layers).to(device)
    return _Foreign(job.model, layers).to(device)


def _optimizer(job: JobSpec, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    spec = job.training.optimizer
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    if spec.name == "sgd":
        return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, nesterov=spec.nesterov)
    return torch.optim.AdamW(groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps)


def torch_schedule(job: JobSpec, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """The job's schedule, put together from torch's own."""
    spec, steps = job.training.schedule, job.training.steps
    after: lr_scheduler.LRScheduler
    fall = max(1, steps - spec.warmup)
    match spec.name:
        case "constant":
            after = lr_scheduler.ConstantLR(optimizer, factor=1.0)
        case "linear":
            end = spec.min_lr / job.training.optimizer.lr
            after = lr_scheduler.LinearLR(optimizer, 1.0, end, total_iters=fall)
        case "cosine":
            after = lr_scheduler.CosineAnnealingLR(optimizer, T_max=fall, eta_min=spec.min_lr)
    if not spec.warmup:
        return after
    first = lr_scheduler.LinearLR(optimizer, 1 / (spec.warmup + 1), 1.0, total_iters=spec.warmup)
    return lr_scheduler.SequentialLR(optimizer, [first, after], milestones=[spec.warmup])


def _evaluate(
    job: JobSpec, model: _Layers | _Foreign, data: Dataset, device: torch.device
) -> float:
    """The mean loss over all tokens of the held-out samples, without dropout."""
    assert job.evaluation is not None
    if job.evaluation.data is not None:
        data = Dataset(
            job.evaluation.data, job.model.sequence_length, job.model.vocabulary, held_out=1.0
        )
    samples = min(job.evaluation.samples, data.order.held_out)
    total = 0.0
    for position in range(samples):
        rows = torch.from_numpy(data.held_out_rows([position])).to(device)
        keys = RowKeys(seed=job.training.seed, step=0, positions=(position,), training=False)
        inputs, targets = inputs_and_targets(job.model, rows, keys)
        with torch.no_grad():
            total += loss(model(inputs, keys), targets).item()
    return total / samples


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: several on a busy machine wait for each other at every small operation,
    for minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def train_reference(job: JobSpec, device_name: str = "cpu") -> ReferenceRun:
    device = torch.device(device_name)
    training = job.training
    evaluation = job.evaluation
    held_out = (evaluation.fraction or 0.0) if evaluation else 0.0
    data = Dataset(job.data, job.model.sequence_length, job.model.vocabulary, held_out=held_out)
    model = _build(job, device)
    parameters = list(model.parameters())  # a shared one comes once
    optimizer = _optimizer(job, parameters)
    schedule = torch_schedule(job, optimizer)
    count = training.global_batch // training.microbatch
    records = []
    evaluations = {}
    for step in range(1, training.steps + 1):
        optimizer.zero_grad()
        total = 0.0
        digests = []
        for microbatch in range(count):
            first = microbatch * training.microbatch
            positions = tuple(range(first, first + training.microbatch))
            rows = data.rows(training.seed, step, positions, training.global_batch)
            digests += [row_digest(row) for row in rows]
            keys = RowKeys(seed=training.seed, step=step, positions=positions)
            tokens = torch.from_numpy(rows).to(device)
            inputs, targets = inputs_and_targets(job.model, tokens, keys)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=training.narrow):
                value = loss(model(inputs, keys), targets)
            (value / count).backward()
            total += value.item() / count
        norm = torch.nn.utils.clip_grad_norm_(parameters, training.clip or math.inf)
        assert torch.isfinite(norm), f"step {step}: choose a job whose gradients stay finite"
        optimizer.step()
        schedule.step()
        records.append(
            ReferenceStep(
                step=step,
                loss=total,
                grad_norm=norm.item(),
                samples_digest=samples_digest(digests),
            )
        )
        if evaluation is not None and evaluation.due(step, training.steps):
            evaluations[step] = _evaluate(job, model, data, device)
    weights = {
        name: parameter.detach().cpu().numpy().copy() for name, parameter in model.weights().items()
    }
    return ReferenceRun(steps=records, evaluations=evaluations, weights=weights)


def assert_same_steps(
    metrics: Sequence[Mapping[str, Any]], expected: Sequence[ReferenceStep], precision: str
) -> float:
    """Check that lines of metrics.jsonl have these steps, samples and losses; return the greatest
    relative difference of a loss."""
    assert [(line["step"], line["samples_digest"]) for line in metrics] == [
        (step.step, step.samples_digest) for step in expected
    ]
    off = [abs(line["loss"] / step.loss - 1) for line, step in zip(metrics, expected, strict=True)]
    assert all(each <= LOSS_TOLERANCE[precision] for each in off), off
    return max(off)


def assert_same_weights(
    actual: Mapping[str, NDArray[np.floating]],
    expected: Mapping[str, NDArray[np.floating]],
    *,
    rtol: float,
) -> None:
    """Every tensor differs from the expected one by at most `rtol` of its norm.

    Not element by element: Adam divides by the size of a gradient, so where that is almost zero
    it turns the rounding of a sum into a visible part of the update.
    """
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        difference = np.linalg.norm(actual[name] - value)
        assert difference <= rtol * np.linalg.norm(value), f"{name} is off by {difference:.3g}"
