"""Models that a job file names by path: their files are read and looked at before it is sent."""

import json
from pathlib import Path

import pytest

from oobleck.cli.jobs.checks import check_weights
from oobleck.cli.jobs.job_file import read_job
from oobleck.core.job.file import format_job, parse_job
from oobleck.host.command import CommandFailed

JOB = """\
name: demo
data: {text: [a]}
training: {steps: 1, global_batch: 4}
model: {MODEL, sequence_length: 9}
"""


def write(folder: Path, model: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(JOB.replace("MODEL", model))
    return path


def test_paths_are_relative_to_the_job_file_and_its_config_travels_with_the_job(
    tmp_path: Path,
) -> None:
    (tmp_path / "saved").mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64}
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    for model, weights in (
        ("config: saved/config.json", None),
        ("weights: saved", str(tmp_path / "saved")),
        ("weights: saved, kind: llama", str(tmp_path / "saved")),
    ):
        job = read_job(write(tmp_path, model), ())
        assert (job.model.kind, job.model.layers, job.model.weights) == ("llama", 3, weights)
        assert parse_job(format_job(job)) == job, "needs no file any more"


def test_all_paths_of_a_job_may_begin_with_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    data = "{text: [~/a/*.txt], tokenizer: ~/t.json, cache: ~/cache}"
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: demo\nmodel: {layers: 2, hidden: 8, heads: 1, sequence_length: 8}\n"
        f"data: {data}\nevaluation: {{every: 1, data: {{tokens: ~/b.bin}}}}\noutput: ~/out\n"
        "checkpoint: {path: ~/saved}\nprofile: p.json\ntraining: {steps: 1, global_batch: 4}\n"
    )
    job = read_job(path, ())
    assert job.data.text == ("/home/me/a/*.txt",)
    assert (job.data.tokenizer, job.data.cache) == ("/home/me/t.json", "/home/me/cache")
    assert job.evaluation is not None
    assert job.evaluation.data is not None
    assert job.evaluation.data.tokens == "/home/me/b.bin"
    assert job.checkpoint is not None
    assert (job.output, job.checkpoint.path) == ("/home/me/out", "/home/me/saved")
    assert job.profile == str(tmp_path / "p.json")
    assert read_job(path, ["profile=estimate"]).profile == "estimate"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("config: none.json", r"model: .*none\.json: No such file or directory; give the config"),
        ("weights: none", r"model: .*none/config\.json: No such file or directory; give the conf"),
        ("config: job.yaml", r"job\.yaml:4: model\.config: job\.yaml is not valid JSON"),
    ],
)
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, model: str, message: str) -> None:
    with pytest.raises(CommandFailed, match=message):
        read_job(write(tmp_path, model), ())


def test_weights_are_looked_at(tmp_path: Path) -> None:
    job = read_job(write(tmp_path, "weights: saved, preset: gpt2"), ())
    with pytest.raises(CommandFailed, match=r"^model\.weights: .*saved does not exist; give the"):
        check_weights(job)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CommandFailed, match=r"only pickled weights \(\.bin\)"):
        check_weights(job)
