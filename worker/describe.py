"""Describes the model of a job, as `oobleck submit` needs it: a short process, since the command
line has no torch, and a user's code may do anything.

    python -m oobleck.worker.describe < JOB.json > DESCRIPTION.json

Ends with 2 and one line on standard error where the model or the data are at fault. What the user's
code prints goes to standard error too.
"""

import os
import sys
import warnings

import torch

from oobleck.host.data.token_file import DataError
from oobleck.planner.job.file import parse_job
from oobleck.planner.job.own import OwnModelSpec
from oobleck.planner.job.spec import JobSpec
from oobleck.worker.data.own import OwnDataset
from oobleck.worker.models.describe import describe
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError, NodeError


def described(job: JobSpec) -> str:
    """Raises DataError, JobError, NodeError."""
    spec = job.model
    assert isinstance(spec, OwnModelSpec), "the others are known by their kind"
    wide = job.training.precision == "fp64"
    source = job.data.code
    if source is None:
        assert spec.sequence_length is not None, "the job was checked"
        tokens = torch.zeros(spec.sequence_length, dtype=torch.int64)
        sample = tokens, tokens
    else:
        sample = OwnDataset(source, wide=wide).sample(0)
    dtype = torch.float64 if wide else torch.float32
    return describe(spec, sample, seed=job.training.seed, dtype=dtype)


def main() -> int:
    result = os.dup(1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    code.allow((code.ANY,))  # it is the user's own machine
    try:
        text = described(parse_job(sys.stdin.read()))
    except (DataError, JobError, NodeError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    with os.fdopen(result, "w") as out:
        out.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
