"""Samples that processes read are those that a thread would read, and the processes end with the
worker."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from oobleck.core.codec import decode
from oobleck.core.job.code import NO_ARGUMENTS, Code, Json
from oobleck.core.job.spec import DataSpec, EvaluationSpec, JobSpec, TrainingSpec
from oobleck.host.token_file import DataError
from oobleck.worker.data.opening import Prefetcher, start_loaders
from oobleck.worker.data.own import Loaders, OwnDataset
from oobleck.worker.data.samples import Samples
from oobleck.worker.models.tree import flatten
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import HelperLost, JobError, NodeError
from support.sketches import LAYER, model_of
from support.waiting import all_gone

CODE = '''
import os

import numpy as np
import torch


class Data:
    """Rows of a file that is kept open, with one position."""

    def __init__(self, fails=-1, ends=-1, exits=-1):
        self.file = os.open(__file__.replace(".py", ".bin"), os.O_RDONLY)
        self.fails, self.ends, self.exits = fails, ends, exits

    def __len__(self):
        return 64

    def __getitem__(self, i):
        if i == self.fails:
            raise KeyError("no such sample")
        if i == self.ends:
            os.kill(os.getpid(), 9)
        if i == self.exits:
            os._exit(0)
        with open(__file__ + ".readers", "a") as readers:
            readers.write(f"{os.getpid()} ")
        os.lseek(self.file, 16 * i, os.SEEK_SET)
        row = np.frombuffer(os.read(self.file, 16), np.float32)
        half = torch.tensor([i], dtype=torch.bfloat16)
        return {"row": row, "more": (half, torch.ones(2, 0), i % 2 == 0)}, i
'''
TRAINING = TrainingSpec(steps=6, global_batch=12, microbatch=3, seed=3)


def opened(source: Code, processes: int, *, wide: bool = False) -> OwnDataset:
    loaders = Loaders(source, wide=wide, key="data", processes=processes) if processes else None
    return OwnDataset(source, wide=wide, loaders=loaders)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Code]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "loaded_samples.py").write_text(CODE)
    (tmp_path / "loaded_samples.bin").write_bytes(np.arange(256, dtype=np.float32).tobytes())
    code.allow((code.ANY,))
    yield Code(name="loaded_samples:Data", group=None, path=str(tmp_path), arguments=NO_ARGUMENTS)
    code.allow(())
    for left in multiprocessing.active_children():  # of a test that failed: pytest would wait
        left.kill()
    sys.modules.pop("loaded_samples", None)


def test_processes_give_the_samples_of_the_thread_in_order_on_any_plan(
    source: Code, tmp_path: Path
) -> None:
    here, apart = (opened(source, processes, wide=True) for processes in (0, 2))
    noted = tmp_path / "loaded_samples.py.readers"

    def check(found: Samples, expected: Samples) -> None:
        pairs = zip(flatten(found.inputs), flatten(expected.inputs), strict=True)
        for one, other in pairs:
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert torch.equal(one, other)
        assert torch.equal(found.targets, expected.targets)
        assert found.digests == expected.digests

    assert apart.fingerprint == here.fingerprint
    noted.unlink()
    loads = {}
    prefetcher = Prefetcher(apart, TRAINING, threads=2)
    plans = {1: [0, 2], 2: [0, 2], 3: [1, 2, 3], 4: [1], 5: [3, 0, 1, 2]}
    for step, microbatches in plans.items():
        prefetcher.begin(step, microbatches, microbatches)
        for m in microbatches:
            loaded = prefetcher.take(step, m)
            loads[step, m] = loaded
    prefetcher.close()
    apart.close()
    assert str(os.getpid()) not in noted.read_text().split()
    for (step, _), loaded in loads.items():
        assert isinstance(loaded.rows, Samples)
        check(loaded.rows, here.rows(3, step, loaded.positions, 12))


def test_all_processes_are_forked_before_any_of_them_has_a_thread(
    source: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor has the user's code been called by then."""
    data = DataSpec(python=source.name, path=source.path, workers=2)
    evaluation = EvaluationSpec(every=1, data=replace(data, workers=1))
    job = JobSpec(
        name="own", model=model_of(LAYER), data=data, evaluation=evaluation, training=TRAINING
    )
    fork, threads = os.fork, list[int]()
    monkeypatch.setattr(os, "fork", lambda: threads.append(threading.active_count()) or fork())
    before = threading.active_count()
    loaders = start_loaders(job)
    assert threads == [before] * 3
    assert "loaded_samples" not in sys.modules
    for own in loaders.values():
        assert own.stacked([3, 1], opened(source, 0).form).targets.tolist() == [3, 1]
        own.close()


