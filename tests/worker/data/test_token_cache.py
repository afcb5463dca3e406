"""The token cache: made once per node whoever asks, never torn, never out of date."""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from oobleck.core.job.spec import DataSpec
from oobleck.host.token_file import DataError
from oobleck.worker.data.dataset import Corpus
from support.script import talking_script
from support.tokenizers import train_tokenizer

TEXT = "".join(f"Sentence number {n}.\n" for n in range(400))

#: A worker's way to its data, which says how many tokens it made itself.
OPEN = """
import sys
from oobleck.core.job.spec import DataSpec
from oobleck.worker.data import dataset
made = 0
def counting(*arguments, **named):
    global made
    made += 1
    return tokenise(*arguments, **named)
tokenise, dataset.tokenise = dataset.tokenise, counting
print("loaded", flush=True)
sys.stdin.readline()
text, tokenizer, cache = sys.argv[1:]
found = dataset.Corpus(DataSpec(text=(text,), tokenizer=tokenizer, cache=cache), 300)
print(made, found.tokens, found.fingerprint.hex(), int(found.read(0, found.tokens).sum()))
"""

#: The same, but it stays where the tokens are written and the file has not its name yet.
STAYS = OPEN.replace(
    "    return tokenise(*arguments, **named)",
    "    arguments[2].publish = stay\n    tokenise(*arguments, **named)",
).replace(
    "def counting",
    "def stay(*_, **named):\n    print('half', flush=True)\n    sys.stdin.read()\ndef counting",
)


@pytest.fixture
def spec(tmp_path: Path) -> DataSpec:
    (tmp_path / "texts").mkdir()
    for name in ("a", "b"):
        (tmp_path / "texts" / f"{name}.txt").write_text(f"{name}: {TEXT}")
    train_tokenizer(tmp_path / "t.json", [TEXT])
    return DataSpec(
        text=(f"{tmp_path}/texts/*.txt",),
        tokenizer=f"{tmp_path}/t.json",
        cache=f"{tmp_path}/cache",
    )


def cached(spec: DataSpec) -> list[Path]:
    return sorted(Path(spec.cache or "").glob("*.tokens"))


def test_many_workers_make_it_once(spec, preloaded):
    arguments = [spec.text[0], spec.tokenizer or "", spec.cache or ""]
    with ExitStack() as scripts:
        workers = [
            scripts.enter_context(talking_script(preloaded, OPEN, *arguments)) for _ in range(4)
        ]
        assert [told.readline() for _, told in workers] == 4 * ["loaded\n"]
        for to, _ in workers:
            to.write("go\n")
            to.flush()
        said = [told.readline().split() for _, told in workers]
    assert sorted(made for made, *_ in said) == ["0", "0", "0", "1"]
    assert len({tuple(rest) for _, *rest in said}) == 1
    assert len(cached(spec)) == 1


def test_it_is_made_anew_for_other_texts_tokenizers_and_separators(spec, tmp_path):
    first = Corpus(spec, 300)
    assert first.fingerprint == Corpus(spec, 300).fingerprint
    assert len(cached(spec)) == 1
    train_tokenizer(tmp_path / "t.json", [TEXT], vocabulary=280)
    second = Corpus(spec, 300)
    third = Corpus(DataSpec(text=spec.text, separator="\n", cache=spec.cache), 300)
    path = tmp_path / "texts" / "b.txt"
    path.write_text(path.read_text().replace("b: ", "c: "))
    fourth = Corpus(spec, 300)
    prints = {corpus.fingerprint for corpus in (first, second, third, fourth)}
    assert len(prints) == len(cached(spec)) == 4


def test_the_fingerprint_does_not_depend_on_when_texts_were_changed(spec, tmp_path):
    first = Corpus(spec, 300)
    os.utime(tmp_path / "texts" / "a.txt", ns=(1, 1))
    assert Corpus(spec, 300).fingerprint == first.fingerprint
    assert len(cached(spec)) == 2


def test_a_worker_that_is_killed_leaves_nothing_torn(spec, tmp_path, preloaded):
    arguments = [spec.text[0], spec.tokenizer or "", spec.cache or ""]
    with talking_script(preloaded, STAYS, *arguments) as (to, told):
        to.write("go\n")
        to.flush()
        assert [told.readline() for _ in range(2)] == ["loaded\n", "half\n"]
    assert cached(spec) == []
    assert list(tmp_path.glob("cache/.*.making"))
    found = Corpus(spec, 300)
    assert found.read(0, found.tokens).max() < 300
    assert not list(tmp_path.glob("cache/.*.making"))


def test_a_file_that_was_cut_off_is_made_anew(spec):
    first = Corpus(spec, 300)
    (path,) = cached(spec)
    path.write_bytes(path.read_bytes()[:-100])
    again = Corpus(spec, 300)
    assert again.tokens == first.tokens
    assert again.fingerprint == first.fingerprint


def test_refusals_name_the_key(spec, tmp_path):
    with pytest.raises(DataError, match=r"^data: tokenizer: .*set model.vocabulary to 300"):
        Corpus(spec, 256)
    (tmp_path / "texts" / "b.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"^data: .*b.txt is not UTF-8 text at byte 0"):
        Corpus(spec, 300)
    (tmp_path / "file").write_text("")
    no_room = DataSpec(text=spec.text, tokenizer=spec.tokenizer, cache=f"{tmp_path}/file/cache")
    with pytest.raises(DataError, match=r"^data: cannot keep tokens in .*; set cache to"):
        Corpus(no_room, 300)
