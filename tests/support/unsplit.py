"""A small job in fp64, and whether workers have trained it as one process does."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from oobleck.core.job.model import ModelSpec
from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from support.director import Director
from support.folders import TEXT
from support.outputs import read_output
from support.reference import ReferenceRun, assert_same_weights, train_reference

STEPS = 4


def make_job(
    output: Path, *, tied: bool = True, model: ModelSpec | None = None, **training: Any
) -> JobSpec:
    """Of our own GPT, or of `model`."""
    gpt = ModelSpec(layers=4, hidden=32, heads=2, sequence_length=16, dropout=0.1, tied=tied)
    return JobSpec(
        name="schedules",
        model=model or gpt,
        data=DataSpec(text=(TEXT,)),
        training=TrainingSpec(
            **{
                "steps": STEPS,
                "global_batch": 10,
                "microbatch": 1,
                "precision": "fp64",
                "optimizer": OptimizerSpec(lr=1e-2),
                **training,
            }
        ),
        output=str(output),
    )


@functools.cache
def reference(job: JobSpec) -> ReferenceRun:
    return train_reference(job)


def check(cluster: Director, job: JobSpec, *, rtol: float = 1e-12) -> None:
    """Each step once, of the same samples. Losses are equal to within `rtol`, and final weights to
    within ten times that."""
    expected = reference(dataclasses.replace(job, output=None))
    losses = cluster.losses()
    assert list(losses) == [step.step for step in expected.steps]
    wanted = [step.loss for step in expected.steps]
    assert list(losses.values()) == pytest.approx(wanted, rel=rtol), f"{losses}, not {wanted}"
    digests = [cluster.records[step][0].samples_digest for step in losses]
    assert digests == [step.samples_digest for step in expected.steps]
    assert_same_weights(read_output(job.output), expected.weights, rtol=10 * rtol)
