"""A checkpoint's files, written in this process, on disk and elsewhere; what is made of them."""

import errno
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from click.testing import CliRunner, Result
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from oobleck.cli.main import oobleck
from oobleck.core.checkpoint import (
    MANIFEST,
    InvalidCheckpoint,
    Manifest,
    folder_name,
    layer_file,
    misfit,
    part_file,
    step_of,
    why_not_begin,
)
from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.spec import CheckpointSpec, JobSpec
from oobleck.core.messages import CheckpointSaved, SaveFailed
from oobleck.host.storage.checkpoints import (
    Damaged,
    list_checkpoints,
    prune,
    read_layer,
    set_aside,
    sweep,
    verify,
)
from oobleck.host.storage.export import export
from oobleck.host.storage.folder import Folder, LocalFolder, RemoteFolder, open_folder
from oobleck.planner.programs.balance import writers
from oobleck.worker.checkpoint.writer import CheckpointWriter, Order
from oobleck.worker.state.layout import layout, pack, unpack
from oobleck.worker.state.model_state import ModelState
from support.exports import snapshots
from support.jobs import recorded
from support.plans import plan_of_cuts
from support.waiting import until

A, B = (WorkerId(NodeName(name), 0) for name in "ab")


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A local directory, and an fsspec file system that has no rename to speak of."""
    return str(tmp_path) if request.param == "disk" else f"memory://{secrets.token_hex(4)}/saved"


def trained(job: JobSpec) -> ModelState:
    """All layers, with moments that are no zeros."""
    state = ModelState(job, torch.device("cpu"))
    for layer in range(job.model.layer_count):
        source = torch.Generator().manual_seed(layer)
        storage = state.initialise(layer).storage
        storage.add_(torch.rand(storage.shape, generator=source, dtype=storage.dtype))
    return state


def save(
    job: JobSpec,
    state: ModelState,
    step: int,
    *,
    absent: tuple[int, ...] = (),
    before_layer: Callable[[int], None] = lambda rank: None,
) -> list:
    """What two writers report; of those `absent` only the plan knows."""
    count = job.model.layer_count
    shares = ((A, tuple(range(1, count))), (B, (0,)))
    assert job.checkpoint is not None
    folder = open_folder(job.checkpoint.path)
    reports: list[CheckpointSaved | SaveFailed] = []
    name = folder_name(step, f"meeting {step}")
    saves = [
        CheckpointWriter(
            Order(
                job=job,
                job_id="small-1",
                step=step,
                name=name,
                data="da7a",
                base="",
                wish=0,
                writers=shares,
                rank=rank,
            ),
            folder,
            snapshots(state, shares[rank][1]),
            recorded(step),
            report=reports.append,
            reached=partial(before_layer, rank),
        )
        for rank in range(2)
        if rank not in absent
    ]
    for saving in saves:
        wait_written(saving, folder)
    if absent:
        saves[0].abandon(disturbed=True)
    for saving in saves:
        saving.others_are_done()
        while saving.busy:
            pass
    return reports


def wait_written(saving: CheckpointWriter, folder: Folder) -> None:
    """Until its files are there, or never will be."""
    here, part = folder.below(saving.order.name), part_file(saving.order.rank)
    until(lambda: not saving.busy or saving.failed or part in here.names(), "its files")


@pytest.fixture
def job(make_job, place):
    return replace(make_job(steps=9), checkpoint=CheckpointSpec(path=place, keep=2))


def names(folder: Folder) -> list[str]:
    return [found.name for found in list_checkpoints(folder).checkpoints]


def test_what_two_workers_write_is_one_checkpoint_that_reads_back(job, place):
    state = trained(job)
    (saved,) = save(job, state, 3)
    assert isinstance(saved, CheckpointSaved)
    assert (saved.step, saved.path) == (3, f"{place}/{folder_name(3, 'meeting 3')}")
    folder = open_folder(place)
    (found,) = list_checkpoints(folder).checkpoints
    here = folder.below(found.name)
    assert verify(here, found.manifest) == {}
    assert saved.bytes == found.manifest.bytes
    assert misfit(found.manifest, job, "da7a") == ""
    moments = job.training.optimizer.state
    for layer, file in enumerate(found.manifest.files):
        content = read_layer(here, file)
        back = unpack(content, layout(job.model, layer), moments, torch.float64)
        assert torch.equal(back, state.layers[layer].storage)
    assert [name for name in here.names() if name.startswith(("part-", "."))] == []


def test_the_secret_of_a_place_is_in_no_report_and_no_manifest(make_job):
    place = f"memory://KEY:hunter2@{secrets.token_hex(4)}/saved"
    job = replace(make_job(steps=9), checkpoint=CheckpointSpec(path=place))
    (saved,) = save(job, trained(job), 3)
    assert saved.path.startswith("memory://***@")
    (found,) = list_checkpoints(open_folder(place)).checkpoints
    content = open_folder(place).read(f"{found.name}/{MANIFEST}", most_bytes=1 << 20)
    assert b"hunter2" not in content


def test_old_checkpoints_go_and_what_is_torn_is_swept_away(job, place):
    state, folder = trained(job), open_folder(place)
    for step in (1, 2, 3):
        save(job, state, step)
    assert names(folder) == [folder_name(step, f"meeting {step}") for step in (3, 2)]
    assert save(job, state, 4, absent=(1,)) == [], "a lost writer is no failure of the disk"
    torn = folder_name(4, "meeting 4")
    assert list_checkpoints(folder).torn == (torn,)
    # After a restore the newest is not of the highest step.
    save(job, state, 1)
    assert folder_name(1, "meeting 1") in names(folder)
    assert list_checkpoints(folder).torn == ()
    newest = folder_name(1, "meeting 1")
    prune(folder, keep=1, newest=newest, is_own=any_training, now=time.time())
    assert sweep(folder, under_way="none", is_own=any_training) == ""
    assert names(folder) == [newest]


def any_training(manifest: Manifest) -> bool:
    return True


def test_a_job_removes_nothing_of_another_training_that_saves_in_the_same_place(job, place):
    other = replace(job, training=replace(job.training, seed=job.training.seed + 1))
    folder = open_folder(place)
    save(job, trained(job), 3)
    damaged = folder_name(3, "meeting 3")
    set_aside(folder.below(damaged), {MANIFEST: "is damaged"}, now=0.0)
    save(job, trained(job), 4)
    torn = folder_name(5, "meeting 5")
    assert save(job, trained(job), 5, absent=(1,)) == []
    for step in (6, 7, 8):
        save(other, trained(other), step)
    kept = [folder_name(step, f"meeting {step}") for step in (8, 7, 4)]
    assert names(folder) == kept
    listing = list_checkpoints(folder)
    assert listing.torn == (torn,)
    assert list(listing.damaged) == [damaged]


def test_what_another_job_swept_away_is_not_published(job, place):
    folder, swept = open_folder(place), threading.Event()
    written: list[str] = []

    def before_layer(rank: int) -> None:
        if rank == 1:
            assert swept.wait(60)
        elif list_checkpoints(folder).torn and not swept.is_set():
            written.extend(folder.below(list_checkpoints(folder).torn[0]).names())
            sweep(folder, under_way="what the other job saves", is_own=any_training)
            swept.set()

    (failed,) = save(job, trained(job), 3, before_layer=before_layer)
    assert failed.reason.endswith("give every job that trains at the same time its own path")
    assert written == ["layer-00001.safetensors"]
    assert written[0] in failed.reason
    assert names(folder) == []


@pytest.mark.parametrize("harm", ["flip", "cut", "lack"])
def test_a_damaged_file_is_found_and_named(job, place, harm):
    save(job, trained(job), 3)
    folder = open_folder(place)
    (found,) = list_checkpoints(folder).checkpoints
    here, file = folder.below(found.name), found.manifest.files[2]
    content = bytearray(here.read(file.name, most_bytes=file.bytes))
    content[len(content) // 2] ^= 1
    here.remove(file.name)
    if harm != "lack":
        here.write(file.name, [bytes(content if harm == "flip" else content[:-1])])
    assert list(verify(here, found.manifest)) == [file.name]
    with pytest.raises(InvalidCheckpoint, match=file.name):
        read_layer(here, file)


def checkpoint(*arguments: str) -> Result:
    return CliRunner().invoke(oobleck, ["checkpoint", *arguments], standalone_mode=False)


def flip(folder: Folder, name: str) -> None:
    """One bit of a layer's file; again, and it is what it was."""
    here, file = folder.below(name), layer_file(2)
    content = bytearray(here.read(file, most_bytes=1 << 20))
    content[-9] ^= 1
    here.write(file, [bytes(content)])


