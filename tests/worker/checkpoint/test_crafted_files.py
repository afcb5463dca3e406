"""Files made to harm who reads them: each is refused at once, in one line that names it."""

import hashlib
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from oobleck.cli.output import text
from oobleck.core.checkpoint import (
    RECORDS,
    InvalidCheckpoint,
    LayerFile,
    Manifest,
    format_manifest,
    layer_file,
    read_manifest,
)
from oobleck.core.errors import InvalidJob
from oobleck.core.job.file import parse_job
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.spec import DataSpec, TrainingSpec
from oobleck.host.security.credentials import read_file, read_secret
from oobleck.host.storage.checkpoints import (
    list_checkpoints,
    read_layer,
    read_records,
    verify,
)
from oobleck.host.storage.folder import LocalFolder, bounded_names
from oobleck.host.storage.weight_files import WeightsError, open_weights
from oobleck.host.token_file import DataError, TokenFileInfo, TokenWriter, info_path, read_info
from oobleck.host.tokenise import load_tokenizer, read_documents
from oobleck.master.storage.ledger import read_profiles
from oobleck.worker.data.dataset import Corpus
from oobleck.worker.runtime.records import describe_file, read_lines
from oobleck.worker.state.layout import layout, pack, unpack
from support.families import family_model
from support.jobs import recorded

pytestmark = pytest.mark.timeout(60)

DEEP = "[" * 100_000
MODEL = ModelSpec(layers=1, hidden=4, heads=1, sequence_length=4)
SGD = OptimizerSpec(name="sgd", lr=0.1)
TINY = {"vocab_size": 64, "n_positions": 16, "n_embd": 4, "n_layer": 2, "n_head": 1}
LAST = (LayerFile(name=layer_file(3), layer=3, bytes=1, sha256="0" * 64),)
OLDER, NEWER = "step-000000003-0123abcd", "step-000000005-0123abcd"

Harm = Callable[[Path], object]


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def content(new: str | bytes) -> Harm:
    return lambda path: path.write_bytes(new if isinstance(new, bytes) else new.encode())


def sparse(size: int) -> Harm:
    return lambda path: os.truncate(path, size)


def changed(*keys: str | int, to: Any) -> Harm:
    """The value at `keys` of a file of JSON."""

    def harm(path: Path) -> None:
        tree = below = json.loads(path.read_text())
        for key in keys[:-1]:
            below = below[key]
        below[keys[-1]] = to
        path.write_text(json.dumps(tree).replace('"1e400"', "1e400"))

    return harm


def said(harm: Harm) -> str:
    return getattr(harm, "__name__", "")


# ---- checkpoints


def layer(number: int) -> bytes:
    flat = layout(MODEL, number)
    snapshot = torch.ones(1, flat.size)
    return b"".join(map(bytes, pack(snapshot, flat, SGD.state, {"layer": str(number)})))


RECORDED = recorded(3).lines(3, 0.0)


