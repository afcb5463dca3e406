"""Data sets that are installed with Oobleck, found by their entry points."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from oobleck.core.job.code import Code, Json
from oobleck.worker.data.own import OwnDataset
from oobleck.worker.describe import check_data
from oobleck.worker.runtime.errors import JobError, NodeError

IMAGES = np.arange(5 * 2 * 3, dtype=np.float32).reshape(5, 2, 3)
LABELS = np.array([3, 1, 4, 1, 5], dtype=np.int64)


def opened(plugin: str, **arguments: object) -> OwnDataset:
    told = Json(json.dumps(arguments))
    source = Code(name=plugin, group="oobleck.data", path=None, arguments=told)
    return OwnDataset(source, wide=False)


def write(folder: Path, kind: str) -> None:
    if kind == "npy":
        np.save(folder / "inputs.npy", IMAGES)
        np.save(folder / "targets.npy", LABELS)
    else:
        save_file({"inputs": IMAGES, "targets": LABELS}, folder / "rows.safetensors")


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_rows_of_arrays(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    found = opened("arrays", path=str(tmp_path))
    assert found.order.samples == 5
    inputs, target = found.sample(3)
    assert torch.equal(inputs, torch.from_numpy(IMAGES[3]))
    assert (target.item(), target.dtype) == (1, torch.int64)
    by_name, _ = opened("arrays", path=str(tmp_path), inputs=["inputs", "targets"]).sample(0)
    assert list(by_name) == ["inputs", "targets"]


def test_both_kinds_of_file_have_the_same_samples(tmp_path: Path) -> None:
    digests = []
    for kind in ("npy", "safetensors"):
        folder = tmp_path / kind
        folder.mkdir()
        write(folder, kind)
        digests.append(opened("arrays", path=str(folder)).rows(0, 1, range(5), 5).digests)
    assert digests[0] == digests[1]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path, "npy")
    with pytest.raises(NodeError, match=r"no label\.npy .* it has inputs\.npy, targets\.npy"):
        opened("arrays", path=str(tmp_path), targets="label")
    np.save(tmp_path / "targets.npy", LABELS[:4])
    with pytest.raises(JobError, match="unequal length"):
        opened("arrays", path=str(tmp_path))
    with pytest.raises(NodeError, match=r"no entry point array .*it has arrays, huggingface"):
        opened("array", path=str(tmp_path))


ROW = [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("targets", "copies"),
    [
        ([[4, 5, 6, 7]], True),
        ([[-100, -100, 6, 7]], True),  # what is asked is not learned
        ([[-100, -100, -100, -100]], False),
        ([[5, 6, 7, -100]], False),
        ([[4, 5, 6, 7], [5, 6, 7, -100]], False),
        ([[5, 5, 5, 5]], False),  # is no copy of ROW
    ],
)
def test_targets_that_are_the_inputs_at_all_places(
    tmp_path: Path, targets: list[list[int]], copies: bool
) -> None:
    np.save(tmp_path / "inputs.npy", np.array([ROW] * len(targets)))
    np.save(tmp_path / "targets.npy", np.array(targets))
    found = opened("arrays", path=str(tmp_path))
    assert check_data(found) == [], "a model of the user's may learn what it likes"
    problems = check_data(found, next_tokens=True)
    assert ["targets equal the inputs" in str(problem) for problem in problems] == [True] * copies


@pytest.mark.parametrize("inputs", [[[3, 3, 3]], [[1, 2, 3]]])
def test_rows_of_one_token_and_numbers_are_no_copies(
    tmp_path: Path, inputs: list[list[int]]
) -> None:
    """Where each next token is the same one, or targets are of another shape."""
    targets = inputs if inputs[0][0] == inputs[0][1] else [1]
    np.save(tmp_path / "inputs.npy", np.array(inputs))
    np.save(tmp_path / "targets.npy", np.array(targets))
    assert check_data(opened("arrays", path=str(tmp_path)), next_tokens=True) == []


def test_labels_are_shifted_as_the_models_of_transformers_shift_them(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([ROW, ROW], dtype=np.int32))
    np.save(tmp_path / "marks.npy", np.array([ROW, [-100, -100, 6, 7]], dtype=np.int32))
    found = opened("arrays", path=str(tmp_path), inputs="ids", labels="marks")
    targets = [found.sample(number)[1] for number in range(2)]
    assert [one.tolist() for one in targets] == [[5, 6, 7, -100], [-100, 6, 7, -100]]
    assert {one.dtype for one in targets} == {torch.int64}
    assert check_data(found, next_tokens=True) == []
    with pytest.raises(JobError, match="targets and labels are both given"):
        opened("arrays", path=str(tmp_path), inputs="ids", targets="marks", labels="marks")
    write(tmp_path, "npy")
    with pytest.raises(
        JobError, match=r"labels of a row are int64 \[\], and must be whole numbers"
    ):
        opened("arrays", path=str(tmp_path), labels="targets")


def test_a_data_set_that_datasets_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"input_ids": [[1, 2, 3], [4, 5, 6]], "labels": [[2, 3, -100], [5, 6, -100]]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
    found = opened("huggingface", path=str(tmp_path / "saved"))
    inputs, targets = found.sample(1)
    assert (inputs.tolist(), targets.tolist()) == ([4, 5, 6], [5, 6, -100])
    with pytest.raises(JobError, match="no column text; it has input_ids, labels"):
        opened("huggingface", path=str(tmp_path / "saved"), inputs="text")
    labelled = opened("huggingface", path=str(tmp_path / "saved"), labels="input_ids")
    assert labelled.sample(1)[1].tolist() == [5, 6, -100]
