"""The fingerprint of a user's code covers what it imports of its own, and nothing else."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleck.core.job.code import NO_ARGUMENTS, Code
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError, for_want_of_memory

FILES = {
    "fingerprinted.py": "def model():\n    from fingerprinted_parts.deep import layer\n",
    "fingerprinted_parts/__init__.py": "",
    "fingerprinted_parts/deep.py": "def layer():\n    from . import near\n    from .. import up\n",
    "fingerprinted_parts/near.py": "import fingerprinted_parts.far as far, json\n",
    "fingerprinted_parts/far.py": "FAR = 1\n",
    "fingerprinted_parts/unused.py": "UNUSED = 1\n",
    "json.py": "not Python: never loaded, and read only as bytes\n",
}


@pytest.fixture(autouse=True)
def _allowed() -> Iterator[None]:
    code.allow((code.ANY,))
    yield
    code.allow(())


def fingerprint(folder: Path, changed: str = "") -> str:
    for name, text in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}# changed\n" if name == changed else text)
    source = Code(name="fingerprinted:model", group=None, path=str(folder), arguments=NO_ARGUMENTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        patch.delitem(sys.modules, "fingerprinted", raising=False)
        return code.fingerprint(source)


def test_what_is_imported_within_functions_counts(tmp_path: Path) -> None:
    first = fingerprint(tmp_path / "first")
    assert fingerprint(tmp_path / "elsewhere") == first
    for number, name in enumerate(FILES):
        same = fingerprint(tmp_path / str(number), changed=name) == first
        assert same == (name == "fingerprinted_parts/unused.py"), name


def test_an_error_without_a_text_is_told_by_its_name() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise ValueError("it has none")

    assert code.described(Silent()) == "Silent"
    assert not for_want_of_memory(Silent())


def test_code_that_ends_its_process_has_failed(tmp_path: Path) -> None:
    (tmp_path / "ending.py").write_text("import sys\n\ndef model():\n    sys.exit(3)\n")
    source = Code(name="ending:model", group=None, path=str(tmp_path), arguments=NO_ARGUMENTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        with pytest.raises(JobError, match=r"ending:model failed: SystemExit: 3 \(ending.py:4\)"):
            code.call(source, "model")