def known_damaged(folder: Folder) -> list[str]:
    return sorted(list_checkpoints(folder).damaged)


def test_what_is_found_damaged_does_not_count_as_kept(job, place):
    state, folder = trained(job), open_folder(place)
    one, two, three, four, five = (folder_name(step, f"meeting {step}") for step in range(1, 6))
    for step in (1, 2, 3):
        save(job, state, step)
    assert names(folder) == [three, two]
    flip(folder, three)
    found = checkpoint("verify", place)
    assert found.return_value == 1
    assert f"{three}  step 3  5 files  1 of 5 files damaged; set aside\n" in found.output
    assert (names(folder), known_damaged(folder)) == ([two], [three])
    assert f"damaged: {three}: {layer_file(2)}: its content" in checkpoint("list", place).output
    save(job, state, 4)
    assert (names(folder), known_damaged(folder)) == ([four, two], [three]), "a whole one stays"
    save(job, state, 5)
    assert (names(folder), known_damaged(folder)) == ([five, four], []), "nor for ever"
    assert one not in folder.names()


def test_one_that_is_whole_again_is_taken_back(job, place):
    save(job, trained(job), 3)
    folder, name = open_folder(place), folder_name(3, "meeting 3")
    flip(folder, name)
    assert checkpoint("verify", place).return_value == 1
    assert checkpoint("verify", f"{place}/{name}").return_value == 1, "it is looked at again"
    refused = checkpoint("export", f"{place}/{name}", "-o", "/nowhere")
    assert str(refused.exception).endswith("; it is set aside")
    flip(folder, name)
    again = checkpoint("verify", place)
    assert again.return_value == 0
    assert again.output.endswith("ok; no longer set aside\n")
    assert names(folder) == [name]


