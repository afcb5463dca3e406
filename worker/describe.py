"""Descriptions and checks of a job's model, optimizer and data, for the command line.

This is a process of its own: the command line has no torch, and user code may do anything.

    python -P -m oobleck.host.programs PARENT_PID oobleck.worker.describe \
        [--always] MARKER < JOB.json > FOUND.json

FOUND has the `descriptions` (by `model` and `optimizer`), the `problems`, and whether the model was
`run` for real. A large model is run only with --always. Output of the user's code goes to standard
error. MARKER is the file descriptor of a `Marker`'s page.
"""

import json
import os
import signal
import sys
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from oobleck.core.job.code import Json
from oobleck.core.job.description import Description, LayerSketch, read_description
from oobleck.core.job.file import parse_job
from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.host.ipc.marker import Marker
from oobleck.host.token_file import DataError
from oobleck.worker.data.objective import IGNORED
from oobleck.worker.data.own import OwnDataset
from oobleck.worker.data.samples import digest
from oobleck.worker.models.checks.check import SAMPLES, check
from oobleck.worker.models.checks.describe import describe
from oobleck.worker.models.tree import map_tensors
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError, NodeError, Problem, as_problem
from oobleck.worker.state import describe_optimizer
from oobleck.worker.state.layout import check_no_decay

#: Largest model that is run without --always: parameters of one layer of each kind together.
_LARGE = 1_000_000_000


@dataclass(kw_only=True)
class Found:
    """Findings about a job's model, data and optimizer."""

    descriptions: dict[str, Json] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    run: bool = False


def look_at(job: JobSpec, *, always: bool) -> Found:
    """Check everything about `job` that can be checked on this machine.

    `always`: run the model for real, however large it is.
    """
    found = Found()
    try:
        if isinstance(job.model, OwnModelSpec):
            _look_at(job, job.model, found, always)
        elif job.model.known:
            check_no_decay(job.model, job.training.optimizer.no_decay)
        if job.training.optimizer.code is not None:
            found.descriptions["optimizer"] = describe_optimizer.describe(job.training)
    except (DataError, JobError, NodeError) as error:
        found.problems.append(as_problem(error))
    return found


def _look_at(job: JobSpec, spec: OwnModelSpec, found: Found, always: bool) -> None:
    seed = job.training.seed
    dtype = torch.float64 if job.training.precision == "fp64" else torch.float32
    form = ""
    if job.data.code is None:
        samples = _made_up(spec, most=1)
    else:
        dataset = OwnDataset(job.data.code, wide=dtype == torch.float64)
        found.problems += check_data(dataset, next_tokens=spec.learns_next_tokens)
        rows = dataset.rows(seed, 1, range(SAMPLES), SAMPLES)
        samples = rows.inputs, rows.targets
        form = dataset.form
    inputs, targets = (map_tensors(lambda tensor: tensor[0], side) for side in samples)
    text = found.descriptions["model"] = describe(job, (inputs, targets), found.problems)
    found.problems += _evaluated(job, spec, form)
    found.problems += _not_compiled(read_description(text))
    known = replace(spec, described=text)
    if job.data.code is None:
        samples = _made_up(known, most=known.tokens)
    found.run = always or sum(map(_numbers, known.description.kinds)) <= _LARGE
    if found.run:
        steps = job.training.steps
        found.problems += check(known, samples, seed=seed, dtype=dtype, steps=steps)
    check_no_decay(known, job.training.optimizer.no_decay)


def _evaluated(job: JobSpec, model: OwnModelSpec, form: str) -> list[Problem]:
    """Return problems with the evaluation's own data; none if it has no data of its own.

    `form`: form of the user's training samples; empty if these are not the user's. Raise DataError,
    JobError or NodeError.
    """
    spec, key = job.evaluation.data if job.evaluation else None, "evaluation.data"
    if spec is None or spec.code is None:
        return []
    dataset = OwnDataset(spec.code, wide=job.training.precision == "fp64", key=key)
    problems = check_data(dataset, key, next_tokens=model.learns_next_tokens)
    if form and dataset.form != form:
        sentence = f"its samples are {dataset.form}, and those of data are {form}; make them alike"
        problems.append(Problem(where=key, sentence=sentence))
    return problems


def _not_compiled(description: Description) -> list[Problem]:
    """Return a warning for each kind of layer that cannot be compiled as the job asks."""
    return [
        Problem(
            where=f"layer {description.order.index(number)} ({kind.name})",
            sentence=f"is not compiled: {kind.not_compiled}; it runs as it is",
            warning=True,
        )
        for number, kind in enumerate(description.kinds)
        if kind.not_compiled
    ]


def _numbers(kind: LayerSketch) -> int:
    """Return how many numbers a layer has, trained or constant."""
    return kind.parameters + kind.constant_bytes // 4


def _made_up(spec: OwnModelSpec, *, most: int) -> tuple[Tensor, Tensor]:
    """Return random inputs and targets, with token numbers below `most`, since the user's text may
    not be tokenised yet."""
    assert spec.sequence_length is not None, "the job was checked"
    draws = torch.Generator().manual_seed(0)
    shape = SAMPLES, spec.sequence_length + 1
    tokens = torch.randint(most, shape, generator=draws)
    return tokens[:, :-1], tokens[:, 1:]


# ---- Checks that a user's data set returns the same samples in any order, with plausible
# targets.
#
# `oobleck.worker.data.samples` checks at every read that the sample is valid and like the others.


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


# ---- The process


def main() -> NoReturn:
    result = os.dup(1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    # Ctrl-C must end the process; a KeyboardInterrupt of user code is an error like any other.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code.mark_in(Marker(int(sys.argv[-1])))
    torch.set_num_threads(1)
    code.allow((code.ANY,))  # it is the user's own machine
    found = look_at(parse_job(sys.stdin.read()), always="--always" in sys.argv[1:])
    with os.fdopen(result, "w") as out:
        json.dump(asdict(found), out)
    sys.stdout.flush()
    sys.stderr.flush()
    # Unloading torch piece by piece takes half a second.
    code.end_process(0)
