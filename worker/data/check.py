"""Checks that a user's data set returns the same samples in any order, with plausible targets.

`oobleck.worker.data.samples` checks at every read that the sample is valid and like the others.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from oobleck.worker.data.objective import IGNORED
from oobleck.worker.data.own import OwnDataset
from oobleck.worker.data.samples import digest
from oobleck.worker.runtime.errors import JobError, Problem, as_problem

#: Samples to read twice: enough to detect a random choice per sample.
_READ_TWICE = 16


def check_data(
    dataset: OwnDataset, key: str = "data", *, next_tokens: bool = False
) -> list[Problem]:
    """Return problems of the data set.

    `key`: its key in the job file. `next_tokens`: targets are the tokens that follow the inputs.
    Raise DataError.
    """
    size = dataset.order.samples
    count = min(size, _READ_TWICE)
    numbers = sorted({i * (size - 1) // max(1, count - 1) for i in range(count)})
    generator = torch.get_rng_state()
    try:
        samples = [dataset.sample(number) for number in numbers]
        first = dict(zip(numbers, map(digest, samples), strict=True))
        # Backwards, because a sample may depend on the ones read before it.
        changed = [n for n in reversed(numbers) if digest(dataset.sample(n)) != first[n]]
    except JobError as error:
        return [as_problem(error)]
    if not changed and not torch.equal(generator, torch.get_rng_state()):
        sentence = (
            "reading a sample draws from torch's own generator, or seeds it, and layers draw from "
            "it at the same time; draw from torch.Generator().manual_seed(i)"
        )
        return [Problem(where=key, sentence=sentence)]
    if not changed:
        return [Problem(where=key, sentence=_COPIES)] if next_tokens and _copy(samples) else []
    sentence = (
        f"sample {changed[-1]} differs when it is read again; data[i] must depend on i "
        "alone: draw random numbers from torch.Generator().manual_seed(i)"
    )
    return [Problem(where=key, sentence=sentence)]


_COPIES = (
    "targets equal the inputs, so the model would learn to repeat the token that it "
    "is given; targets[t] must be the token after inputs[t]: give plugin huggingface or arrays "
    "`labels: NAME` in place of `targets`, which shifts as transformers does, and in a data set of "
    "your own oobleck.data.shifted(labels)"
)


def _copy(samples: Iterable[tuple[Any, Any]]) -> bool:
    """Return whether every learned target repeats the input at its position.

    The answer is no if each target is also the next token, as in a row of one repeated token.
    """
    unlike = False
    for inputs, targets in samples:
        if not (isinstance(inputs, Tensor) and isinstance(targets, Tensor)):
            return False
        if inputs.shape != targets.shape or inputs.dim() != 1 or inputs.is_floating_point():
            return False
        inputs, targets = inputs.long(), targets.long()
        counted = targets != IGNORED
        if not torch.equal(inputs[counted], targets[counted]):
            return False
        unlike |= not torch.equal(inputs[1:][counted[:-1]], targets[:-1][counted[:-1]])
    return unlike
