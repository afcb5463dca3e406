"""Rows read ahead are those that would be read now, whatever steps and plans come after."""

import threading
from pathlib import Path

import numpy as np
import pytest

from oobleck.core.job.spec import DataSpec, TrainingSpec
from oobleck.host.token_file import DataError
from oobleck.worker.data.dataset import Dataset, row_digest
from oobleck.worker.data.opening import Prefetcher

TRAINING = TrainingSpec(steps=5, global_batch=12, microbatch=2, seed=3)


class Watched(Dataset):
    """Notes who reads what."""

    def rows(self, seed, step, positions, global_batch):
        self.reads.append((step, positions[0] // 2, threading.current_thread().name))
        return super().rows(seed, step, positions, global_batch)


@pytest.fixture
def dataset(tmp_path: Path) -> Watched:
    (tmp_path / "a.txt").write_bytes(np.random.default_rng(0).bytes(1000))
    dataset = Watched(DataSpec(text=(f"{tmp_path}/a.txt",)), 8, 256)
    dataset.reads = []
    return dataset


def check(prefetcher: Prefetcher, dataset: Watched, step: int, microbatches: list[int]) -> None:
    for m in microbatches:
        loaded = prefetcher.take(step, m)
        expected = Dataset.rows(dataset, 3, step, range(2 * m, 2 * m + 2), 12)
        assert loaded.positions == range(2 * m, 2 * m + 2)
        assert np.array_equal(loaded.rows, expected)
        assert loaded.digests == tuple(map(row_digest, expected))


def test_each_row_is_read_once_by_the_thread_a_step_ahead(dataset):
    prefetcher = Prefetcher(dataset, TRAINING)
    for step in range(1, 6):
        prefetcher.begin(step, [4, 1], [4, 1])
        check(prefetcher, dataset, step, [4, 1])
    prefetcher.close()
    assert [read[:2] for read in dataset.reads] == [(s, m) for s in range(1, 6) for m in (4, 1)]
    assert all(name.startswith("prefetch") for _, _, name in dataset.reads)


def test_a_step_that_is_done_again_on_another_plan_reads_only_what_is_new(dataset):
    prefetcher = Prefetcher(dataset, TRAINING)
    prefetcher.begin(2, [0, 1, 2], [0, 1, 2])
    check(prefetcher, dataset, 2, [0, 1, 2])
    prefetcher.take(3, 2)
    dataset.reads.clear()
    prefetcher.begin(2, [1, 2, 5], [1, 2, 5])
    check(prefetcher, dataset, 2, [1, 2, 5])
    prefetcher.begin(3, [5], [5])
    check(prefetcher, dataset, 3, [5])
    prefetcher.begin(2, [0], [0])  # back to an older step, as after a checkpoint
    check(prefetcher, dataset, 2, [0])
    prefetcher.take(3, 0)
    prefetcher.close()
    assert [read[:2] for read in dataset.reads if read[0] < 4] == [(2, 5), (3, 5), (2, 0), (3, 0)]


def test_what_cannot_be_read_is_told_in_its_step_and_not_before(dataset, tmp_path):
    prefetcher = Prefetcher(dataset, TRAINING)
    prefetcher.begin(1, range(6), range(6))
    check(prefetcher, dataset, 1, list(range(6)))
    prefetcher.take(2, 5)
    (tmp_path / "a.txt").write_bytes(b"short")
    prefetcher.begin(2, range(6), range(6))
    assert len(prefetcher.take(2, 0).rows) == 2
    prefetcher.begin(3, range(6), range(6))
    with pytest.raises(DataError, match=r"has become shorter .* \(step 3\)"):
        prefetcher.take(3, 0)
    prefetcher.close()
