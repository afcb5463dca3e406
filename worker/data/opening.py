"""The data set of a job: windows of tokens, or what a function of the user's gives."""

from oobleck.planner.job.model import ModelSpec
from oobleck.planner.job.own import OwnModelSpec
from oobleck.planner.job.spec import DataSpec, JobSpec
from oobleck.worker.data.dataset import Dataset
from oobleck.worker.data.own import OwnDataset


def open_dataset(
    job: JobSpec, spec: DataSpec, *, held_out: float = 0.0, key: str = "data"
) -> Dataset | OwnDataset:
    """`held_out`: share of the samples that are not for training; `key`: what the job file calls
    `spec`. Raises DataError, JobError, NodeError."""
    if spec.code is not None:
        wide = job.training.precision == "fp64"
        return OwnDataset(spec.code, wide=wide, held_out=held_out, key=key, processes=spec.workers)
    model = job.model
    assert isinstance(model, ModelSpec | OwnModelSpec), "there are two kinds"
    assert model.sequence_length is not None, "a job with tokens has it"
    return Dataset(spec, model.sequence_length, model.tokens, held_out=held_out, key=key)
