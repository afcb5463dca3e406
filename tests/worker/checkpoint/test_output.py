"""Final weights: complete or not there, and readable without this package."""

import json
import os

import numpy as np
import pytest
import torch
from safetensors import safe_open

from oobleck.core.checkpoint import layer_file
from oobleck.worker.checkpoint.output import check_writable, write_layers, write_manifest
from oobleck.worker.runtime.errors import JobError
from oobleck.worker.state.model_state import ModelState, StateError
from support.outputs import read_manifest, read_output

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_layers_of_several_workers_are_one_output(make_job, tmp_path, precision):
    job = make_job(precision=precision)
    expected = {}
    for layers in ((0, 1), (2, 3, 4)):
        state = ModelState(job, CPU)
        for layer in layers:
            state.initialise(layer)
            named = state.module(layer).named_parameters()
            expected.update({f"{layer}.{name}": p.detach().numpy() for name, p in named})
        write_layers(tmp_path / "out", state, layers)
    write_manifest(tmp_path / "out", job, "small-1", 6)
    weights = read_output(tmp_path / "out")
    assert weights.keys() == expected.keys()
    assert "2.qkv.weight" in weights
    for name, value in expected.items():
        assert weights[name].dtype == value.dtype
        np.testing.assert_array_equal(weights[name], value)
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.job, manifest.step, manifest.model) == ("small-1", 6, job.model)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *(layer_file(layer) for layer in range(5)),
        "manifest.json",
    ], "no temporary file is left"


def test_files_are_plain_safetensors_and_json(make_job, tmp_path):
    job = make_job()
    state = ModelState(job, CPU)
    state.initialise(1)
    state.skip(1)
    write_layers(tmp_path, state, [1])
    write_manifest(tmp_path, job, "small-1", 1)
    with safe_open(tmp_path / "layer-00001.safetensors", framework="pt") as file:
        assert file.metadata() == {"layer": "1", "step": "1"}
        assert torch.equal(file.get_tensor("mlp_in.weight"), state.module(1).mlp_in.weight)
    assert json.loads((tmp_path / "manifest.json").read_text())["model"]["hidden"] == 16


def test_writing_again_replaces(make_job, tmp_path):
    job = make_job()
    state = ModelState(job, CPU)
    state.initialise(1)
    write_layers(tmp_path, state, [1])
    with torch.no_grad():
        state.module(1).mlp_in.weight.fill_(3.0)
    write_layers(tmp_path, state, [1])
    with safe_open(tmp_path / layer_file(1), framework="np") as file:
        assert (file.get_tensor("mlp_in.weight") == 3.0).all()


def test_a_layer_that_is_not_whole_is_not_written(make_job, tmp_path):
    state = ModelState(make_job(), CPU)
    state.allocate(1, version=6)
    with pytest.raises(StateError):
        write_layers(tmp_path, state, [1])
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_takes_no_files_is_refused_before_the_training(tmp_path):
    check_writable(tmp_path / "new" / "out")
    assert list((tmp_path / "new" / "out").iterdir()) == []
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(JobError, match=r"^output: cannot write to \S+file.*name another"):
        check_writable(tmp_path / "file")
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(JobError, match="link is a link to gone, which does not exist"):
        check_writable(tmp_path / "link")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_clear_line_and_leaves_no_temporary(make_job, tmp_path):
    temporary = tmp_path / f".{layer_file(1)}.{os.getpid()}"
    temporary.symlink_to("/dev/full")
    state = ModelState(make_job(), CPU)
    state.initialise(1)
    with pytest.raises(JobError, match=r"cannot write to .*No space left on device; make room"):
        write_layers(tmp_path, state, [1])
    assert list(tmp_path.iterdir()) == []
