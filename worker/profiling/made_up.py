"""Made-up data to measure a model with, of the shapes and types that training has."""

import torch
from torch import Tensor

from oobleck.core.job.description import TensorSketch, TreeSketch
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.own import OwnModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.worker.models.tree import Tree, unflatten


def samples(job: JobSpec, rows: int, source: torch.Generator) -> tuple[Tree, Tree]:
    """Return inputs and targets as the job's data has them."""
    model = job.model
    if not isinstance(model, OwnModelSpec):
        assert isinstance(model, ModelSpec), "there are two kinds"
        shape = (rows, model.sequence_length)
        tokens = torch.randint(model.vocabulary, shape, generator=source)
        return tokens, tokens

    def made(sketch: TreeSketch) -> Tree:
        return unflatten(sketch.structure, [values(one, rows, source) for one in sketch.tensors])

    return made(model.description.inputs), made(model.description.targets)


def values(sketch: TensorSketch, rows: int, source: torch.Generator) -> Tensor:
    """Return numbers from 0 to 1, which may be shares or have a logarithm, but zeros of types
    without fractions: these may be indices of anything."""
    shape, dtype = (rows, *sketch.shape), getattr(torch, sketch.dtype)
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    return torch.rand(shape, generator=source).to(dtype)