def test_a_manifest_that_is_none_goes_when_as_many_as_are_kept_came_after_it(job, place):
    state, folder = trained(job), open_folder(place)
    one = folder_name(1, "meeting 1")
    save(job, state, 1)
    folder.write(f"{one}/{MANIFEST}", [b"{}"])
    save(job, state, 2)
    save(job, state, 3)
    assert known_damaged(folder) == [one]
    save(job, state, 4)
    assert known_damaged(folder) == []
    assert names(folder) == [folder_name(step, f"meeting {step}") for step in (4, 3)]


class Stalled(LocalFolder):
    """A disk that gives nothing back for now."""

    def read(self, name: str, *, most_bytes: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    def chunks(self, name: str) -> Iterator[bytes]:
        raise OSError(errno.EIO, "Input/output error")


def test_what_cannot_be_read_for_now_is_not_damaged(make_job, tmp_path):
    job = replace(make_job(steps=9), checkpoint=CheckpointSpec(path=str(tmp_path)))
    save(job, trained(job), 3)
    (found,) = list_checkpoints(LocalFolder(tmp_path)).checkpoints
    here, file = Stalled(tmp_path / found.name), found.manifest.files[1]
    with pytest.raises(InvalidCheckpoint, match="Input/output error") as raised:
        read_layer(here, file)
    assert not isinstance(raised.value, Damaged)
    assert not any(isinstance(e, Damaged) for e in verify(here, found.manifest).values())


def test_a_file_that_cannot_be_looked_for_is_not_absent(tmp_path):
    folder = LocalFolder(tmp_path)
    assert not folder.exists("a")
    (tmp_path / "a").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="symbolic links"):
        folder.exists("a")


class Unreachable(MemoryFileSystem):
    """A service that is away for a moment, as far as manifests go."""

    def info(self, path: str, **options: object) -> dict[str, Any]:
        if path.endswith(MANIFEST):
            raise ConnectionError("try again")
        return super().info(path, **options)


def test_no_checkpoint_is_lost_to_a_moment_in_which_it_cannot_be_read(make_job):
    place = f"memory://{secrets.token_hex(4)}/saved"
    job = replace(make_job(steps=9), checkpoint=CheckpointSpec(path=place))
    save(job, trained(job), 3)
    name = folder_name(3, "meeting 3")
    away = RemoteFolder(place, Unreachable(), place.removeprefix("memory:/"))
    listing = list_checkpoints(away)
    assert (listing.torn, list(listing.damaged)) == ((), [name])
    sweep(away, under_way="", is_own=any_training)
    for now in (1e9, 2e9):
        prune(away, keep=1, newest="", is_own=any_training, now=now)
    (found,) = list_checkpoints(open_folder(place)).checkpoints
    assert found.name == name


