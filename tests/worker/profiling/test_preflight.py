"""What is wrong on one node alone with the user's code is found before a step, and costs that node
alone its part; each by what is really missing."""

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from threading import Timer

import pytest
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from oobleck.core.job.file import parse_job
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import Failed, FromWorker, ToWorker
from oobleck.host.ipc.channel import Channel
from oobleck.worker.data.opening import open_dataset
from oobleck.worker.data.own import Loaders, OwnDataset
from oobleck.worker.describe import look_at
from oobleck.worker.models.base import Layer
from oobleck.worker.profiling.preflight import MARGIN_S, on_this_node, preflight
from oobleck.worker.runtime import code
from oobleck.worker.runtime.control import Control
from oobleck.worker.runtime.errors import JobError, NodeError
from support import unlike_nodes
from support.unlike_nodes import WRONG

CPU = torch.device("cpu")
JOB = """\
name: unlike
model: {python: "support.unlike_nodes:model"}
data: {python: "support.unlike_nodes:Points"}
training:
  {steps: 8, global_batch: 8, microbatch: 4, optimizer: {python: "support.unlike_nodes:Rule"}}
evaluation: {every: 4, fraction: 0.25, samples: 4}
"""


@pytest.fixture(autouse=True)
def _allowed() -> Iterator[None]:
    code.allow((code.ANY,))
    yield
    code.allow(())


@lru_cache
def described() -> JobSpec:
    """The job as it is submitted, where nothing is wrong."""
    job = parse_job(JOB)
    found = look_at(job, always=False)
    assert not found.problems
    optimizer = replace(job.training.optimizer, described=found.descriptions["optimizer"])
    return replace(
        job,
        model=replace(job.model, described=found.descriptions["model"]),
        training=replace(job.training, optimizer=optimizer),
    )


@pytest.fixture
def ends() -> Iterator[tuple[Control, Channel[FromWorker]]]:
    """The worker's end of its channel, and the agent's."""
    worker, agent = socket.socketpair()
    with worker, agent:
        yield Control(Channel(worker, ToWorker)), Channel(agent, FromWorker)


def points(job: JobSpec) -> OwnDataset:
    assert job.data.code is not None
    return OwnDataset(job.data.code, wide=False)


def begin(job: JobSpec, control: Control, most_s: float | None = None) -> None:
    """As a worker does before it is ready."""
    ready_by = None if most_s is None else time.monotonic() + MARGIN_S + most_s
    with on_this_node(job, control, ready_by):
        preflight(job, CPU, points(job))


def test_where_nothing_is_wrong_a_node_passes(ends) -> None:
    begin(described(), ends[0], 60)


