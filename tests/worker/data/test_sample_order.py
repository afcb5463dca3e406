"""The order of samples is that of docs/sample-order.md, as another program reads it."""

from pathlib import Path

import numpy as np
import pytest

from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, EvaluationSpec, JobSpec, TrainingSpec
from oobleck.worker.data.dataset import Dataset
from oobleck.worker.data.objective import permute
from oobleck.worker.data.opening import HeldOut
from support import samples as documented
from support.samples import Samples

LENGTH = 4


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 255, 256, 257, 1000])
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (0, 1), (7, 0), (2**31 - 1, 12), (0, -1)])
def test_every_place_of_a_shuffle(size: int, seed: int, epoch: int) -> None:
    image = permute(np.arange(size, dtype=np.uint64), size, seed=seed, epoch=epoch)
    assert image.tolist() == [documented.permute(x, size, seed, epoch) for x in range(size)]


@pytest.mark.parametrize("size", [2**20 + 1, 2**32, 2**33 - 5, 2**62])
def test_places_of_a_large_corpus(size: int) -> None:
    chosen = [0, 1, size // 3, size - 2, size - 1]
    image = permute(np.array(chosen, dtype=np.uint64), size, seed=3, epoch=9)
    assert image.tolist() == [documented.permute(x, size, 3, 9) for x in chosen]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Files whose order of names is not that of their making."""
    content = np.random.default_rng(0).integers(0, 256, 1003).astype(np.uint8).tobytes()
    (tmp_path / "z.txt").write_bytes(content[600:])
    (tmp_path / "a.txt").write_bytes(content[:600])
    return tmp_path


def corpus(texts: Path) -> bytes:
    return (texts / "a.txt").read_bytes() + (texts / "z.txt").read_bytes()


@pytest.mark.parametrize("fraction", [None, 0.001, 0.1, 0.125, 0.5])
@pytest.mark.parametrize("seed", [0, 5])
def test_the_rows_of_steps_over_several_epochs(
    texts: Path, fraction: float | None, seed: int
) -> None:
    spec = DataSpec(text=(f"{texts}/*.txt", f"{texts}/a.txt"))
    dataset = Dataset(spec, LENGTH, 256, held_out=fraction or 0.0)
    expected = Samples(corpus(texts), LENGTH, fraction)
    batch = 32
    for step in range(1, 3 * expected.windows // batch + 1):
        rows = dataset.rows(seed, step, range(batch), batch)
        assert rows.tolist() == expected.step(step, batch, seed)


def job(texts: Path, evaluation: EvaluationSpec) -> JobSpec:
    return JobSpec(
        name="order",
        model=ModelSpec(layers=2, hidden=8, heads=2, sequence_length=LENGTH),
        data=DataSpec(text=(f"{texts}/*.txt",)),
        training=TrainingSpec(steps=1, global_batch=6, microbatch=3),
        evaluation=evaluation,
    )


def rows_of(held_out: HeldOut) -> list[list[int]]:
    return [
        row for number in range(held_out.microbatches) for row in held_out.rows(number).tolist()
    ]


@pytest.mark.parametrize("most", [1024, 20])
def test_the_samples_that_are_held_out(texts: Path, most: int) -> None:
    evaluation = EvaluationSpec(every=1, fraction=0.1, samples=most)
    wanted = job(texts, evaluation)
    dataset = Dataset(wanted.data, LENGTH, 256, held_out=0.1)
    expected = Samples(corpus(texts), LENGTH, 0.1).evaluated(most)
    assert rows_of(HeldOut(wanted, evaluation, dataset, {})) == expected
    assert len(expected) == (25 if most > 25 else 20)


def test_the_samples_of_data_of_their_own(texts: Path) -> None:
    evaluation = EvaluationSpec(every=1, data=DataSpec(text=(f"{texts}/a.txt",)), samples=50)
    wanted = job(texts, evaluation)
    found = rows_of(HeldOut(wanted, evaluation, Dataset(wanted.data, LENGTH, 256), {}))
    assert found == Samples(corpus(texts)[:600], LENGTH, 1.0).evaluated(50)
