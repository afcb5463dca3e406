"""Layers through torch's compiler: which ones are, and what they compute meanwhile and after."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._dynamo.backends.registry import lookup_backend

from oobleck.core.job.code import Json
from oobleck.core.job.description import Description, read_description
from oobleck.core.job.file import parse_job
from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.spec import EvaluationSpec, JobSpec
from oobleck.worker.data.opening import open_dataset
from oobleck.worker.data.own import OwnDataset
from oobleck.worker.describe import look_at
from oobleck.worker.models import compiled
from oobleck.worker.profiling.measure_layers import pass_once
from oobleck.worker.profiling.preflight import preflight
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import NodeError
from support import foreign

MakeJob = Callable[..., JobSpec]

CPU = torch.device("cpu")
JOB = """\
name: compiled
model: {{python: "support.compiled_models:{model}", arguments: {{{arguments}}}}}
data: {{python: "support.compiled_models:Points"}}
training: {{steps: 8, global_batch: 8, microbatch: 2, precision: {precision}, compile: true}}
"""


@pytest.fixture(autouse=True)
def _allowed() -> Iterator[None]:
    code.allow((code.ANY,))
    yield
    code.allow(())


@cache
def looked_at(
    model: str, precision: str = "fp64", arguments: str = ""
) -> tuple[JobSpec, list[str], Description]:
    """The job with its model described, and what is said of it."""
    job = parse_job(JOB.format(model=model, precision=precision, arguments=arguments))
    assert isinstance(job.model, OwnModelSpec)
    found = look_at(job, always=False)
    assert all(problem.warning for problem in found.problems), found.problems
    known = replace(job.model, described=Json(found.descriptions["model"]))
    return replace(job, model=known), list(map(str, found.problems)), known.description


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.soak)])
def test_layers_of_one_code_share_it_and_those_that_are_not_compiled_are_told(
    precision: str,
) -> None:
    job, said, description = looked_at("kinds", precision)
    assert [layer.compiled for layer in description.layers] == [0, 1, 2, 1, 3, None, None, None]
    attends, chooses, last = said
    drawing = "is not compiled: it draws random numbers, which are other ones in compiled code; "
    assert attends == f"layer 5 (Attends): {drawing}it runs as it is"
    assert chooses.startswith("layer 6 (Chooses): is not compiled: ")
    assert chooses.endswith(f" (compiled_models.py:{line_of('if bool')}); it runs as it is")
    assert last == f"layer 7 (Last): {drawing}it runs as it is"
    # A draw follows from all rows of a micro-batch.
    assert [job.model.may_share(n) for n in range(8)] == [n not in (5, 7) for n in range(8)]


def points(job: JobSpec) -> OwnDataset:
    assert job.data.code is not None
    return OwnDataset(job.data.code, wide=job.training.precision == "fp64")


def line_of(text: str) -> int:
    source = Path(__file__).parents[2] / "support" / "compiled_models.py"
    return next(n for n, line in enumerate(source.read_text().splitlines(), 1) if text in line)


def test_codes_without_end_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MOST_CODES", 3)  # of 16: each takes a while
    _, said, description = looked_at("numbered", arguments="count: 5")
    assert [layer.compiled for layer in description.layers[:-1]] == [*range(3), *[None] * 2]
    assert "other layers have 3 codes already, and it fits none" in said[0]


def test_a_job_that_does_not_want_it_has_nothing_compiled() -> None:
    job = parse_job(JOB.format(model="kinds", precision="fp64", arguments=""))
    plain = replace(job, training=replace(job.training, compile=False))
    found = look_at(plain, always=False)
    assert found.problems == []
    known = read_description(Json(found.descriptions["model"]))
    assert {(kind.compiled, kind.not_compiled) for kind in known.kinds} == {(None, "")}


@pytest.fixture
def traced() -> Iterator[None]:
    """What would be compiled into machine code is traced alone; nothing is left behind."""
    compiled._compiled.cache_clear()
    torch.compiler.reset()
    before = torch._inductor.config.compile_threads
    with torch.compiler.set_stance("default"):
        yield
    torch._inductor.config.compile_threads = before
    compiled._compiled.cache_clear()
    torch.compiler.reset()


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.soak), "layer"])
@pytest.mark.usefixtures("traced")
def test_of_what_is_compiled_nothing_runs_as_it_is(
    recompute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = tmp_path / "noted"
    job, _, description = looked_at("mixed", "fp32", f"noted: {noted}")
    assert [layer.compiled for layer in description.layers] == [0, 1, 2, 2, None, None]
    evaluation = EvaluationSpec(every=1, fraction=0.5)
    training = replace(job.training, recompute=recompute)
    job = replace(job, training=training, evaluation=evaluation)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "compiled", partial(compiled.compiled, backend="aot_eager"))
    preflight(job, CPU, points(job), workers=2)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    noted.unlink()
    for layer in (0, 3, 1):  # other modules of the same code
        pass_once(job, layer, CPU)
    assert not noted.exists()
    # Nor as one of two workers that share it.
    pass_once(job, 1, CPU, sharing=2)
    assert not noted.exists()
    # A micro-batch of other rows is not compiled for, and does not wait for that.
    rows = replace(job, training=replace(training, microbatch=4))
    pass_once(rows, 1, CPU)
    assert noted.exists()


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [
        *(("gpt", "layer"), ("gpt2", "layer"), ("llama", "none"), ("bert", "layer")),
        *(
            pytest.param(*other, marks=pytest.mark.soak)
            for other in (("gpt", "none"), ("gpt2", "none"), ("llama", "layer"), ("bert", "none"))
        ),
    ],
)
@pytest.mark.usefixtures("traced")
def test_blocks_of_built_in_models_are_compiled_once_for_each_number_of_sharers(
    kind: str, recompute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_job: MakeJob
) -> None:
    ran: list[int] = []
    traced = lookup_backend("aot_eager")

    def counted(graph: Any, inputs: Any) -> Callable[..., Any]:
        made = traced(graph, inputs)
        return lambda *given: (ran.append(len(given[0])), made(*given))[1]

    job = make_job(precision="bf16", recompute=recompute, microbatch=2, compile=True)
    if kind != "gpt":
        job = replace(job, model=foreign.spec(kind, sequence_length=8))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "compiled", partial(compiled.compiled, backend=counted))
    preflight(job, CPU, open_dataset(make_job(), job.data, {}), workers=2)
    ran.clear()
    with torch.compiler.set_stance("fail_on_recompile"):
        for layer in range(job.model.layer_count):
            pass_once(job, layer, CPU)
            pass_once(job, layer, CPU, sharing=2)
    passes = 1 if recompute == "none" else 2
    assert len(ran) == (job.model.layer_count - 2) * 2 * passes


def test_dropout_by_sample_is_not_compiled(make_job: MakeJob) -> None:
    with pytest.raises(ValueError, match=r"^compile: dropout \(0.1\) .* set dropout to 0, or"):
        make_job(compile=True, dropout=0.1)


def _hold(folder: Path, said: Connection) -> None:
    with compiled._after_the_first(folder):
        said.send("in")
        said.recv()


def test_the_first_worker_of_a_host_compiles_alone_and_the_others_after_it_together(
    tmp_path: Path,
) -> None:
    begun = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        ends = []
        for _ in range(3):
            mine, theirs = begun.Pipe()
            process = begun.Process(target=_hold, args=(tmp_path, theirs))
            process.start()
            stack.callback(process.join)
            stack.callback(mine.close)
            ends.append(mine)
            if len(ends) == 1:
                assert mine.recv() == "in"
        first, *others = ends
        wait_for_waiters(tmp_path / "lock", 2)
        assert not any(end.poll() for end in others)
        first.send("out")
        # Both are in at once: neither is let out before the other is in.
        assert [end.recv() for end in others] == ["in", "in"]
        for end in others:
            end.send("out")


def wait_for_waiters(lock: Path, count: int) -> None:
    """Until so many processes wait for the lock, by the kernel's list."""
    inode, deadline = f":{lock.stat().st_ino} ", time.monotonic() + 120
    while time.monotonic() < deadline:
        lines = Path("/proc/locks").read_text().splitlines()
        if sum("->" in line and inode in line for line in lines) == count:
            return
        time.sleep(0.01)
    raise AssertionError("they do not wait")


