"""The secrets of URLs are shown nowhere: not in messages, logs, manifests or answers."""

import logging
import secrets
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from oobleck.cli.jobs.checks import check_checkpoints
from oobleck.cli.jobs.job_file import read_job
from oobleck.cli.main import oobleck
from oobleck.core.checkpoint import why_not_begin
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import CheckpointSpec, DataSpec, JobSpec, TrainingSpec
from oobleck.core.redact import redact
from oobleck.host import command
from oobleck.host.display import inline
from oobleck.host.log import FieldFormatter
from oobleck.host.storage.checkpoints import list_checkpoints
from oobleck.host.storage.folder import open_folder


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://KEY:hunter2@store/path", "s3://***@store/path"),
        ("s3://hunter2@store/path", "s3://***@store/path"),
        ("s3://k:hunt/hunter2@store/path", "s3://***@store/path"),
        ("s3://k:hunt@hunter2@store/path", "s3://***@store/path"),
        ("a s3://k:hunter2@x and gs://k:hunter2@y", "a s3://***@x and gs://***@y"),
        ("--set checkpoint.path='s3://k:hunter2@x'", "--set checkpoint.path='s3://***@x'"),
        ("https://x/p?token=hunter2&v=1", "https://x/p?token=***&v=1"),
        ("https://x/p?v=1&X-Amz-Signature=hunter2", "https://x/p?v=1&X-Amz-Signature=***"),
        ("az://x?sig=hunter2;secret_key=hunter2", "az://x?sig=***;secret_key=***"),
        ("https://x/p?PASSWORD=hunter2", "https://x/p?PASSWORD=***"),
        ("https://x/p#token=hunter2", "https://x/p#token=***"),
        ("https://x/p?pwd=hunter2&w=2", "https://x/p?pwd=***&w=2"),
        ("https://x/p?auth=hunter2", "https://x/p?auth=***"),
        ("https://x/p?x-auth=hunter2", "https://x/p?x-auth=***"),
        ("https://x/p?userPass=hunter2", "https://x/p?userPass=***"),
        ("https://x/p?jwt=hunter2", "https://x/p?jwt=***"),
        ("https://x/p?state=1&code=hunter2", "https://x/p?state=1&code=***"),
        ("https://x/p?auth_code=hunter2", "https://x/p?auth_code=***"),
        ("https://x/p?sas=hunter2&sig=hunter2", "https://x/p?sas=***&sig=***"),
        ("https://x/p?access_id=hunter2", "https://x/p?access_id=***"),
        ("https://x/p?GoogleAccessId=hunter2", "https://x/p?GoogleAccessId=***"),
        ("https://x/p?to%6Ben=hunter2", "https://x/p?to%6Ben=***"),
        ("https://hooks.slack.com/services/T1/B1/hunter2", "https://hooks.slack.com/***"),
        ("'https://hooks.zapier.com/hooks/catch/1/hunter2/'", "'https://hooks.zapier.com/***'"),
        (
            "https://discord.com/api/webhooks/1/hunter2?v=1",
            "https://discord.com/api/webhooks/***?v=1",
        ),
        ("https://x.webhook.office.com/webhookb2/hunter2", "https://x.webhook.office.com/***"),
        ("https://chat.example/hook/hunter2", "https://chat.example/hook/***"),
        ("https://api.telegram.org/bot1:hunter2/send", "https://api.telegram.org/bot***"),
        ("'s3://k:my hunter2@store/path' is torn", "'s3://***@store/path' is torn"),
        ("abfs://k:hunter2@store/path", "abfs://***@store/path"),
        ("get https://x/p?token='hunter2'", "get https://x/p?token='***'"),
        ("401: Authorization: Bearer hunter2.abc-_", "401: Authorization: Bearer ***"),
        (f"refused: hf_{17 * 'a'}hunter2", "refused: ***"),
        (f"ghp_{17 * 'a'}hunter2 github_pat_1_{17 * 'a'}hunter2", "*** ***"),
        ("AccountName=a;AccountKey=hunter2aaa==;B=c", "AccountName=a;AccountKey=***;B=c"),
        ("AWS_SECRET_ACCESS_KEY=hunter2/aaa+a python", "AWS_SECRET_ACCESS_KEY=*** python"),
        ("S3(secret_access_key='hunter2/aaa+a')", "S3(secret_access_key='***')"),
        ("aws_secret_access_key = hunter2/aaa+a", "aws_secret_access_key = ***"),
        ('{"SecretAccessKey": "hunter2/aaa+a", "n": 1}', '{"SecretAccessKey": "***", "n": 1}'),
        ("AWS_SESSION_TOKEN=hunter2/aaa+a== x", "AWS_SESSION_TOKEN=*** x"),
        ("https://x/p?sessionid=hunter2&session=2", "https://x/p?sessionid=***&session=2"),
        ("https://x/p?ticket=hunter2&otp=hunter2", "https://x/p?ticket=***&otp=***"),
        ("myhdfs://hunter2@store/path", "myhdfs://***@store/path"),
    ],
)
def test_secrets_are_hidden(url: str, shown: str) -> None:
    assert redact(url) == inline(url) == shown
    record = logging.makeLogRecord({"msg": "saved", "name": "x", "levelname": "I", "path": url})
    assert "hunter2" not in FieldFormatter().format(record)


