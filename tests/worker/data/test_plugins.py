"""Data sets that are installed with Oobleck, found by their entry points."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from oobleck.planner.job.code import Code, Json
from oobleck.worker.data.own import OwnDataset
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


def test_a_data_set_that_datasets_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"input_ids": [[1, 2, 3], [4, 5, 6]], "labels": [[2, 3, -100], [5, 6, -100]]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
    found = opened("huggingface", path=str(tmp_path / "saved"))
    inputs, targets = found.sample(1)
    assert (inputs.tolist(), targets.tolist()) == ([4, 5, 6], [5, 6, -100])
    with pytest.raises(JobError, match="no column text; it has input_ids, labels"):
        opened("huggingface", path=str(tmp_path / "saved"), inputs="text")
