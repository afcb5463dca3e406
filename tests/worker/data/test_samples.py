"""What a sample may be: what is taken as a DataLoader takes it, and what is said of the rest."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from oobleck.core.job.code import Code, Json
from oobleck.host.token_file import DataError
from oobleck.worker.data.own import Loaders, OwnDataset
from oobleck.worker.data.samples import Samples
from oobleck.worker.describe import check_data
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError
from support import refused_models

#: What is said of the inputs of sample 0, if nothing else is.
REFUSED = {
    "uint16": "inputs is uint16, which layers cannot take; give int32, as x.astype(numpy.int32)",
    "uint32": "inputs is uint32, which layers cannot take; give int64, as x.astype(numpy.int64)",
    "uint64": "inputs['ids'][0] is uint64, which layers cannot take; give int64",
    "float8": "inputs is float8_e4m3fn, which layers cannot take; give x.float()",
    "sparse": "inputs is a sparse_coo tensor; give x.to_dense()",
    "rows": "inputs is a sparse_csr tensor; give x.to_dense()",
    "nested": "inputs is a nested tensor; pad it to one length",
    "elsewhere": "inputs is on meta; give samples in host memory, as x.cpu()",
    "marked": "inputs is Marked, a subclass of torch.Tensor, which another worker would get as a "
    "plain one; give x.as_subclass(torch.Tensor)",
    "wrapped": "inputs is Wrapped, a subclass of torch.Tensor",
    "masked": "inputs is a masked array, and a tensor has no place for its mask; give x.filled",
    "objects": "inputs is an array of object, which no tensor can hold; give numbers, all rows of "
    "one length",
    "dates": "inputs is an array of datetime64[D], which no tensor can hold; give numbers",
    "text": "inputs['label'] is text; give numbers for it, such as its tokens or the number of",
    "texts": "inputs is text; give numbers for it",
    "nothing": "inputs[1] is None; give a number for a missing value, such as 0",
    "named": "inputs is Pair, and not a plain tuple or list; give tuple(x), or a dict",
    "record": "inputs is Record, a dataclass; give a dict, as dataclasses.asdict(x)",
    "mapping": "inputs is UserDict; give a plain dict, as dict(x)",
    "numbered": "inputs has the key 1; use text as keys",
    "huge": "inputs is 1180591620717411303424, which does not fit int64",
    "generator": "inputs is generator; give a tensor, an array or a number, or a tuple, list",
    "empty": "inputs have no tensor; give at least one",
}
UNLIKE = ("ragged", "other_key", "other_type")
GOOD = sorted(refused_models.INPUTS.keys() - REFUSED.keys() - {*UNLIKE})
NO_DATA = {
    "Records": "sample 0 is a dict of pixels, label, and must be (inputs, targets)",
    "Triples": "sample 0 is a tuple of 3, and must be (inputs, targets)",
    "Unlabelled": "sample 0: targets have no tensor; give at least one",
    "loader": "support.refused_models:loader gave DataLoader, which makes batches of its own; "
    "give its data set, as loader.dataset",
    "splits": "support.refused_models:splits gave dict, a mapping of train, test; give one",
    "two_tensors": "support.refused_models:two_tensors gave tuple, whose items are not pairs; give "
    "torch.utils.data.TensorDataset(inputs, targets)",
    "no_data": "support.refused_models:no_data gave NoneType, which is not a map-style data set",
    "Stream": "support.refused_models:Stream gave Stream, an iterable data set; samples are read "
    "by number",
    "DATA": "support.refused_models:DATA is Samples; name a class or function that gives it",
}


@pytest.fixture(autouse=True)
def _allowed() -> Iterator[None]:
    code.allow((code.ANY,))
    yield
    code.allow(())


def source(name: str = "Samples", **arguments: object) -> Code:
    told = Json(json.dumps(arguments))
    return Code(name=f"support.refused_models:{name}", group=None, path=None, arguments=told)


def refusal(name: str = "Samples", **arguments: object) -> str:
    with pytest.raises((JobError, DataError)) as caught:
        OwnDataset(source(name, **arguments), wide=False).rows(0, 1, range(64), 64)
    return str(caught.value)


@pytest.mark.parametrize("of", REFUSED)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_what_is_no_sample_is_refused_with_its_place_and_the_fix(of: str) -> None:
    assert refusal(of=of).startswith(f"data: sample 0: {REFUSED[of]}")


@pytest.mark.parametrize("of", UNLIKE)
def test_a_sample_unlike_the_first_is_refused_by_its_number(of: str) -> None:
    told = refusal(of=of)
    assert told.startswith(f"data: sample {refused_models.ODD} is ")
    assert told.endswith("one length (cut and pad), one type, the same keys in one order")


@pytest.mark.parametrize("name", NO_DATA)
def test_what_is_no_data_set_of_pairs_is_refused(name: str) -> None:
    assert refusal(name).startswith(f"data: {NO_DATA[name]}")


@pytest.mark.parametrize("of", GOOD)
def test_samples_are_as_a_data_loader_stacks_them(of: str) -> None:
    loaders = Loaders(source(of=of), wide=False, key="data", processes=2)
    try:
        alone, forked = (
            OwnDataset(source(of=of), wide=False),
            OwnDataset(source(of=of), wide=False, loaders=loaders),
        )
        assert check_data(alone) == []
        numbers = [int(n) for n in alone.order.of_step(0, 1, range(8), 64)]
        rows = [alone.rows(0, 1, range(8), 64), forked.rows(0, 1, range(8), 64)]
    finally:
        loaders.close()
    expected = _as_loaded(of, numbers)
    for found in rows:
        assert type(found.inputs) is torch.Tensor
        assert not found.inputs.requires_grad
        torch.testing.assert_close(found.inputs, expected, rtol=0, atol=0)
        assert found.targets.tolist() == [n % refused_models.CLASSES for n in numbers]
    assert rows[0].digests == rows[1].digests
    assert len({*rows[0].digests}) == len(numbers), "each sample has its own"


def _as_loaded(of: str, numbers: list[int]) -> torch.Tensor:
    given = [refused_models.INPUTS[of](refused_models.POINTS[n], n) for n in numbers]
    if of == "big_endian":  # a DataLoader takes none; the numbers are meant
        given = [x.astype("f4") for x in given]
    if of == "number":  # nor does it take complex numbers of Python
        return torch.tensor(given)
    if of == "backwards":  # nor negative strides
        given = [x.copy() for x in given]
    found = default_collate(given)
    assert isinstance(found, torch.Tensor)
    return found.detach().resolve_conj().resolve_neg()


def test_samples_of_one_batch_are_told_apart_by_their_numbers_alone() -> None:
    """A view of another order has the digest of its numbers."""
    found: list[Samples] = [
        OwnDataset(source(of=of), wide=False).rows(0, 1, range(4), 64)
        for of in ("plain", "big_endian", "image", "parameter", "with_history")
    ]
    assert {one.digests for one in found} == {found[0].digests}


def test_memory_that_is_used_again_does_not_change_samples_that_were_read() -> None:
    again = OwnDataset(source("Reused"), wide=False).rows(0, 1, range(8), 64)
    plain = OwnDataset(source(of="plain"), wide=False).rows(0, 1, range(8), 64)
    assert torch.equal(again.inputs, plain.inputs)
    assert again.digests == plain.digests


def test_a_split_that_is_drawn_is_the_same_in_every_process() -> None:
    loaders = Loaders(source("drawn_split"), wide=False, key="data", processes=1)
    try:
        states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        found = [OwnDataset(source("drawn_split"), wide=False, loaders=loaders)]
        after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        assert torch.equal(states[0], after[0])
        assert states[1:] == after[1:], "nothing else draws otherwise for it"
        np.random.seed(5)
        random.seed(5)
        torch.manual_seed(5)
        found.append(OwnDataset(source("drawn_split"), wide=False))
        one, other = (dataset.rows(0, 1, range(8), 8).targets.tolist() for dataset in found)
    finally:
        loaders.close()
    assert one == other
    assert len({*one}) == 8
    assert found[0].fingerprint == found[1].fingerprint


def test_an_evaluation_and_the_next_step_do_not_move_one_file_for_each_other(
    tmp_path: Path,
) -> None:
    dataset = OwnDataset(source("OneFile", folder=str(tmp_path)), wide=False, held_out=0.5)
    with ThreadPoolExecutor(1) as ahead:
        following = [ahead.submit(dataset.rows, 0, step, range(8), 8) for step in range(1, 9)]
        held_out = [dataset.held_out_rows(range(first, first + 8)) for first in range(0, 32, 8)]
        read = [future.result() for future in following]
    for step, rows in enumerate(read, 1):
        numbers = dataset.order.of_step(0, step, range(8), 8)
        assert torch.equal(rows.inputs, refused_models.POINTS[[int(n) for n in numbers]])
    for first, rows in zip(range(0, 32, 8), held_out, strict=True):
        numbers = dataset.order.of_held_out(range(first, first + 8))
        assert torch.equal(rows.inputs, refused_models.POINTS[[int(n) for n in numbers]])
