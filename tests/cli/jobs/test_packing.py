"""What is packed of a folder, and what is not."""

from pathlib import Path

import pytest

from oobleck.cli.jobs import packing
from oobleck.cli.jobs.packing import find, wheel_of
from oobleck.host.command import CommandFailed
from oobleck.host.wheel import Wheel


def filled(folder: Path, *paths: str) -> Path:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)
    return folder


CODE = ["job.yaml", "kernels/add.cu", "my_model.py", "package/__init__.py", "package/sizes.json"]


def test_code_and_the_small_files_that_it_reads(tmp_path: Path) -> None:
    others = (
        *(".git/config", ".env", "__pycache__/my_model.py", "env/pyvenv.cfg", "env/lib/torch.py"),
        *("state/journal.log", "state/jobs/job.json", "pki/ca.crt", "pki/names.json"),
        *("old/step-5/layer-00000.safetensors", "old/step-5/manifest.json"),
        *("mine.egg-info/SOURCES.txt", "saved/part.json", "corpus/a.txt", "corpus/deep/b.txt"),
    )
    filled(tmp_path, *CODE, *others)
    stays = {str(tmp_path / "saved"), str(tmp_path / "corpus" / "**")}
    found = find(tmp_path, stays=stays)
    assert sorted(found.files) == CODE
    assert found.left == ["corpus/a.txt"]


def test_what_stays_behind_is_named(tmp_path: Path) -> None:
    filled(tmp_path, "my_model.py", "rows.npy", "n1.token", "id.key")
    (tmp_path / "large.json").write_bytes(bytes((1 << 20) + 1))
    (tmp_path / "nowhere.py").symlink_to(tmp_path / "nothing.py")
    found = find(tmp_path)
    assert list(found.files) == ["my_model.py"]
    assert found.left == ["id.key", "large.json", "n1.token", "nowhere.py", "rows.npy"]
    assert packing._left(found.left).endswith("left out: id.key, large.json, n1.token and 2 more")


def test_equal_code_makes_an_equal_wheel(tmp_path: Path) -> None:
    one = filled(tmp_path / "one", *CODE)
    other = filled(tmp_path / "other", *reversed(CODE))
    made = wheel_of(find(one))
    assert made == wheel_of(find(other))
    assert Wheel(made).modules == {"my_model", "package", "kernels"}
    (other / "my_model.py").write_text("changed")
    assert made != wheel_of(find(other))


@pytest.mark.parametrize(
    ("limit", "most"), [("_MOST_FILES", 3), ("_MOST_BYTES", 30), ("_MOST_ENTRIES", 3)]
)
def test_too_much_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    filled(tmp_path, *CODE)
    monkeypatch.setattr(packing, limit, most)
    with pytest.raises(CommandFailed, match=r"more than .*a folder of its own.*--no-pack"):
        find(tmp_path)