def manifest(step: int = 3) -> Manifest:
    return Manifest(
        job="demo-1",
        step=step,
        created=float(step),
        model=MODEL,
        training=TrainingSpec(steps=9, global_batch=2, optimizer=SGD),
        data="da7a",
        records=describe_file(RECORDED),
        files=tuple(
            LayerFile(
                name=layer_file(number),
                layer=number,
                bytes=len(layer(number)),
                sha256=hashlib.sha256(layer(number)).hexdigest(),
            )
            for number in range(3)
        ),
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two whole checkpoints."""
    for name, step in ((OLDER, 3), (NEWER, 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_bytes(format_manifest(manifest(step)))
        for number in range(3):
            (tmp_path / name / layer_file(number)).write_bytes(layer(number))
        (tmp_path / name / RECORDS).write_bytes(b"".join(RECORDED))
    return tmp_path


BAD_MANIFESTS: dict[str, Harm] = {
    "a pipe": fifo,
    "a directory": directory,
    "huge": sparse(1 << 40),
    "empty": content(""),
    "deep": content(DEEP),
    "deep inside": changed("model", "config", to=DEEP),
    "no text": content(b"\xff\xfe"),
    "a NUL in a name": changed("files", 1, "name", to="layer\0.safetensors"),
    "a path as a name": changed("files", 1, "name", to="../../etc/passwd"),
    "two dots": changed("files", 1, "name", to=".."),
    "an escape in a name": changed("files", 1, "name", to="\x1b]0;x\x07"),
    "no size": changed("files", 1, "bytes", to=-1),
    "a size beyond all": changed("files", 1, "bytes", to=1 << 70),
    "no hash": changed("files", 1, "sha256", to="\x1b[31m"),
    "a time beyond all": changed("created", to=1e300),
    "an infinite time": changed("created", to="1e400"),
    "a time before all": changed("created", to=-1.0),
    "a step beyond all": changed("step", to=1 << 62),
    "a step before all": changed("step", to=-1),
    "a job's name": changed("job", to="\x1b[2J"),
    "data": changed("data", to="\x9b31m"),
    "a path of records": changed("records", "name", to="../records.jsonl"),
    "records beyond all": changed("records", "bytes", to=1 << 40),
    "no hash of records": changed("records", "sha256", to="\x1b[31m"),
    "too many layers": changed("model", "layers", to=1 << 40),
}


@pytest.mark.parametrize("harm", BAD_MANIFESTS.values(), ids=list(BAD_MANIFESTS))
def test_a_bad_manifest_leaves_the_checkpoint_before_it(place: Path, harm: Harm) -> None:
    harm(place / NEWER / "manifest.json")
    listing = list_checkpoints(LocalFolder(place))
    assert [found.name for found in listing.checkpoints] == [OLDER]
    (reason,) = listing.damaged.values()
    assert reason.startswith(f"{NEWER}: manifest.json: ")
    assert len(reason) < 400


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e400", "-1e400", DEEP])
def test_a_manifest_whose_config_has_numbers_without_end(number: str) -> None:
    spec = family_model("gpt2", TINY, sequence_length=8)
    whole = format_manifest(replace(manifest(), model=spec, files=manifest().files + LAST))
    crafted = whole.replace(b'\\"attn_pdrop\\":0.1', b'\\"attn_pdrop\\":' + number.encode())
    assert crafted != whole
    with pytest.raises(InvalidCheckpoint, match=r"manifest\.json"):
        read_manifest(crafted, NEWER)


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e400", DEEP])
def test_a_config_file_of_a_job(number: str) -> None:
    job = (
        "name: a\nmodel: {kind: gpt2, config: config.json, sequence_length: 8}\n"
        "data: {text: a}\ntraining: {steps: 3, global_batch: 2}"
    )
    config = json.dumps({**TINY, "attn_pdrop": "?"}).replace('"?"', number)
    with pytest.raises(InvalidJob, match="config") as raised:
        parse_job(job, read=lambda path: config)
    assert "\n" not in str(raised.value)


def test_a_crowd_of_names_is_no_folder_of_checkpoints() -> None:
    with pytest.raises(OSError, match="more than 100000 names"):
        bounded_names(map(str, itertools.count()))


def test_a_link_in_place_of_a_torn_checkpoint_is_removed_and_not_what_it_names(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / NEWER).symlink_to(tmp_path / "mine")
    LocalFolder(tmp_path).remove(NEWER)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def headed(header: str, data: int = 0) -> bytes:
    return len(header.encode()).to_bytes(8, "little") + header.encode() + bytes(data)


@pytest.mark.parametrize(
    "harm",
    [Path.unlink, fifo, directory, sparse(1 << 40), sparse(9), content(b"0" * 800)],
    ids=said,
)
def test_bad_records_leave_the_checkpoint_whole(place: Path, harm: Harm) -> None:
    here, found = LocalFolder(place / NEWER), manifest()
    assert found.records is not None
    assert len(read_lines(read_records(here, found.records), 3).steps) == 3
    harm(place / NEWER / RECORDS)
    with pytest.raises(InvalidCheckpoint, match=r"^records\.jsonl: "):
        read_records(here, found.records)
    assert verify(here, found) == {}
    assert list_checkpoints(LocalFolder(place)).checkpoints[0].name == NEWER


@pytest.mark.parametrize("harm", [fifo, directory, sparse(1 << 40), sparse(9)], ids=said)
def test_a_bad_layer_is_a_bad_checkpoint(place: Path, harm: Harm) -> None:
    victim = place / NEWER / layer_file(1)
    harm(victim)
    here, file = LocalFolder(place / NEWER), manifest().files[1]
    with pytest.raises(InvalidCheckpoint, match=file.name) as raised:
        read_layer(here, file)
    assert "\n" not in str(raised.value)
    assert list(verify(here, manifest())) == [file.name]


ENTRY = '{"dtype": "F32", "shape": %s, "data_offsets": %s}'
BAD_HEADERS = {
    "deep": headed('{"a": ' + DEEP),
    "deep metadata": headed('{"__metadata__": ' + DEEP),
    "a length beyond the file": (1 << 40).to_bytes(8, "little") + b"{}",
    "an infinite offset": headed('{"a": ' + ENTRY % ("[1]", "[0, 1e400]") + "}", 4),
    "a shape below zero": headed('{"a": ' + ENTRY % ("[-1]", "[0, 4]") + "}", 4),
    "a shape beyond the file": headed('{"a": ' + ENTRY % ("[1099511627776]", "[0, 4]") + "}", 4),
    "a shape that multiplies": headed('{"a": ' + ENTRY % (f"[{1 << 40},{1 << 40}]", "[0,4]") + "}"),
    "many dimensions": headed('{"a": ' + ENTRY % ([1] * 100_000, "[0, 4]") + "}", 4),
    "offsets that go back": headed('{"a": ' + ENTRY % ("[1]", "[8, 4]") + "}", 4),
    "a text": headed('"a"'),
    "no text": (2).to_bytes(8, "little") + b"\xff\xff",
}


@pytest.mark.parametrize("crafted", BAD_HEADERS.values(), ids=list(BAD_HEADERS))
def test_a_crafted_layer_with_a_right_hash_is_a_bad_checkpoint(crafted: bytes) -> None:
    with pytest.raises(InvalidCheckpoint, match="is not a safetensors file") as raised:
        unpack(crafted, layout(MODEL, 1), SGD.state, torch.float32)
    assert "\n" not in str(raised.value)


# ---- initial weights


def refused_weights(folder: Path) -> str:
    with pytest.raises(WeightsError) as raised:
        open_weights(str(folder))
    message = str(raised.value)
    assert message.isprintable()
    assert len(message) < 600
    return message


@pytest.mark.parametrize("crafted", BAD_HEADERS.values(), ids=list(BAD_HEADERS))
def test_weights_with_a_crafted_header(tmp_path: Path, crafted: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(crafted)
    assert "copy it anew" in refused_weights(tmp_path)


def test_a_header_that_would_fill_the_memory_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((60 << 20).to_bytes(8, "little"))
    os.truncate(path, 61 << 20)
    assert "has a header of 62914560 bytes" in refused_weights(tmp_path)


@pytest.mark.parametrize(
    "harm",
    [
        *(fifo, directory, sparse(1 << 40), content(DEEP), content('{"weight_map": {"a": 1}}')),
        *map(content, ('{"weight_map": {"a": "x\\u0000"}}', '{"weight_map": {"a": ".."}}')),
    ],
    ids=said,
)
def test_an_index_of_weights(tmp_path: Path, harm: Harm) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text("{}")
    harm(path)
    assert str(tmp_path) in refused_weights(tmp_path)


def test_weights_that_are_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x"}}')
    fifo(tmp_path / "x")
    assert "not a regular file" in refused_weights(tmp_path)


# ---- data


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.tokens"
    with TokenWriter(path, "uint16") as writer:
        writer.add(np.arange(100, dtype=np.uint32))
        writer.publish(vocabulary=256, tokenizer="bytes")
    return path


@pytest.mark.parametrize(
    "harm",
    [
        *(fifo, directory, sparse(1 << 40), content(DEEP), changed("highest", to=-1)),
        *(changed("tokens", to=-100), changed("vocabulary", to=1 << 70)),
    ],
    ids=said,
)
def test_a_description_of_tokens(tokens: Path, harm: Harm) -> None:
    harm(info_path(tokens))
    with pytest.raises(DataError, match=str(info_path(tokens))):
        read_info(tokens)


def test_tokens_above_the_highest_that_is_described(tokens: Path) -> None:
    changed("highest", to=50)(info_path(tokens))
    with pytest.raises(
        DataError, match=r"position 99 of .* has token 99, .* names 50 as the highest"
    ):
        Corpus(DataSpec(tokens=str(tokens)), 64)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz", "a.jsonl.gz"])
def test_documents_that_are_a_pipe(tmp_path: Path, name: str) -> None:
    fifo(tmp_path / name)
    with pytest.raises(DataError, match="not a regular file"):
        list(read_documents(str(tmp_path / name), "text"))


def test_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "whole"}\n' + DEEP)
    with pytest.raises(DataError, match=r"a\.jsonl:2: not a line of JSON"):
        list(read_documents(str(path), "text"))
    path.write_text("{}")
    os.truncate(path, 1 << 40)
    with pytest.raises(DataError, match=r"a\.jsonl:1: is longer than"):
        list(read_documents(str(path), "text"))


@pytest.mark.parametrize("harm", [fifo, sparse(1 << 40), content(DEEP)], ids=said)
def test_a_tokenizer(tmp_path: Path, harm: Harm) -> None:
    path = tmp_path / "tokenizer.json"
    path.touch()
    harm(path)
    with pytest.raises(DataError, match=str(path)):
        load_tokenizer(str(path))


@pytest.mark.parametrize("harm", [fifo, directory, sparse(1 << 40)], ids=said)
def test_a_join_token_or_a_certificate(tmp_path: Path, harm: Harm) -> None:
    path = tmp_path / "token"
    path.touch()
    harm(path)
    for read in (read_file, read_secret):
        with pytest.raises(ValueError, match=str(path)):
            read(path)


@pytest.mark.parametrize("harm", [fifo, directory, sparse(1 << 40), content(DEEP)], ids=said)
def test_a_stored_profile(tmp_path: Path, harm: Harm) -> None:
    path = tmp_path / "key.json"
    path.touch()
    harm(path)
    assert list(read_profiles(tmp_path).unusable) == ["key"]


# ---- mutations

BITS = st.sampled_from(
    [b"\0", b"\xff", b"-", b"9" * 30, b"1e400", b"null", b"{", b"[" * 2000, b'"', b"", b"\x1b"]
)
CUTS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 8), BITS), min_size=1, max_size=3)


def mutated(whole: bytes, cuts: list[tuple[float, int, bytes]]) -> bytes:
    for at, length, new in cuts:
        begin = int(at * len(whole))
        whole = whole[:begin] + new + whole[begin + length :]
    return whole


@settings(max_examples=100)
@given(cuts=CUTS)
def test_a_mutated_manifest_is_refused_or_can_be_shown_and_used(cuts: Any) -> None:
    try:
        found = read_manifest(mutated(format_manifest(manifest()), cuts), NEWER)
    except InvalidCheckpoint:
        return
    text.moment(found.created)
    torch.tensor([found.step])
    assert all("/" not in file.name and "\0" not in file.name for file in found.files)


@settings(max_examples=100)
@given(cuts=CUTS)
def test_a_mutated_layer_is_refused_or_read(cuts: Any) -> None:
    try:
        unpack(mutated(layer(1), cuts), layout(MODEL, 1), SGD.state, torch.float32)
    except InvalidCheckpoint:
        return


@settings(max_examples=100)
@given(cuts=CUTS)
def test_mutated_weights_are_refused_or_described(tmp_path_factory: Any, cuts: Any) -> None:
    folder = tmp_path_factory.mktemp("weights", numbered=True)
    save_file({"a": np.ones((2, 3), np.float32)}, folder / "model.safetensors")
    path = folder / "model.safetensors"
    path.write_bytes(mutated(path.read_bytes(), cuts))
    try:
        found = open_weights(str(folder))
    except WeightsError:
        return
    assert all(min(tensor.shape, default=0) >= 0 for tensor in found.tensors.values())


def test_what_is_whole_is_read(place: Path, tokens: Path) -> None:
    assert len(list_checkpoints(LocalFolder(place)).checkpoints) == 2
    info = read_info(tokens)
    assert isinstance(info, TokenFileInfo)
    assert Corpus(DataSpec(tokens=str(tokens)), 256).tokens == 100
