"""The data set of a job: windows of tokens, or what a function of the user's gives."""

from collections.abc import Mapping

import torch

from oobleck.core.job.model import ModelSpec
from oobleck.core.job.own import OwnModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec
from oobleck.worker.data.dataset import Dataset
from oobleck.worker.data.loaders import Loaders
from oobleck.worker.data.objective import inputs_and_targets
from oobleck.worker.data.own import OwnDataset
from oobleck.worker.data.samples import Samples
from oobleck.worker.models.tree import Tree
from oobleck.worker.runtime.random import RowKeys

DATA, EVALUATION = "data", "evaluation.data"


def start_loaders(job: JobSpec) -> dict[str, Loaders]:
    """The processes that read samples, by the key of their data set in the job file. Before
    anything of the user's is called here: what it opens or starts is not theirs."""
    specs = {DATA: job.data, EVALUATION: job.evaluation.data if job.evaluation else None}
    return {
        key: Loaders(spec.code, wide=_is_wide(job), key=key, processes=spec.workers)
        for key, spec in specs.items()
        if spec is not None and spec.code is not None and spec.workers
    }


def open_dataset(
    job: JobSpec,
    spec: DataSpec,
    loaders: Mapping[str, Loaders],
    *,
    held_out: float = 0.0,
    key: str = DATA,
) -> Dataset | OwnDataset:
    """`loaders`: that were started; `held_out`: share of the samples that are not for training;
    `key`: what the job file calls `spec`. Raises DataError, JobError, NodeError."""
    if spec.code is not None:
        wide = _is_wide(job)
        return OwnDataset(
            spec.code, wide=wide, held_out=held_out, key=key, loaders=loaders.get(key)
        )
    model = job.model
    assert isinstance(model, ModelSpec | OwnModelSpec), "there are two kinds"
    assert model.sequence_length is not None, "a job with tokens has it"
    return Dataset(spec, model.sequence_length, model.tokens, held_out=held_out, key=key)


def first_row(job: JobSpec, dataset: Dataset | OwnDataset) -> tuple[Tree, Tree]:
    """Inputs and targets of the first row of training (1, ...). Raises DataError, JobError."""
    keys = RowKeys(seed=job.training.seed, step=1, positions=(0,))
    rows = dataset.rows(keys.seed, keys.step, keys.positions, job.training.global_batch)
    if isinstance(rows, Samples):
        return rows.inputs, rows.targets
    return inputs_and_targets(job.model, torch.from_numpy(rows), keys)


def _is_wide(job: JobSpec) -> bool:
    return job.training.precision == "fp64"