def test_what_a_sample_raises_is_told_as_by_the_thread_with_its_traceback(source: Code) -> None:
    told = []
    for processes in (0, 2):
        failing = Code(
            name=source.name, group=None, path=source.path, arguments=Json('{"fails": 20}')
        )
        dataset = opened(failing, processes)
        with pytest.raises(JobError, match=r"sample 20: KeyError.*loaded_samples\.py") as caught:
            dataset.rows(3, 1, range(64), 64)
        told.append(str(caught.value))
        # What the worker's log shows of it.
        assert caught.value.__cause__ is not None
        if processes:
            assert 'raise KeyError("no such sample")' in str(caught.value.__cause__)
        dataset.close()
    assert told[0] == told[1]


def test_a_process_that_dies_is_a_helpers_loss_and_none_waits_for_it(source: Code) -> None:
    dying = Code(name=source.name, group=None, path=source.path, arguments=Json('{"ends": 20}'))
    dataset = opened(dying, 2)
    for _ in range(2):  # nor later
        with pytest.raises(HelperLost, match=r"on this machine was killed.*lower data\.workers"):
            dataset.rows(3, 1, range(64), 64)
    dataset.close()


def test_a_process_that_the_users_code_ends_is_the_jobs_error_with_the_sample(
    source: Code,
) -> None:
    leaving = Code(name=source.name, group=None, path=source.path, arguments=Json('{"exits": 20}'))
    dataset = opened(leaving, 2)
    told = "data: sample 20: the user's code ended the process with status 0"
    for _ in range(2):
        with pytest.raises(JobError, match=f"^{told}$"):
            dataset.rows(3, 1, range(64), 64)
    dataset.close()


WORKER = """
import multiprocessing
import sys
import time

from oobleck.core.job.code import NO_ARGUMENTS, Code
from oobleck.worker.data.own import Loaders
from oobleck.worker.runtime import code

code.allow((code.ANY,))
source = Code(
    name="loaded_samples:Data", group=None, path=sys.argv[1], arguments=NO_ARGUMENTS
)
loaders = Loaders(source, wide=False, key="data", processes=3)
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
time.sleep(1000)
"""


def test_no_process_is_left_of_a_worker_that_was_killed(source: Code) -> None:
    command = [sys.executable, "-c", WORKER, str(source.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        loaders = [psutil.Process(int(pid)) for pid in worker.stdout.readline().split()]
        worker.send_signal(signal.SIGKILL)
    assert len(loaders) == 3
    all_gone(loaders)


def test_only_a_data_set_of_ones_own_has_processes() -> None:
    with pytest.raises(ValueError, match=r"^workers: .*text and tokens need none"):
        DataSpec(text=("x",), workers=2)
    with pytest.raises(ValueError, match=r"`int` >= 0 - at `\$\.workers`"):
        decode(DataSpec, '{"python": "mine:data", "workers": -1}')


def test_data_that_is_gone_is_this_nodes_error(tmp_path: Path, source: Code) -> None:
    (tmp_path / "loaded_samples.bin").unlink()
    with pytest.raises((DataError, NodeError), match="No such file"):
        opened(source, 2)
