"""Whether a data set of the user's gives the same samples whoever asks, and in whichever order.

What a sample may be, and that all are alike, `oobleck.worker.data.samples` checks at every read.
"""

import torch

from oobleck.worker.data.own import OwnDataset
from oobleck.worker.data.samples import digest
from oobleck.worker.runtime.errors import JobError
from oobleck.worker.runtime.problem import Problem, as_problem

#: Samples that are read twice: a flip of a coin for each must show.
_READ_TWICE = 16


def check_data(dataset: OwnDataset, key: str = "data") -> list[Problem]:
    """What is wrong with it; `key`: of the job file. Raises DataError."""
    size = dataset.order.samples
    count = min(size, _READ_TWICE)
    numbers = sorted({i * (size - 1) // max(1, count - 1) for i in range(count)})
    generator = torch.get_rng_state()
    try:
        first = {number: digest(dataset.sample(number)) for number in numbers}
        # Backwards: samples may depend on those before.
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
        return []
    sentence = (
        f"sample {changed[-1]} is another one when it is read again; data[i] must depend on i "
        "alone: draw what is random from torch.Generator().manual_seed(i)"
    )
    return [Problem(where=key, sentence=sentence)]
