"""Text to token files: documents, pieces, separators, and that nothing half is ever there."""

import gzip
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from oobleck.host.token_file import DataError, TokenWriter, info_path, read_info
from oobleck.host.tokenise import (
    PIECE_BYTES,
    ByteTokenizer,
    FileTokenizer,
    load_tokenizer,
    read_documents,
    tokenise,
)
from support.tokenizers import train_tokenizer

TEXT = "".join(f"Line {n} of an ordinary text, with words and 1{n} numbers.\n" for n in range(300))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tokenizer]:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return str(path), train_tokenizer(path, [TEXT])


def make(folder: Path, *paths: Path, tokenizer: str | None = None, **options: str) -> list[int]:
    """The ids of a token file made of `paths`."""
    reader = load_tokenizer(tokenizer)
    separator = reader.separator(options.get("separator"))
    field = options.get("field", "text")
    with TokenWriter(folder / "made.bin", "uint16") as writer:
        info = tokenise(list(map(str, paths)), reader, writer, field=field, separator=separator)
    ids = np.fromfile(folder / "made.bin", dtype="<u2")
    assert info == read_info(folder / "made.bin")
    assert info.tokens == len(ids)
    assert info.highest == ids.max()
    assert info.sha256 == hashlib.sha256((folder / "made.bin").read_bytes()).hexdigest()
    assert sorted(path.name for path in folder.glob("made*")) == ["made.bin", "made.bin.json"]
    assert not list(folder.glob(".*"))
    found: list[int] = ids.tolist()
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(text=st.text(alphabet="ab \n\té水\U0001f30a", max_size=400), piece=st.integers(1, 40))
def test_pieces_join_to_the_document_and_each_is_text(tmp_path, text, piece):
    path = tmp_path / "a.txt"
    path.write_text(text, newline="")
    pieces = list(read_documents(str(path), "", piece_bytes=piece))
    assert "".join(piece.text() for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True] * (
        text != ""
    )
    assert not pieces or pieces[-1].read_bytes == path.stat().st_size


def test_a_text_in_pieces_has_the_tokens_of_the_whole(tmp_path, tokenizer):
    text = TEXT * (2 * PIECE_BYTES // len(TEXT) + 1)
    (tmp_path / "a.txt").write_text(text)
    path, library = tokenizer
    expected = library.encode(text, add_special_tokens=False).ids
    assert make(tmp_path, tmp_path / "a.txt", tokenizer=path, separator="") == expected


def test_documents_of_all_kinds_are_separated(tmp_path, tokenizer):
    path, library = tokenizer
    lines = "".join(json.dumps({"body": text, "id": 1}) + "\n" for text in ("one", "", "two é"))
    (tmp_path / "a.txt").write_text("plain text")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"packed text"))
    (tmp_path / "c.jsonl").write_text(lines + "\n")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "e.txt").write_text("")
    end = library.token_to_id("</s>")
    expected = []
    for text in ("plain text", "packed text", "one", "two é", "one", "two é"):
        expected += [*library.encode(text).ids, end]
    files = sorted(tmp_path.iterdir())
    assert make(tmp_path, *files, tokenizer=path, field="body") == expected
    info = read_info(tmp_path / "made.bin")
    assert info is not None
    assert (info.documents, info.separator) == (6, (end,))
    assert info.tokenizer_sha256 == hashlib.sha256(Path(path).read_bytes()).hexdigest()


