"""Code that goes with a job: what lies in it once it is unpacked."""

from dataclasses import replace

from oobleck.core.job.file import format_job, parse_job
from oobleck.core.job.own import OwnModelSpec
from oobleck.core.job.wheel import digest_of, stored_as, unpacked_in

JOB = """\
name: demo
model: {python: "mine.models:tagger"}
data: {python: "mine.data:Words"}
evaluation: {every: 5, data: {python: "others:Held"}}
training: {steps: 1, global_batch: 4, optimizer: {python: "torch.optim:Adam"}}
code: dist/mine-1.0-py3-none-any.whl
"""


def test_a_wheels_functions_lie_in_its_folder_and_others_where_they_did() -> None:
    job = parse_job(JOB)
    assert job.code == "dist/mine-1.0-py3-none-any.whl"
    here = unpacked_in(job, "/cache/x", {"mine", "more"})
    assert isinstance(here.model, OwnModelSpec)
    assert (here.code, here.model.path, here.data.path) == (None, "/cache/x", "/cache/x")
    assert here.evaluation is not None
    assert here.evaluation.data is not None
    assert (here.evaluation.data.path, here.training.optimizer.path) == (None, None)


def test_a_path_that_the_job_names_goes_before() -> None:
    job = parse_job(JOB)
    job = replace(job, data=replace(job.data, path="/srv/mine"))
    assert unpacked_in(job, "/cache/x", {"mine"}).data.path == "/srv/mine"


def test_a_job_that_is_sent_names_the_wheel_by_its_hash() -> None:
    job = replace(parse_job(JOB), code=stored_as("ab" * 32))
    assert digest_of(parse_job(format_job(job)).code) == "ab" * 32
    for other in (None, "", "dist/mine.whl", "sha256:ab", stored_as("AB" * 32), "sha256:../" * 7):
        assert digest_of(other) is None
