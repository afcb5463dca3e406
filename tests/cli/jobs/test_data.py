"""`oobleck data`, and what commands say of data on this machine that does not fit."""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.commands import refused, run
from support.tokenizers import train_tokenizer
from support.waiting import PATIENCE_S, until

JOB = """\
name: demo
model: {{kind: gpt, layers: 2, hidden: 8, heads: 2, sequence_length: 8, vocabulary: {vocabulary}}}
data: {data}
training: {{steps: 20, global_batch: 4}}
"""
#: Bytes of the longest file.
TEXT_LIMIT = 10_000
TEXT = "To be, or not to be, that is the question. " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text and a tokenizer of 300 tokens."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.txt").write_text(TEXT)
    train_tokenizer(folder / "t.json", [TEXT * 3, "".join(map(chr, range(32, 500)))])
    return folder


def test_prepare_and_inspect(folder):
    out = folder / "out.bin"
    made = run(
        "data", "prepare", f"{folder}/*.txt", "-o", str(out), "--tokenizer", f"{folder}/t.json"
    )
    assert (made.returncode, made.stderr) == (0, "")
    ids = np.fromfile(out, dtype="<u2")
    assert f"{out}: {len(ids):,} uint16 tokens of 1 document, " in made.stdout
    shown = run("data", "inspect", str(out))
    assert f"begins      {' '.join(map(str, ids[:16]))}\n" in shown.stdout
    assert "tokenizer   t.json (SHA-256 " in shown.stdout
    info = json.loads(run("data", "inspect", str(out), "--json").stdout)
    assert (info["tokens"], info["documents"], info["dtype"]) == (len(ids), 1, "uint16")
    assert info["separator"] == [ids[-1]]

    again = refused(run("data", "prepare", f"{folder}/a.txt", "-o", str(out)), 2)
    assert "--force to replace it" in again
    assert np.array_equal(np.fromfile(out, dtype="<u2"), ids)
    wrong = run(
        *("data", "prepare", f"{folder}/a.txt", "-o", f"{folder}/x", "--dtype", "uint8"),
        *("--tokenizer", f"{folder}/t.json"),
    )
    assert "leave it out, or choose uint16" in refused(wrong, 2)
    none = run("data", "prepare", f"{folder}/*.md", "-o", f"{folder}/x")
    assert f"no file matches {folder}/*.md" in refused(none, 2)
    assert "does not exist" in refused(run("data", "inspect", f"{folder}/x"), 3)
    assert "oobleck data prepare" in refused(run("data", "inspect", f"{folder}/a.txt"), 2)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("a.txt", "out.bin", "out.bin.json", "t.json")
    ]


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes out.bin from a file that has no end."""
    with open(tmp_path / "endless.txt", "wb") as file:
        file.truncate(1 << 40)
    command = [sys.executable, "-m", "oobleck.cli.main", "data", "prepare"]
    with subprocess.Popen(
        [*command, str(tmp_path / "endless.txt"), "-o", str(tmp_path / "out.bin")]
    ) as child:
        try:
            until(lambda: child.poll() is not None or list(tmp_path.glob(".out.bin*")), "a file")
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_prepare_that_is_interrupted_leaves_nothing(tmp_path, endless, signum):
    endless.send_signal(signum)
    assert endless.wait(PATIENCE_S) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["endless.txt"]


def test_prepare_sweeps_what_a_killed_one_has_left(tmp_path, endless):
    (tmp_path / "a.txt").write_text(TEXT)
    (left,) = tmp_path.glob(".out.bin*")
    again = ("data", "prepare", str(tmp_path / "a.txt"), "-o", str(tmp_path / "out.bin"), "--force")
    assert run(*again).returncode == 0
    assert left.exists(), "it is still being written"
    endless.kill()
    endless.wait()
    assert run(*again).returncode == 0
    assert list(tmp_path.glob(".out.bin*")) == []


def test_a_disk_that_takes_no_more_is_no_wrong_usage(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT * 100)
    limit = (TEXT_LIMIT, TEXT_LIMIT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "oobleck.cli.main", "data", "prepare"),
            *(str(tmp_path / "a.txt"), "-o", str(tmp_path / "out.bin")),
        ],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert done.returncode == 1
    assert f"cannot write {tmp_path}/out.bin: File too large; make room there" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def told_of(folder: Path, data: str, vocabulary: int) -> str:
    (folder / "job.yaml").write_text(JOB.format(data=data, vocabulary=vocabulary))
    return refused(run("profile", str(folder / "job.yaml"), "--local"), 2)


def test_a_vocabulary_that_is_too_small_is_refused_before_a_worker_starts(folder, tmp_path):
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "out.bin")
    (tmp_path / "t.json").write_bytes((folder / "t.json").read_bytes())
    (tmp_path / "a.txt").write_text(TEXT)
    text = told_of(tmp_path, "{text: a.txt, tokenizer: t.json}", 256)
    assert "data: tokenizer: " in text
    assert "set model.vocabulary to 3" in text
    text = told_of(tmp_path, "{text: a.txt, tokenizer: a.txt}", 256)
    assert f"{tmp_path}/a.txt is no tokenizer file" in text
    text = told_of(tmp_path, "{text: a.txt}", 100)
    assert "a.txt has byte 117" in text
    assert "set model.vocabulary to 256" in text
    run("data", "prepare", f"{tmp_path}/a.txt", "-o", f"{tmp_path}/bytes.bin")
    assert "has token 117, which is not below" in told_of(tmp_path, "{tokens: bytes.bin}", 100)
    with open(tmp_path / "bytes.bin", "ab") as file:
        file.write(b"more")
    assert "was cut off or replaced" in told_of(tmp_path, "{tokens: bytes.bin}", 256)
    text = told_of(tmp_path, "{tokens: out.bin}", 256)
    assert f"data: the type of the ids in {tmp_path}/out.bin is unknown" in text
    (tmp_path / "job.yaml").write_text(
        JOB.format(data="{tokens: out.bin, tokenizer: t.json}", vocabulary=256)
    )
    text = refused(run("submit", str(tmp_path / "job.yaml")), 2)
    assert "tokenizer: goes with text" in text


def test_ids_of_another_type_than_is_said_are_told(tmp_path):
    words = np.random.default_rng(1).integers(0, 40_000, 4_000)
    wide, narrow = tmp_path / "wide.bin", tmp_path / "narrow.bin"
    words.astype("<u4").tofile(wide)
    words.astype("<u2").tofile(narrow)
    told = f"{wide} does not look like uint16: in groups of 2 ids the high half"

    shown = run("data", "inspect", str(wide), "--dtype", "uint16")
    assert shown.returncode == 0
    assert f"oobleck: warning: {told}" in shown.stderr
    assert f"{wide}: 8,000 uint16 tokens, " in shown.stdout
    right = run("data", "inspect", str(wide), "--dtype", "uint32", "--json")
    assert right.stderr == ""
    assert json.loads(right.stdout) == {
        "dtype": "uint32",
        "tokens": 4000,
        "begins": words[:16].tolist(),
    }
    assert "give its type with --dtype" in refused(run("data", "inspect", str(wide)), 2)

    def check(file: Path, dtype: str):
        job = tmp_path / "job.yaml"
        job.write_text(JOB.format(vocabulary=50_257, data=f"{{tokens: {file}, dtype: {dtype}}}"))
        return run("check", str(job))

    looked_at = check(wide, "uint16")
    assert (looked_at.returncode, looked_at.stdout) == (0, "ok\n")
    assert f"oobleck: warning: data: {told}" in looked_at.stderr
    assert (check(wide, "uint32").stderr, check(narrow, "uint16").stderr) == ("", "")
    beyond = refused(check(narrow, "uint32"), 2)
    assert "is not below model.vocabulary (50257); set dtype to uint16" in beyond
