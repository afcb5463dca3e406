"""What worker tests share: a small job on real bytes, and one warm process for real workers.

Loading torch takes seconds, forking milliseconds. Torch gets one thread: the tests share the
machine.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.support.preloaded import Preloaded
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from support import devices
from support.director import WarmWorkers

MakeJob = Callable[..., JobSpec]


@pytest.fixture(scope="session")
def forking(request: pytest.FixtureRequest) -> Preloaded | None:
    """What forks warm processes; None: they are to use a GPU, for which it is not set up."""
    if devices.device().type != "cpu":
        return None
    found: Preloaded = request.getfixturevalue("preloaded")
    return found


@pytest.fixture(scope="session")
def warm(forking: Preloaded | None) -> Iterator[WarmWorkers]:
    with WarmWorkers(preloaded=forking) as warm:
        yield warm


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pattern that matches three files of 3000 random bytes in all."""
    folder = tmp_path_factory.mktemp("text")
    content = np.random.default_rng(7).integers(0, 64, 3000, dtype=np.uint8).tobytes()
    for name, start, end in (("a.txt", 0, 1000), ("b.txt", 1000, 1017), ("sub/c.txt", 1017, 3000)):
        path = Path(folder, name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content[start:end])
    return f"{folder}/**/*.txt"


@pytest.fixture
def make_job(text: str) -> MakeJob:
    """A job of few parameters; keyword arguments go to the spec that has them."""

    def make(**fields: object) -> JobSpec:
        known = ("layers", "hidden", "heads", "sequence_length", "vocabulary", "tied", "dropout")
        model = {key: fields.pop(key) for key in known if key in fields}
        return JobSpec(
            name="small",
            model=ModelSpec(
                **{"layers": 3, "hidden": 16, "heads": 2, "sequence_length": 8, **model}
            ),
            data=DataSpec(text=(text,)),
            training=TrainingSpec(
                **{"steps": 6, "global_batch": 6, "microbatch": 2, "precision": "fp64", **fields}
            ),
        )

    return make
