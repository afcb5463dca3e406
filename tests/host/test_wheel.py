"""Wheels that go with jobs: what they may hold, how they are unpacked, how jobs name them."""

import io
import stat
import struct
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from oobleck.core.job.file import format_job, parse_job
from oobleck.core.job.model import OwnModelSpec
from oobleck.host import wheel
from oobleck.host.wheel import Wheel, digest_of, stored_as, unpacked_in
from support.wheels import METADATA, PURE, wheel_of

GOOD = {"mine/__init__.py": "", "mine/words.txt": "a b", "single.py": "A = 1\n"}
JOB = """\
name: demo
model: {python: "mine.models:tagger"}
data: {python: "mine.data:Words"}
evaluation: {every: 5, data: {python: "others:Held"}}
training: {steps: 1, global_batch: 4, optimizer: {python: "torch.optim:Adam"}}
code: dist/mine-1.0-py3-none-any.whl
"""


def linked(name: str, kind: int) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        info = zipfile.ZipInfo(name)
        info.external_attr = (kind | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
        archive.writestr(METADATA, PURE)
    return made.getvalue()


def changed(content: bytes, before: bytes, after: bytes) -> bytes:
    assert len(before) == len(after), "places in the file stay"
    assert before in content
    return content.replace(before, after)


def of_large_directory() -> bytes:
    """Its end says so; there is none."""
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 9, 9, (8 << 20) + 1, 0, 0)
    return b"PK\3\4" + bytes(64) + end


def encrypted() -> bytes:
    content = wheel_of({"mine.py": "A = 1"})
    at = content.index(b"PK\1\2") + 8
    return content[:at] + b"\1" + content[at + 1 :]


def test_a_wheel_is_unpacked_for_its_user_alone(tmp_path: Path) -> None:
    found = Wheel(wheel_of(GOOD))
    assert found.modules == {"mine", "single"}
    place = tmp_path / "code"
    found.unpack(place)
    files = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
    assert files == {*GOOD, METADATA}
    assert (place / "mine" / "words.txt").read_text() == "a b"
    modes = {path.stat().st_mode & 0o077 for path in (place, *place.rglob("*"))}
    assert modes == {0}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is no wheel"),
        (b"import torch\n" * 9, "it is no wheel"),
        (wheel_of(GOOD, said=""), "it is no wheel"),
        (wheel_of(GOOD) + b"PK\6\7" + bytes(16) + b"PK\5\6" + bytes(18), "it is no wheel"),
        (of_large_directory(), "far more than 20000 files"),
        (wheel_of(GOOD)[:-30] + wheel_of(GOOD)[-22:], "it is damaged"),
        (
            wheel_of(GOOD, said="Root-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n"),
            "its tag is 'cp311-cp311-linux_x86_64', and only py3-none-any (pure Python) goes",
        ),
        (wheel_of(GOOD, said=PURE.replace("true", "false")), "its tag is 'py3-none-any', and only"),
        (wheel_of({**GOOD, "mine/fast.so": b"x"}), "mine/fast.so in it is not Python"),
        (wheel_of({**GOOD, "mine/libfast.so.1": b"x"}), "mine/libfast.so.1 in it is not Python"),
        (wheel_of({**GOOD, "mine-1.0.data/scripts/run": "x"}), "is for an installation"),
        (wheel_of({**GOOD, "../../up.py": ""}), "it has a file '../../up.py'"),
        (wheel_of({**GOOD, "mine/../../up.py": ""}), "it has a file 'mine/../../up.py'"),
        (wheel_of({**GOOD, "/etc/up.py": ""}), "it has a file '/etc/up.py'"),
        (wheel_of({**GOOD, "mine//up.py": ""}), "it has a file 'mine//up.py'"),
        (wheel_of({**GOOD, "mine\\up.py": ""}), "it has a file 'mine\\\\up.py'"),
        (changed(wheel_of({**GOOD, "mine/up.py": ""}), b"mine/up", b"mine/\0p"), "it has a file"),
        (wheel_of({**GOOD, "mine/\x1b[2J.py": ""}), "it has a file 'mine/\\x1b[2J.py'"),
        (linked("mine.py", stat.S_IFLNK), "mine.py in it is a link"),
        (linked("mine.py", stat.S_IFIFO), "mine.py in it is a link or no regular file"),
        (encrypted(), "mine.py in it has a compression"),
        (wheel_of({"READ-ME": "x"}), "has no module"),
    ],
)
def test_what_may_not_go_with_a_job_is_refused_in_a_line(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the text is looked at
        Wheel(content)
    text = str(refused.value)
    assert reason in text
    assert ";" in text, "it says the fix"
    assert text.isprintable()


def test_a_wheel_that_unpacks_to_too_much_is_refused_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wheel, "_MOST_BYTES", 1 << 20)
    bomb = wheel_of({**GOOD, "mine/zeros": bytes(2 << 20)})
    assert len(bomb) < 8192
    with pytest.raises(ValueError, match=r"unpacks to \d+ bytes, more than 1048576; leave data"):
        Wheel(bomb)
    monkeypatch.setattr(wheel, "_MOST_FILES", 3)
    with pytest.raises(ValueError, match="it has 4 files, more than 3; leave data"):
        Wheel(wheel_of(GOOD))


def test_no_more_is_unpacked_than_a_wheel_says(tmp_path: Path) -> None:
    """A directory that tells less than there is."""
    content = wheel_of({"mine.py": "", "mine.txt": bytes(2 << 20)})
    lies = changed(content, struct.pack("<I", 2 << 20), struct.pack("<I", 9))
    place = tmp_path / "code"
    with pytest.raises(ValueError, match="it is damaged"):
        Wheel(lies).unpack(place)
    assert not place.exists()


def test_of_a_damaged_wheel_nothing_stays(tmp_path: Path) -> None:
    content = wheel_of({"mine.py": "", "mine.txt": "q" * 99}, said=PURE)
    at = content.index(b"mine.txt") + len("mine.txt")
    place = tmp_path / "code"
    with pytest.raises(ValueError, match="it is damaged"):
        Wheel(content[:at] + b"\0" + content[at + 1 :]).unpack(place)
    assert not place.exists()


def test_a_file_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    made = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(made, "w") as archive:
        warnings.simplefilter("ignore")
        for text in ("A = 1", "A = 2"):
            archive.writestr("mine.py", text)
        archive.writestr(METADATA, PURE)
    with pytest.raises(ValueError, match=r"'mine\.py' twice"):
        Wheel(made.getvalue()).unpack(tmp_path / "code")
    clash = wheel_of({"mine.py": "", "data": "x", "data/more": "y"})
    with pytest.raises(ValueError, match="'data/more' twice, or as a file and a folder"):
        Wheel(clash).unpack(tmp_path / "code")


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