def test_a_folder_that_not_all_see_fails_the_save_with_the_node(job):
    state = trained(job)
    shares = ((A, (1, 2, 3, 4)), (B, (0,)))
    order = Order(
        job=job,
        job_id="small-1",
        step=3,
        name=folder_name(3, "m"),
        data="",
        base="",
        wish=2,
        writers=shares,
        rank=0,
    )
    reports: list = []
    folder = open_folder(job.checkpoint.path)
    saving = CheckpointWriter(
        order,
        folder,
        snapshots(state, shares[0][1]),
        recorded(9),
        report=reports.append,
        reached=lambda: None,
        seen_after_s=0.05,
    )
    wait_written(saving, folder)
    saving.others_are_done()
    while saving.busy:
        pass
    (failed,) = reports
    assert "files of b/0 do not appear on a; checkpoint.path must be" in failed.reason
    assert failed.request == 2
    assert list_checkpoints(folder).torn == (), "nothing half stays"


@pytest.mark.parametrize(
    "spec",
    [OptimizerSpec(), OptimizerSpec(name="sgd", lr=0.1), OptimizerSpec(name="sgd", momentum=0.9)],
    ids=["adamw", "sgd", "momentum"],
)
def test_a_layer_reads_back_whatever_the_optimizer(make_job, spec):
    job = make_job(optimizer=spec)
    state = trained(job)
    flat, moments = layout(job.model, 1), spec.state
    content = b"".join(map(bytes, pack(state.snapshot(1), flat, moments, {"layer": "1"})))
    assert torch.equal(unpack(content, flat, moments, torch.float64), state.layers[1].storage)
    with pytest.raises(InvalidCheckpoint, match="holds no"):
        unpack(content, layout(job.model, 0), moments, torch.float64)
    with pytest.raises(InvalidCheckpoint, match="no safetensors file"):
        unpack(content[:20], flat, moments, torch.float64)
    other = layout(job.model, 1, ("1.mlp_in.weight",))  # a job that decays others
    moved = unpack(content, other, moments, torch.float64)
    for span in flat.parameters:
        (there,) = (one for one in other.parameters if one.name == span.name)
        expected = state.layers[1].storage[:, span.offset : span.end]
        assert torch.equal(moved[:, there.offset : there.end], expected)
    assert other != flat


