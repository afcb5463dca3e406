"""The job that faults strike, and its losses without any."""

import json
from pathlib import Path

import pytest

from bench.support.drill import Drill
from oobleck.core.job.file import parse_job
from support.folders import TEXT
from support.reference import train_reference

JOB_NAME = "struck"
#: Relative difference that another order of sums explains, in fp64 and over thousands of steps; a
#: sample that is lost or comes twice makes one of a thousandth.
TOLERANCE = 1e-9


def job(
    name: str = JOB_NAME, *, steps: int = 1_000_000, checkpoints: Path | None = None
) -> dict[str, object]:
    """Small steps of a model that two nodes share."""
    spec: dict[str, object] = {
        "name": name,
        "model": {"layers": 2, "hidden": 16, "heads": 2, "sequence_length": 16},
        "data": {"text": [TEXT]},
        "training": {
            "steps": steps,
            "global_batch": 6,
            "microbatch": 2,
            "seed": 7,
            "precision": "fp64",
            # Over thousands of steps it makes less of rounding errors than Adam does.
            "optimizer": {"name": "sgd", "lr": 0.05},
            "schedule": {"name": "constant", "warmup": 0},
        },
        "fault_tolerance": 1,
        "resources": {"min_nodes_per_pipeline": 2},
        "profile": "estimate",
    }
    if checkpoints is not None:
        spec["checkpoint"] = {"path": str(checkpoints), "every": 100, "at_end": False}
    return spec


def assert_equal_to_reference(drill: Drill) -> None:
    """All steps so far have the samples and losses of one process that nothing happened to."""
    steps = drill.steps()
    expected = train_reference(parse_job(json.dumps(job(steps=len(steps))))).steps
    assert [s["samples_digest"] for s in steps] == [s.samples_digest for s in expected]
    assert [s["loss"] for s in steps] == pytest.approx(
        [s.loss for s in expected], rel=TOLERANCE, abs=0
    )
