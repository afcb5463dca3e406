"""The oracle: the same job trained by plain PyTorch in one process, with the unsplit model.

It shares the layers' code, their initial weights and the reading of data with the worker, and
nothing else: no flat state, no stages, no sums over workers, a truly shared tied weight, and
torch's own clipping and scheduling. Call it in a test or, since its arguments and results can be
pickled, in a process of its own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from oobleck.planner.job import JobSpec
from oobleck.worker.data import Dataset, row_digest, samples_digest
from oobleck.worker.models import Layer, build_layer, initialise_parameters, loss
from oobleck.worker.random import RowKeys


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
    #: By `<layer>.<parameter>`, as `oobleck.worker.output.read_output` names them.
    weights: dict[str, NDArray[np.floating]]


def _build(job: JobSpec) -> list[Layer]:
    dtype = torch.float64 if job.training.precision == "fp64" else torch.float32
    layers = [build_layer(job.model, i).to(dtype) for i in range(job.model.layers + 2)]
    for layer in layers:
        initialise_parameters(layer, job.model, job.training.seed)
    if job.model.tied:
        layers[-1].token.weight = layers[0].token.weight
    return layers


def _factor(job: JobSpec, done: int) -> float:
    """The learning rate's share of its base after `done` steps, for LambdaLR."""
    warmup, steps = job.training.schedule.warmup, job.training.steps
    if done < warmup:
        return (done + 1) / (warmup + 1)
    if job.training.schedule.name == "constant" or done >= steps:
        return 1.0
    return (1 + math.cos(math.pi * (done - warmup) / (steps - warmup))) / 2


def train_reference(job: JobSpec) -> ReferenceRun:
    training, spec = job.training, job.training.optimizer
    data = Dataset(job.data, job.model.sequence_length, job.model.vocabulary)
    layers = _build(job)
    parameters = list(torch.nn.ModuleList(layers).parameters())  # a shared one comes once
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": spec.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=spec.lr,
        betas=(spec.beta1, spec.beta2),
        eps=spec.eps,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: _factor(job, done))
    count = training.global_batch // training.microbatch
    records = []
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
            tokens = torch.from_numpy(rows)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=training.precision == "bf16"):
                x = tokens[:, :-1]
                for layer in layers:
                    x = layer(x, keys)
                value = loss(x, tokens[:, 1:])
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
    weights = {
        f"{layer.layer}.{name}": parameter.detach().numpy().copy()
        for layer in layers
        for name, parameter in layer.named_parameters()
    }
    return ReferenceRun(steps=records, weights=weights)


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