@pytest.mark.usefixtures("traced")
def test_a_node_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job, _, _ = looked_at("alike")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    missing = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with (
        missing,
        pytest.raises(NodeError, match=r"no C\+\+ compiler .* apt-get install g\+\+, or leave"),
    ):
        preflight(job, CPU, points(job))


@pytest.mark.usefixtures("traced")
def test_a_place_that_others_can_write_to_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job, _, _ = looked_at("alike")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o777)
    with pytest.raises(NodeError, match=r"is not a folder that only the agent's user can write"):
        preflight(job, CPU, points(job))


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("place", ["/proc/1/compiled", "~/.cache/oobleck/compiled"])
def test_a_place_that_cannot_be_made_is_refused_with_the_fix(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job, _, _ = looked_at("alike")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", place)
    with pytest.raises(NodeError, match=rf"{place}, where torch .* start the agent with a HOME"):
        preflight(job, CPU, points(job))
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("traced")
def test_what_cannot_be_compiled_on_a_node_is_that_nodes_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(graph: object, inputs: object) -> None:
        raise RuntimeError("the disk is full")

    job, _, _ = looked_at("alike")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "compiled", partial(compiled.compiled, backend=fails))
    with pytest.raises(
        NodeError, match=r"layer 0 cannot be compiled on this machine: .*disk is full"
    ):
        preflight(job, CPU, points(job))