def test_bytes_are_taken_as_they_are(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\x00a")
    (tmp_path / "b.txt").write_bytes(b"b")
    files = (tmp_path / "a.txt", tmp_path / "b.txt")
    assert make(tmp_path, *files) == [255, 0, 97, 98]
    assert make(tmp_path, *files, separator="\n\n") == [255, 0, 97, 10, 10, 98, 10, 10]


def refused(tmp_path: Path, name: str, content: bytes, tokenizer: str | None = None) -> str:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        make(tmp_path, tmp_path / name, tokenizer=tokenizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]
    (tmp_path / name).unlink()
    return str(caught.value)


def test_what_cannot_be_read_is_named_and_leaves_nothing(tmp_path, tokenizer):
    path, _ = tokenizer
    text = refused(tmp_path, "a.txt", TEXT.encode() + b"caf\xe9", path)
    assert f"{tmp_path}/a.txt is not UTF-8 text at byte {len(TEXT) + 3}; convert it" in text
    assert "a.jsonl:2: not a line of JSON" in refused(tmp_path, "a.jsonl", b'{"text": "a"}\n{"b')
    text = refused(tmp_path, "a.jsonl", b'{"body": "a", "id": 3}\n')
    assert "a.jsonl:1: has no text under 'text'" in text
    assert "(there: body, id)" in text
    assert "a.jsonl:1: has no text" in refused(tmp_path, "a.jsonl", b"[1]\n")
    assert "not a whole gzip file" in refused(tmp_path, "a.gz", b"text")
    cut = gzip.compress(bytes(range(256)) * 9)[:-20]
    assert "not a whole gzip file" in refused(tmp_path, "a.gz", cut)
    assert "no text in there" in refused(tmp_path, "a.txt", b"")


def test_what_is_no_tokenizer_is_refused(tmp_path, tokenizer):
    def text(content: str) -> str:
        (tmp_path / "t.json").write_text(content)
        with pytest.raises(DataError) as caught:
            FileTokenizer(str(tmp_path / "t.json"))
        return str(caught.value)

    for content in ("no json", "{}", '{"version": "1.0"}', "é"):
        assert f"{tmp_path}/t.json is no tokenizer file" in text(content)
    with pytest.raises(DataError, match=r"cannot read .*nowhere.json: No such file"):
        FileTokenizer(str(tmp_path / "nowhere.json"))
    with pytest.raises(DataError, match=r"is a directory; give the tokenizer.json in it"):
        FileTokenizer(str(tmp_path))
    path, library = tokenizer
    found = FileTokenizer(path)
    assert found.vocabulary == library.get_vocab_size()
    with pytest.raises(DataError, match=r"has no token '<eos>' to end a document with"):
        found.separator("<eos>")
    with pytest.raises(DataError, match=r"set model.vocabulary to 300"):
        found.check_vocabulary(299)
    found.check_vocabulary(300)
    train_tokenizer(tmp_path / "bare.json", [TEXT], specials=())
    bare = FileTokenizer(str(tmp_path / "bare.json"))
    with pytest.raises(DataError, match=r"has none of .*</s>.* name one of its tokens"):
        bare.separator(None)
    assert bare.separator("") == ()


def test_a_full_disk_leaves_what_was_there(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(1 << 20))
    before = make(tmp_path, tmp_path / "a.txt")
    limit = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19)); "
        "from oobleck.cli.main import main; main()"
    )
    command = ["data", "prepare", str(tmp_path / "a.txt"), "-o", str(tmp_path / "made.bin")]
    done = subprocess.run(
        [sys.executable, "-c", limit, *command, "--force"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 1
    assert f"cannot write {tmp_path}/made.bin: File too large; make room there" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.txt",
        "made.bin",
        "made.bin.json",
    ]
    assert np.fromfile(tmp_path / "made.bin", dtype="<u2").tolist() == before
    assert read_info(tmp_path / "made.bin") is not None


def test_a_description_that_is_broken_or_of_another_file_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"some text")
    make(tmp_path, tmp_path / "a.txt")
    made = tmp_path / "made.bin"
    made.write_bytes(made.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"has 17 bytes, and made.bin.json speaks of 9 uint16"):
        read_info(made)
    info_path(made).write_text('{"dtype": "int8"}')
    with pytest.raises(DataError, match="does not describe a token file"):
        read_info(made)
    info_path(made).unlink()
    assert read_info(made) is None
    assert ByteTokenizer().vocabulary == 256
    with (
        pytest.raises(DataError, match="token 256 does not fit into uint8"),
        TokenWriter(tmp_path / "x.bin", "uint8") as writer,
    ):
        writer.add(np.array([1, 256], dtype=np.uint32))
