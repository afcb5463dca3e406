"""Samples: which rows a step has, that none is lost or doubled, and what users are told."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oobleck.core.job.spec import DataSpec
from oobleck.host.ipc.channel import frame
from oobleck.host.token_file import DataError
from oobleck.worker.data.dataset import Corpus, Dataset, row_digest, samples_digest
from oobleck.worker.data.objective import permute


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def whole(dataset: Dataset, *, seed: int = 0, epoch: int = 0) -> list[tuple[int, ...]]:
    """All rows of an epoch, as one batch each."""
    rows = dataset.rows(seed, epoch + 1, range(dataset.order.samples), dataset.order.samples)
    return [tuple(row.tolist()) for row in rows]


@given(size=st.integers(1, 3000), seed=st.integers(0, 99), epoch=st.integers(0, 99))
def test_every_epoch_is_a_permutation(size, seed, epoch):
    image = permute(np.arange(size, dtype=np.uint64), size, seed=seed, epoch=epoch)
    assert sorted(image.tolist()) == list(range(size))


@given(size=st.integers(1, 1 << 62), values=st.lists(st.integers(0, 1 << 62), max_size=20))
def test_permutations_of_large_corpora_stay_inside_and_do_not_collide(size, values):
    inside = sorted({value % size for value in values})
    image = permute(np.array(inside, dtype=np.uint64), size, seed=1, epoch=2).tolist()
    assert all(value < size for value in image)
    assert len(set(image)) == len(inside)


def test_permutations_of_seeds_and_epochs_are_unlike():
    orders = [
        permute(np.arange(1000, dtype=np.uint64), 1000, seed=seed, epoch=epoch)
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert np.sum(orders[a] == orders[b]) < 10
        assert abs(np.corrcoef(orders[a].astype(float), orders[b].astype(float))[0, 1]) < 0.15
    assert abs(np.corrcoef(np.arange(1000), orders[0].astype(float))[0, 1]) < 0.15


def test_windows_cover_the_joined_files_in_sorted_order(tmp_path):
    write(tmp_path / "b" / "2.txt", bytes(range(10, 13)))
    write(tmp_path / "a.txt", bytes(range(10)))
    write(tmp_path / "b" / "1.txt", b"")
    write(tmp_path / "c.txt", bytes(range(13, 24)))
    dataset = Dataset(DataSpec(text=(f"{tmp_path}/**/*.txt",)), 4, 256)
    assert dataset.order.samples == 5
    expected = [tuple(range(start, start + 5)) for start in range(0, 20, 4)]
    assert sorted(whole(dataset)) == expected
    assert sorted(whole(dataset, epoch=3)) == expected
    assert whole(dataset) != whole(dataset, epoch=3) or whole(dataset) != whole(dataset, epoch=4)


def test_a_file_that_two_patterns_match_counts_once(tmp_path):
    path = write(tmp_path / "a.txt", bytes(range(21)))
    twice = Dataset(DataSpec(text=(str(path), f"{tmp_path}/*.txt")), 4, 256)
    assert twice.order.samples == 5


def test_token_files_are_read_in_their_type(tmp_path):
    for dtype in ("uint8", "uint16", "uint32"):
        path = tmp_path / f"tokens.{dtype}"
        np.arange(41, dtype=dtype).tofile(path)
        dataset = Dataset(DataSpec(tokens=str(path), dtype=dtype), 8, 41)
        assert sorted(whole(dataset)) == [tuple(range(i, i + 9)) for i in range(0, 40, 8)]


def test_a_step_is_the_same_whoever_asks_for_which_part_of_it(tmp_path):
    write(tmp_path / "a.txt", np.random.default_rng(0).bytes(101))
    dataset = Dataset(DataSpec(text=(f"{tmp_path}/*",)), 4, 256)
    batch = dataset.rows(5, 7, range(32), 32)  # steps 1 to 7 of 25 windows: several epochs
    parts = [dataset.rows(5, 7, positions, 32) for positions in (range(20, 32), range(20))]
    assert np.array_equal(batch, np.concatenate(parts[::-1]))
    assert batch.dtype == np.int64
    assert dataset.rows(5, 7, [], 32).shape == (0, 5)


def test_every_sample_is_used_once_per_epoch_over_steps(tmp_path):
    write(tmp_path / "a.txt", np.arange(200, dtype=np.uint8).tobytes())
    dataset = Dataset(DataSpec(text=(f"{tmp_path}/*",)), 4, 256)
    rows = np.concatenate([dataset.rows(0, step, range(7), 7) for step in range(1, 15)])
    assert dataset.order.samples == 49
    for epoch in range(2):
        assert sorted(rows[epoch * 49 : (epoch + 1) * 49, 0].tolist()) == list(range(0, 196, 4))


def test_the_digests_are_what_they_are_documented_to_be():
    row = np.array([1, 2, 258], dtype=np.int64)
    expected = hashlib.sha256(bytes([1, 0, 0, 0, 2, 0, 0, 0, 2, 1, 0, 0])).digest()
    assert row_digest(row) == expected
    assert samples_digest([expected, expected]) == hashlib.sha256(expected * 2).hexdigest()


def fingerprint(pattern: str) -> bytes:
    return Dataset(DataSpec(text=(pattern,)), 4, 256).fingerprint


def test_the_fingerprint_tells_unlike_data_apart_and_ignores_where_it_lies(tmp_path):
    large = np.random.default_rng(0).bytes(1 << 20)
    for node in ("a", "b", "content", "name", "length", "cut"):
        write(tmp_path / node / "1.txt", b"some text")
        write(tmp_path / node / "2.txt", large)
    write(tmp_path / "content" / "1.txt", b"some texT")
    (tmp_path / "name" / "1.txt").rename(tmp_path / "name" / "1b.txt")
    write(tmp_path / "length" / "1.txt", b"some text.")
    write(tmp_path / "cut" / "1.txt", b"some tex")
    write(tmp_path / "cut" / "2.txt", b"t" + large)
    prints = {
        node: fingerprint(f"{tmp_path}/{node}/*")
        for node in sorted(p.name for p in tmp_path.iterdir())
    }
    assert prints["a"] == prints["b"]
    assert len(prints["a"]) == 32
    assert len(set(prints.values())) == 5


def refused(spec: DataSpec, *, vocabulary: int = 256) -> str:
    with pytest.raises(DataError) as caught:
        Dataset(spec, 8, vocabulary)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["grün.txt".encode(), b"gr\xfcn.txt"])
def test_a_file_may_have_any_name_and_the_fingerprint_covers_its_bytes(tmp_path, name):
    content = bytes(range(20))
    (tmp_path / os.fsdecode(name)).write_bytes(content)
    corpus = Corpus(DataSpec(text=(f"{tmp_path}/*",)), 256)
    assert corpus.fingerprint == hashlib.sha256(name + b"\00020\0" + content).digest()


def test_a_refusal_of_a_file_whose_name_is_no_text_can_be_sent(tmp_path):
    os.mkfifo(tmp_path / os.fsdecode(b"gr\xfcn.txt"))
    with pytest.raises(DataError, match=r"gr\\udcfcn.txt is not a regular file") as caught:
        Corpus(DataSpec(text=(f"{tmp_path}/*",)), 256)
    frame(str(caught.value))


def test_refusals_name_the_pattern_and_the_fix(tmp_path):
    write(tmp_path / "short" / "a.txt", b"12345678")
    assert f"no file matches '{tmp_path}/none/*'" in refused(DataSpec(text=(f"{tmp_path}/none/*",)))
    assert "only directories match" in refused(DataSpec(text=(f"{tmp_path}/sh*",)))
    os.mkfifo(tmp_path / "pipe")
    assert f"{tmp_path}/pipe is not a regular file" in refused(DataSpec(text=(f"{tmp_path}/pi*",)))
    assert "/dev/null is not a regular file" in refused(DataSpec(text=("/dev/null",)))
    assert "/dev/zero is not a regular file" in refused(DataSpec(tokens="/dev/zero"))
    assert f"{tmp_path} is not a regular file" in refused(DataSpec(tokens=str(tmp_path)))
    assert "from /" in refused(DataSpec(text=("nowhere-here/*.txt",)))
    text = refused(DataSpec(text=(f"{tmp_path}/short/*",)))
    assert f"{tmp_path}/short/* holds 8 tokens, too few for one row of 9" in text
    assert f"cannot read {tmp_path}/no.bin" in refused(DataSpec(tokens=f"{tmp_path}/no.bin"))
    odd = write(tmp_path / "odd.bin", bytes(33))
    text = refused(DataSpec(tokens=str(odd), dtype="uint16"))
    assert "33 bytes, not a whole number of uint16 tokens" in text
    text = refused(DataSpec(tokens=str(odd)))
    assert f"the type of the ids in {odd} is unknown" in text
    assert "set dtype to uint8, uint16 or uint32" in text


def test_tokens_beyond_the_vocabulary_are_refused_at_once_or_when_read(tmp_path):
    write(tmp_path / "a.txt", b"plain text, then \xc3\xa9")
    text = refused(DataSpec(text=(f"{tmp_path}/a.txt",)), vocabulary=128)
    assert "token 195" in text
    assert "model.vocabulary (128)" in text
    np.array([*range(100), 500, 7], dtype=np.uint16).tofile(tmp_path / "small.bin")
    text = refused(DataSpec(tokens=f"{tmp_path}/small.bin", dtype="uint16"), vocabulary=500)
    assert f"token 500 at position 100 of {tmp_path}/small.bin is not below" in text
    assert refused(DataSpec(tokens=f"{tmp_path}/small.bin", dtype="uint16"), vocabulary=100)
    Dataset(DataSpec(tokens=f"{tmp_path}/small.bin", dtype="uint16"), 8, 501)


def test_large_files_are_not_looked_through_at_the_start(tmp_path):
    with open(tmp_path / "large.bin", "wb") as file:
        file.truncate((1 << 28) + (1 << 22))
        file.seek(2 * 64)
        file.write(bytes([244, 1]))
    dataset = Dataset(DataSpec(tokens=f"{tmp_path}/large.bin", dtype="uint16"), 1 << 20, 500)
    with pytest.raises(DataError, match="token 500 at position 64 of"):
        dataset.rows(0, 1, range(dataset.order.samples), dataset.order.samples)


def test_a_file_that_shrinks_is_an_error_and_no_crash(tmp_path):
    path = write(tmp_path / "a.txt", bytes(100))
    dataset = Dataset(DataSpec(text=(str(path),)), 8, 256)
    path.write_bytes(bytes(50))
    with pytest.raises(DataError, match="has become shorter since the job began"):
        whole(dataset)
    path.unlink()
    with pytest.raises(DataError, match="cannot read"):
        whole(dataset)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40
)
@given(
    windows=st.integers(10, 400),
    share=st.floats(0.001, 0.9),
    seed=st.integers(0, 9),
    batch=st.integers(1, 17),
)
def test_held_out_windows_are_never_trained_on(tmp_path, windows, share, seed, batch):
    ids = np.arange(2 * windows + 1, dtype=np.uint16)
    ids.tofile(tmp_path / "a.bin")
    dataset = Dataset(
        DataSpec(tokens=f"{tmp_path}/a.bin", dtype="uint16"), 2, 1 << 16, held_out=share
    )
    held_out = [int(row[0]) for row in dataset.held_out_rows(range(dataset.order.held_out))]
    assert len(set(held_out)) == len(held_out) == max(1, round(share * windows))
    trained: list[int] = []
    epoch = windows - len(held_out)
    for step in range(1, 2 * epoch // batch + 2):
        trained += dataset.rows(seed, step, range(batch), batch)[:, 0].tolist()
    assert not set(trained) & set(held_out)
    assert sorted(trained[:epoch] + held_out) == list(range(0, 2 * windows, 2))


def test_the_split_does_not_depend_on_the_seed_and_is_spread(tmp_path):
    np.arange(2001, dtype=np.uint16).tofile(tmp_path / "a.bin")
    spec = DataSpec(tokens=f"{tmp_path}/a.bin", dtype="uint16")
    rows = Dataset(spec, 2, 1 << 16, held_out=0.2).held_out_rows(range(200))
    quarters = np.bincount(rows[:, 0] // 500, minlength=4)
    assert quarters.min() > 25
    prints = [Dataset(spec, 2, 1 << 16, held_out=share).fingerprint for share in (0, 0.1, 0.2)]
    assert len(set(prints)) == 3  # a checkpoint of one split does not fit another one
    own = Dataset(spec, 2, 1 << 16, held_out=1.0)
    assert own.order.held_out == own.order.samples == 1000
    assert sorted(own.held_out_rows(range(1000))[:, 0].tolist()) == list(range(0, 2000, 2))
    with pytest.raises(DataError, match="too few to hold out a share of"):
        Dataset(spec, 1500, 1 << 16, held_out=0.5)
