"""Steps on a device that is not the host: nothing takes its tensors for the host's, and the host
waits for it and gives to it no more than it has to.

What a GPU refuses at a job's first step fails here, on a machine without one.
"""

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.pool import Pool

import pytest
import torch

from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.spec import JobSpec
from oobleck.worker.models import tree
from oobleck.worker.models.base import drop, keyed
from oobleck.worker.runtime.random import RowKeys
from support import elsewhere, foreign
from support.one_worker import training

STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    losses: tuple[float | None, ...]
    #: In the last step.
    waits: dict[str, int]
    given: int


def train(job: JobSpec) -> Seen:
    """In the device's process."""
    computing = elsewhere.Computing()
    # The device is a mode of torch, which what is kept for all layers is computed outside of.
    tree._disable_current_modes = lambda: computing
    with computing, training(job, torch.device("elsewhere", 0)) as executor:
        losses = [executor.run_step(step)[0].loss for step in range(1, STEPS)]
        computing.waits.clear()
        computing.given = 0
        losses.append(executor.run_step(STEPS)[0].loss)
        return Seen(losses=tuple(losses), waits=dict(computing.waits), given=computing.given)


def on_the_host(job: JobSpec) -> list[float | None]:
    with training(job) as executor:
        return [executor.run_step(step)[0].loss for step in range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def beside() -> Iterator[Pool]:
    """A process that has the device."""
    with multiprocessing.get_context("spawn").Pool(1, elsewhere.register) as pool:
        yield pool


CASES = {
    "fp64": {"precision": "fp64"},
    "bf16": {"precision": "bf16"},
    "tied": {"tied": True},
    "dropout": {"dropout": 0.1, "clip": 0.1},
    "recomputed": {"recompute": "layer", "dropout": 0.1, "precision": "bf16"},
    "sgd": {"optimizer": OptimizerSpec(name="sgd", lr=1e-2, momentum=0.9)},
}


#: "recomputed" has what these have, on more.
SOAKS = ("dropout", "bf16")


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(given, id=name, marks=pytest.mark.soak if name in SOAKS else ())
        for name, given in CASES.items()
    ],
)
def test_a_device_trains_as_the_host_does(beside, make_job, given):
    small = make_job(**{"precision": "fp32", "vocabulary": 256, **given})
    check(beside, small, replace(small, training=replace(small.training, global_batch=12)))


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("gpt2", "fp32"),
        ("llama", "bf16"),
        ("bert", "fp32"),
        pytest.param("gpt2", "bf16", marks=pytest.mark.soak),
        pytest.param("llama", "fp32", marks=pytest.mark.soak),
        pytest.param("bert", "bf16", marks=pytest.mark.soak),
    ],
)
def test_so_do_models_of_transformers(beside, make_job, kind, precision):
    shared = {"num_key_value_heads": 2} if kind == "llama" else {}
    model = foreign.spec(kind, sequence_length=8, dropout=0.1, vocab_size=256, **shared)
    small = replace(make_job(precision=precision), model=model)
    check(beside, small, replace(small, training=replace(small.training, global_batch=12)))


def check(beside: Pool, small: JobSpec, large: JobSpec) -> None:
    """`large`: with more micro-batches."""
    seen, more = beside.map(train, [small, large])
    rounding = {"fp64": 1e-13, "fp32": 1e-5, "bf16": 1e-3}[small.training.precision]
    assert seen.losses == pytest.approx(on_the_host(small), rel=rounding)
    assert more.losses == pytest.approx(on_the_host(large), rel=rounding)
    # For the losses, with their weights, and for the norm, however many micro-batches there are.
    assert seen.waits == more.waits == {"_to_copy": 1, "_local_scalar_dense": 1}
    # Inputs and targets.
    assert seen.given == 2 * small.training.microbatches
    assert more.given == 2 * large.training.microbatches


@pytest.mark.parametrize("mistake", ["mixed", "read", "context"])
def test_what_a_gpu_would_not_bear_is_seen(beside, mistake):
    assert beside.apply(err, (mistake,))


def err(mistake: str) -> bool:
    computing = elsewhere.Computing()
    with computing:
        there = torch.ones(3, device=torch.device("elsewhere", 0), requires_grad=True)
        if mistake == "mixed":
            with pytest.raises(RuntimeError, match="of the host"):
                there + torch.ones(3)
        elif mistake == "read":
            float(there.sum())
            there.detach().cpu()
            return computing.waits == {"_local_scalar_dense": 1, "_to_copy": 1}
        else:  # a thread of its own does not know what is computed
            doubled = there * 2
            found = []

            def hook(gradient: torch.Tensor) -> None:
                try:
                    drop(gradient, 0, "mlp", 0.5)
                except LookupError as error:
                    found.append(error)

            doubled.register_hook(hook)
            with keyed(RowKeys(seed=0, step=1, positions=(0,))):
                doubled.sum().backward()
            return len(found) == 1
    return True