def test_layers_and_loss_are_tried_with_numbers_that_training_begins_with(
    ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `oobleck check` does: a scale that must be above 0 may fail with any others."""
    job = described()
    monkeypatch.setenv(WRONG, "numbers")
    begin(job, ends[0])


LINE = r"\(unlike_nodes\.py:\d+\)"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            "tools",
            rf"model: layer 1 \(Middle\) failed: ModuleNotFoundError: No module named "
            rf"'tools_of_a_node' {LINE}; install tools_of_a_node on every node",
        ),
        (
            "metrics",
            rf"model: the metrics failed: ValueError: no scale here {LINE}; give every node the "
            "same packages and files, or correct the code",
        ),
        (
            "optimizer",
            rf"optimizer: Rule failed: ValueError: no kernel for this device {LINE}; give .*",
        ),
        ("samples", rf"data: sample 0: KeyError: 0 {LINE}; give every node .*"),
        (
            "memory",
            r"model: layer 1 alone does not fit on this node's cpu \(.*\); free its memory, or "
            r"lower training\.microbatch",
        ),
    ],
)
def test_it_is_the_nodes_fault_and_says_what_to_do(
    wrong: str, said: str, ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = described()
    monkeypatch.setenv(WRONG, wrong)
    with pytest.raises(NodeError) as raised:
        begin(job, ends[0])
    assert re.fullmatch(said, str(raised.value)), raised.value


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("sys.exit", rf"data: sample 0: SystemExit: I leave {LINE}"),
        ("os._exit", "data: sample 0: the user's code ended the process with status 0"),
    ],
)
def test_a_sample_that_ends_the_process_that_reads_it_is_the_jobs_fault(
    wrong: str, said: str, ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = described()
    monkeypatch.setenv(WRONG, wrong)
    assert job.data.code is not None
    loaders = Loaders(job.data.code, wide=False, key="data", processes=1)
    monkeypatch.delenv(WRONG)  # it is there alone
    try:
        with pytest.raises(JobError, match=f"^{said}$"), on_this_node(job, ends[0], None):
            OwnDataset(job.data.code, wide=False, loaders=loaders)
    finally:
        loaders.close()


def test_what_says_its_fix_itself_is_told_as_it_is(ends) -> None:
    said = pytest.raises(NodeError, match=r"^data: give more$")
    with said, on_this_node(described(), ends[0], None):
        raise JobError("data: give more")


def test_what_is_wrong_with_a_job_without_code_of_its_own_is_the_jobs_fault(ends, make_job) -> None:
    """Nor does the time that it takes count, as to read much text for the first time."""
    later, said = time.monotonic() + 3600, pytest.raises(JobError, match="no such key")
    with said, on_this_node(make_job(), ends[0], later):
        assert not any(isinstance(thread, Timer) for thread in threading.enumerate())
        raise JobError("no such key")


def passed_through(job: JobSpec, workers: int) -> set[tuple[str, int]]:
    """The second and third layers that are tried, each with the number of rows that it got."""
    passed = set[tuple[str, int]]()

    def note(module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, unlike_nodes.Middle | unlike_nodes.Last):
            passed.add((type(module).__name__, len(given[0])))

    with register_module_forward_pre_hook(note):
        preflight(job, CPU, points(job), workers=workers)
    return passed


def test_a_layer_that_workers_may_share_need_not_have_room_on_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one above it gets random rows, which prove nothing against it."""
    monkeypatch.setenv(WRONG, "memory")
    tried = passed_through(described(), workers=2)
    assert tried == {("Middle", 4), ("Middle", 2), ("Last", 4)}


def test_a_layer_that_fits_only_where_it_is_shared_is_tried_like_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one above it gets what it makes of these rows."""
    monkeypatch.setenv(WRONG, "rows")
    tried = passed_through(described(), workers=4)
    assert tried == {("Middle", 4), ("Middle", 2), ("Last", 4)}


def test_what_has_passed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a worker in the place of one that was killed."""
    job = described()
    monkeypatch.setenv(WRONG, "tools")
    preflight(job, CPU, points(job), passed=True)


BUILT_IN = """\
name: known
model: {layers: 3, hidden: 32, heads: 2, sequence_length: 16, dropout: 0.1}
data: {text: [LICENSE]}
training: {steps: 8, global_batch: 8, microbatch: 4}
"""


@pytest.mark.parametrize(
    ("hidden", "ran"), [(32, {"Embedding", "Block", "Head"}), (4096, {"Embedding", "Head"})]
)
def test_a_built_in_model_has_had_its_first_pass_and_nothing_is_changed(
    hidden: int, ran: set[str]
) -> None:
    """But of a layer that is so large that it would take long."""
    job = parse_job(BUILT_IN.replace("hidden: 32", f"hidden: {hidden}"))
    random, layers = torch.get_rng_state(), set[str]()
    hook = register_module_forward_hook(
        lambda module, given, found: (
            layers.add(type(module).__name__) if isinstance(module, Layer) else None
        )
    )
    with hook:
        preflight(job, CPU, open_dataset(job, job.data, {}), passed=True)
    assert layers == ran
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled()


def test_code_that_does_not_end_is_the_nodes_fault_too(
    ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, agent = ends
    job = described()
    monkeypatch.setenv(WRONG, "time")
    if (pid := os.fork()) == 0:
        begin(job, worker, 0.1)
        os._exit(0)  # not reached
    failed = agent.receive()
    assert isinstance(failed, Failed)
    assert failed.kind == "node"
    assert failed.message.startswith("the job's code is still running on this machine after 0.1 s")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