@pytest.mark.parametrize(
    "text",
    [
        "s3://store/path@2",
        "s3://store:9000/path",
        "http://x/p?v=1&w=2",
        "a@b: c",
        "/a:b@c",
        "abfs://container@account.dfs.core.windows.net/path",
        "abfss://container@account/path",
        "wasbs://container@account/path",
        "filecache::hdfs://user@nn:9000/path",
        "http://x:9000 is asked by a@b",
        "https://x/p?author=a&encode=b&codec=c&country_code=de&passes=3&compass=n&mode=r",
        "https://x/p?side=a&tickets=3&potp=1&session=2",
        "https://x/p?status_code=200&bypass=1&unicode=1&accessed=2",
        "https://x/p?max_tokens=3&tokenizer=bpe&design=a&assign=b",
        "s3://store/hooks/train.bin",
        "hf_transfer_is_not_installed_here and ghp_short, the bearer of it",
        "file:///data/hooks/corpus.bin",
        "https://x/git-hooks/pre-commit",
        "https://x/robots/bot1/weights",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "part",
    ["://", "?key", "://a:", "?key=", "://@", "://hooks./", "/hooks", "/webhook/", "hf_", "xoxb-"],
)
def test_hostile_texts_are_looked_at_in_a_moment(part: str) -> None:
    redact("://" + part * 100_000 + "@")


def job(path: str) -> JobSpec:
    return JobSpec(
        name="demo",
        model=ModelSpec(layers=1, hidden=4, heads=1, sequence_length=4),
        data=DataSpec(text=("a",)),
        training=TrainingSpec(steps=3, global_batch=2),
        checkpoint=CheckpointSpec(path=path, resume="require"),
    )


def test_a_place_is_reached_and_its_secret_is_not_told() -> None:
    url = f"memory://KEY:hunter2@{secrets.token_hex(4)}/saved"
    folder = open_folder(url)
    name = "step-000000003-0123abcd"
    folder.write(f"{name}/manifest.json", [b"{}"])
    assert folder.url.startswith("memory://***@")
    assert "hunter2" not in folder.below(name).url
    assert list(list_checkpoints(open_folder(url)).damaged) == [name], "the place itself is reached"
    spec = job(url).checkpoint
    assert spec is not None
    refusal = why_not_begin(job(url), spec, None, damaged=(), data=None)
    assert "memory://***@" in refusal
    for verb in ("list", "verify"):
        assert "hunter2" not in CliRunner().invoke(oobleck, ["checkpoint", verb, url]).output


@pytest.mark.parametrize("url", ["nonsense://KEY:hunter2@x/y", "memory://KEY:hunter2@x/y"])
def test_a_refused_submission(tmp_path: Path, capfd: pytest.CaptureFixture[str], url: str) -> None:
    (tmp_path / "a.txt").write_text("text " * 100)
    (tmp_path / "job.yaml").write_text(
        "name: demo\nmodel: {layers: 1, hidden: 4, heads: 1, sequence_length: 4}\n"
        f"data: {{text: [a.txt]}}\ntraining: {{steps: 3, global_batch: 2}}\n"
        f"checkpoint: {{path: '{url}', resume: require}}\n"
    )

    @click.command()
    def check() -> None:
        check_checkpoints(read_job(tmp_path / "job.yaml", ()))

    assert command.run(check, "oobleck", []) == 2
    wrong = ["--set", f"checkpoint.every={url}"]
    assert command.run(oobleck, "oobleck", ["submit", str(tmp_path / "job.yaml"), *wrong]) == 2
    told = capfd.readouterr()
    assert "://***@x" in told.err
    assert "hunter2" not in told.out + told.err