@given(
    cuts=st.lists(st.sampled_from([[5], [1, 4], [2, 1, 2], [3, 2]]), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 100), min_size=5, max_size=5),
)
def test_each_layer_is_written_once_by_a_holder(cuts, sizes):
    plan = plan_of_cuts(*((cut, 1) for cut in cuts))
    chosen = writers(plan, sizes)
    assert sorted(layer for layers in chosen.values() for layer in layers) == list(range(5))
    for worker, layers in chosen.items():
        assert set(layers) <= set(plan.held[worker])
    if len(cuts) > 1 and all(cut == [5] for cut in cuts):
        most = max(sum(sizes[layer] for layer in layers) for layers in chosen.values())
        assert most <= max(max(sizes), -(-sum(sizes) // len(cuts)) + max(sizes))


def test_a_job_that_does_not_go_with_its_checkpoints_is_refused(job, place):
    save(job, trained(job), 3)
    (found,) = list_checkpoints(open_folder(place)).checkpoints

    def why(data: str | None = None, **spec: object) -> str:
        other = replace(job, checkpoint=replace(job.checkpoint, **spec))
        newest = (found.name, found.manifest)
        return why_not_begin(other, other.checkpoint, newest, damaged=(), data=data)

    assert why() == why("da7a") == why(resume="require") == ""
    assert "evaluation.fraction" in why("0")
    assert "fingerprint da7a there and 0 here" in why("0")
    assert "holds checkpoints up to step 3" in why(resume="never")
    assert why_not_begin(job, job.checkpoint, None, damaged=(), data=None) == ""
    assert "is torn" in why_not_begin(job, job.checkpoint, None, damaged=("is torn",), data=None)
    for change, text in (
        ({"precision": "fp32"}, 'training.precision is "fp64" there and "fp32" here'),
        ({"global_batch": 12}, "training.global_batch is 6 there and 12 here"),
        ({"optimizer": OptimizerSpec(name="sgd")}, "training.optimizer.name is"),
        (
            {"optimizer": OptimizerSpec(python="torch.optim:NAdam")},
            'training.optimizer.name is "adamw" there and "torch.optim:NAdam" here',
        ),
        ({"steps": 2}, "is of a later step than the job's last one (2); raise training.steps"),
    ):
        other = replace(job, training=replace(job.training, **change))
        assert text in why_not_begin(
            other, other.checkpoint, (found.name, found.manifest), damaged=(), data=None
        )


def test_names_of_attempts_at_one_step_differ_and_say_the_step():
    first, second = folder_name(7, "a"), folder_name(7, "b")
    assert first != second
    assert step_of(first) == step_of(second) == 7
    assert step_of("step-7") is None


@pytest.mark.parametrize("file_bytes", [1 << 30, 6000])
def test_an_export_loads_in_transformers_and_has_the_weights(make_job, tmp_path, file_bytes):
    path = tmp_path / "saved"
    spec = CheckpointSpec(path=str(path))
    job = replace(make_job(steps=9, precision="fp32"), checkpoint=spec)
    state = trained(job)
    save(job, state, 3)
    (found,) = list_checkpoints(open_folder(str(path))).checkpoints
    written = export(
        open_folder(f"{path}/{found.name}"), found, tmp_path / "model", file_bytes=file_bytes
    )
    assert ("model.safetensors" in written) == (file_bytes > 6000)
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == sorted(written)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    token = state.module(0).token.weight.detach().numpy()
    np.testing.assert_array_equal(model.transformer.wte.weight.detach().numpy(), token)


def test_the_command_lists_verifies_and_exports(make_job, tmp_path):
    path = tmp_path / "saved"
    job = replace(make_job(steps=9), checkpoint=CheckpointSpec(path=str(path)))
    for step in (3, 5):
        save(job, trained(job), step)

    run = checkpoint
    listed = json.loads(run("list", str(path), "--json").output)
    assert [(item["step"], item["state"], item["layers"]) for item in listed] == [
        (5, "complete", 5),
        (3, "complete", 5),
    ]
    heads, *rows = run("list", str(path)).output.splitlines()
    assert heads.split() == ["STEP", "SAVED", "SIZE", "NAME"]
    assert [row.split()[0] for row in rows] == ["5", "3"]
    assert yaml.safe_load(run("list", str(path), "-o", "yaml").output) == listed
    heads, newest, *_ = run("list", str(path), "-o", "wide").output.splitlines()
    assert heads.split() == ["STEP", "SAVED", "SIZE", "JOB", "MODEL", "LAYERS", "NAME", "PATH"]
    assert newest.endswith(listed[0]["path"])
    assert run("verify", str(path)).return_value == 0
    victim = Path(listed[0]["path"], "layer-00002.safetensors")
    victim.write_bytes(victim.read_bytes()[1:])
    bad = run("verify", listed[0]["path"], "--json")
    assert bad.return_value == 1
    assert [item["file"] for item in json.loads(bad.output)] == [victim.name]
    refused = run("export", str(path), "-o", str(tmp_path / "model"))
    assert f"{victim.name}: has" in str(refused.exception)
    other = listed[1]["path"]
    instead = f"; the newest undamaged one is of step 3: oobleck checkpoint export {other} "
    assert str(refused.exception).endswith(f"{instead}-o {tmp_path}/model")
    Path(listed[0]["path"], "damaged.json").unlink()
    refused = run("export", str(path), "-o", str(tmp_path / "model"))
    assert str(refused.exception).endswith(f"{instead}-o {tmp_path}/model"), "known or not"
    assert not (tmp_path / "model").exists(), "nothing half stays"
    done = run("export", listed[1]["path"], "-o", str(tmp_path / "model"))
    assert done.output == f"step 3  {tmp_path}/model\n"
    manifest = Path(listed[1]["path"], "manifest.json")
    manifest.write_text("{}")
    found = json.loads(run("verify", str(path), "--json").output)
    assert [item["file"] for item in found] == [manifest.name, victim.name], "all are looked at"
    Path(listed[0]["path"], "manifest.json").unlink()
    refused = run("export", str(path), "-o", str(tmp_path / "other"))
    assert f"{Path(listed[1]['path']).name}: manifest.json: " in str(refused.exception)
    assert "there is no" in str(run("list", str(tmp_path / "nothing")).exception)
