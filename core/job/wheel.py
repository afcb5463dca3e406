"""User code carried by a job: how the key `code` names a wheel, and where its modules are found.

In a job file the key is a path. In a job that the master has, it is the wheel's hash, by which
nodes request it. A node that has unpacked it trains an ordinary job whose functions are in that
folder. Must not know the contents of a wheel.
"""

import dataclasses
import re
from collections.abc import Collection
from typing import TypeVar

from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.own import OwnModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec

#: Most bytes of a wheel.
MOST_WHEEL_BYTES = 64 << 20
_STORED = re.compile("sha256:([0-9a-f]{64})")

S = TypeVar("S", OwnModelSpec, DataSpec, OptimizerSpec)


def stored_as(digest: str) -> str:
    """Return the `code` of a job whose wheel has that SHA-256 (hex)."""
    return f"sha256:{digest}"


def digest_of(code: str | None) -> str | None:
    """Return the SHA-256 that `code` names; None where it is absent or still a path."""
    found = _STORED.fullmatch(code or "")
    return None if found is None else found[1]


def is_carried(python: str | None, path: str | None, modules: Collection[str]) -> bool:
    """Return whether a function is in a wheel with these top-level modules and packages."""
    return python is not None and path is None and re.split("[.:]", python)[0] in modules


def unpacked_in(job: JobSpec, folder: str, modules: Collection[str]) -> JobSpec:
    """Return the job for a machine that has the wheel's `modules` in `folder`."""

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
