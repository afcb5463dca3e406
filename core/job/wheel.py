"""Code that goes with a job: how its key `code` names a wheel, and where its modules are found.

In a job file the key is a path. In a job that the master has, it is the wheel's hash, by which
nodes get it. A node that has unpacked it trains an ordinary job: one whose functions lie in that
folder. Must not know what is in a wheel.
"""

import dataclasses
import re
from collections.abc import Collection
from typing import TypeVar

from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.own import OwnModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec

#: Bytes of a wheel at most.
MOST_WHEEL_BYTES = 64 << 20
_STORED = re.compile("sha256:([0-9a-f]{64})")

S = TypeVar("S", OwnModelSpec, DataSpec, OptimizerSpec)


def stored_as(digest: str) -> str:
    """`code` of a job whose wheel has that SHA-256 (hex)."""
    return f"sha256:{digest}"


def digest_of(code: str | None) -> str | None:
    """The SHA-256 that `code` names; None: there is no code, or it is a path still."""
    found = _STORED.fullmatch(code or "")
    return None if found is None else found[1]


def is_carried(python: str | None, path: str | None, modules: Collection[str]) -> bool:
    """Return whether a function is of a wheel with these modules and packages at its top."""
    return python is not None and path is None and re.split("[.:]", python)[0] in modules


def unpacked_in(job: JobSpec, folder: str, modules: Collection[str]) -> JobSpec:
    """The job of a machine that has the wheel's `modules` in `folder`."""

    def placed(spec: S) -> S:
        if not is_carried(spec.python, spec.path, modules):
            return spec
        return dataclasses.replace(spec, path=folder)

    model, evaluation, training = job.model, job.evaluation, job.training
    if evaluation is not None and evaluation.data is not None:
        evaluation = dataclasses.replace(evaluation, data=placed(evaluation.data))
    return dataclasses.replace(
        job,
        code=None,
        model=placed(model) if isinstance(model, OwnModelSpec) else model,
        data=placed(job.data),
        evaluation=evaluation,
        training=dataclasses.replace(training, optimizer=placed(training.optimizer)),
    )
