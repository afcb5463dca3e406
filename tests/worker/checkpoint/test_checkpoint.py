"""Checkpoints of real workers: taken while they train, resumed by others, and what goes wrong."""

import contextlib
import functools
import json
import re
import resource
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.optimization import OptimizerSpec, ScheduleSpec
from oobleck.core.job.spec import CheckpointSpec, DataSpec, JobSpec, TrainingSpec
from oobleck.core.messages import (
    CheckpointSaved,
    Failed,
    FaultRule,
    Finished,
    FromWorker,
    PeerLost,
    PhaseReached,
    Restored,
    SaveFailed,
)
from oobleck.core.plan import Plan
from oobleck.host.storage.checkpoints import list_checkpoints, verify
from oobleck.host.storage.folder import LocalFolder
from oobleck.worker.checkpoint.location import check_place
from oobleck.worker.runtime.errors import JobError
from support.director import Director, WarmWorkers, make_plan
from support.folders import TEXT
from support.outputs import read_output
from support.reference import ReferenceRun, assert_same_weights, train_reference
from support.rerouted import held, rerouted, wait_lost, with_holds

STEPS = 8
THREE = make_plan(1, [[("a", 2), ("b", 3)], [("c", 5)]], [2, 2])
TWO = make_plan(1, [[("a", 4), ("b", 1)]], [4])


def job(path: Path, *, steps: int = STEPS, output: Path | None = None, **spec: object) -> JobSpec:
    return JobSpec(
        name="saved",
        model=ModelSpec(layers=3, hidden=16, heads=2, sequence_length=8, dropout=0.1),
        data=DataSpec(text=(TEXT,)),
        training=TrainingSpec(
            steps=steps,
            global_batch=8,
            microbatch=2,
            precision="fp64",
            optimizer=OptimizerSpec(lr=1e-2),
            schedule=ScheduleSpec(name="constant", warmup=3),
        ),
        checkpoint=CheckpointSpec(path=str(path), **{"every": 3, **spec}),  # type: ignore[arg-type]
        output=None if output is None else str(output),
    )


@functools.cache
def reference() -> ReferenceRun:
    return train_reference(job(Path("/nowhere")))


def check(cluster: Director, first: int, last: int) -> None:
    losses = cluster.losses()
    assert list(losses) == list(range(first, last + 1))
    expected = reference().steps[first - 1 : last]
    assert list(losses.values()) == pytest.approx([s.loss for s in expected], rel=1e-12, abs=0)
    digests = [cluster.records[step][0].samples_digest for step in losses]
    assert digests == [step.samples_digest for step in expected]


def all_said(cluster: Director, kind: type[FromWorker]) -> list:
    return [m for live in cluster.workers.values() for m in live.said if isinstance(m, kind)]


def train(warm: WarmWorkers, spec: JobSpec, plan: Plan, **options: object) -> Director:
    with Director(warm, spec) as cluster:
        cluster.start(*(f"{worker.node}/{worker.slot}" for worker in plan.workers))
        cluster.assign(plan, **options)  # type: ignore[arg-type]
        cluster.wait_finished(plan)
        cluster.stop()
    return cluster


def saved_steps(path: Path) -> list[int]:
    listing = list_checkpoints(LocalFolder(path))
    assert not listing.damaged
    assert not listing.torn
    return [found.manifest.step for found in listing.checkpoints]


def test_saved_by_three_and_resumed_by_two_of_another_cut(warm, tmp_path):
    path = tmp_path / "checkpoints"
    first = train(warm, job(path, steps=5), THREE)
    check(first, 1, 5)
    assert sorted(saved.step for saved in all_said(first, CheckpointSaved)) == [3, 5]
    assert saved_steps(path) == [5, 3]
    (newest, _) = list_checkpoints(LocalFolder(path)).checkpoints
    assert verify(LocalFolder(path / newest.name), newest.manifest) == {}
    assert sorted(p.name for p in (path / newest.name).iterdir()) == [
        *(f"layer-{layer:05}.safetensors" for layer in range(5)),
        "manifest.json",
        "records.jsonl",
    ]
    with safe_open(path / newest.name / "layer-00001.safetensors", framework="np") as file:
        assert {"qkv.weight", "qkv.weight.exp_avg", "qkv.weight.exp_avg_sq"} <= set(file.keys())

    second = train(warm, job(path, output=tmp_path / "weights"), TWO)
    check(second, 6, STEPS)
    told = all_said(second, Restored)
    assert {(m.step, m.passed_over) for m in told} == {(5, ())}
    assert len(told) == 2
    for name, value in reference().weights.items():
        assert read_output(tmp_path / "weights")[name] == pytest.approx(value, rel=1e-9, abs=1e-12)


#: Three share the first layers, of which `b` has a copy; `c` has one of what `b` computes.
SHADOWED = with_holds(
    make_plan(1, [[("a", 2, 3), ("b", 3)]], [4]), held(0, 1, "b"), held(2, 4, "c")
)
#: Without `b`, `c` and then both workers of `d` compute for it.
SHARED = make_plan(1, [[("a", 2, 2), ("b", 3)], [("c", 3), ("d", 2, 2)]], [2, 2])


def test_saved_in_any_routes_and_resumed_in_others(warm, tmp_path):
    """Each in the one before's, which holds other shares of the layers, or copies of them."""
    weights = tmp_path / "weights"
    path = tmp_path / "checkpoints"
    without_b = rerouted(SHARED, job(path), "b")
    assert without_b.listing is not None
    check(train(warm, job(path, steps=2), TWO), 1, 2)
    check(train(warm, job(path, steps=3), SHADOWED), 3, 3)
    check(train(warm, job(path, steps=4), without_b), 4, 4)
    check(train(warm, job(path, steps=5), SHADOWED), 5, 5)
    with Director(warm, job(path, steps=7), [fault("b", "before:Backward", 6)]) as cluster:
        cluster.start(*map(str, SHARED.workers))
        cluster.assign(SHARED)
        wait_lost(cluster, SHARED, "b")
        cluster.assign(without_b)
        cluster.wait_finished(without_b)
        cluster.stop()
    check(cluster, 6, 7)
    assert list_checkpoints(LocalFolder(path)).checkpoints[0].manifest.step == 7
    check(train(warm, job(path, output=weights), TWO), 8, STEPS)
    assert_same_weights(read_output(weights), reference().weights, rtol=1e-11)


def damage_newest(path: Path) -> str:
    newest = list_checkpoints(LocalFolder(path)).checkpoints[0].name
    victim = path / newest / "layer-00004.safetensors"
    content = bytearray(victim.read_bytes())
    content[-9] ^= 1
    victim.write_bytes(content)
    return newest


def test_what_one_node_alone_finds_damaged_is_passed_over_and_not_set_aside(warm, tmp_path):
    alone = make_plan(1, [[("a", 5)]], [4])
    # One node is as many as the job wants: no save at the begin is in the way of step 3's.
    train(warm, replace(job(tmp_path, steps=5), fault_tolerance=0), alone)
    newest = damage_newest(tmp_path)
    second = train(
        warm, replace(job(tmp_path, steps=6, at_end=False, keep=3), fault_tolerance=0), alone
    )
    check(second, 4, 6)
    assert not (tmp_path / newest / "damaged.json").exists()


def test_a_damaged_checkpoint_is_said_and_the_one_before_is_used(warm, tmp_path):
    train(warm, job(tmp_path, steps=5), THREE)
    newest = damage_newest(tmp_path)
    # One copy of each layer is as many as the job wants: no save at the begin puts step 6's off.
    spec = replace(job(tmp_path, at_end=False, keep=3), fault_tolerance=0)
    second = train(warm, spec, TWO)
    check(second, 4, STEPS)
    (reason,) = {reason for m in all_said(second, Restored) for reason in m.passed_over}
    assert reason.startswith("step 5: layer-00004.safetensors: its content is not what was")
    assert reason.endswith(" (on b)")
    listing = list_checkpoints(LocalFolder(tmp_path))
    assert [found.manifest.step for found in listing.checkpoints] == [6, 3], "whole ones count"
    assert list(listing.damaged) == [newest]


def fault(node: str, point: str, step: int, action: str = "kill_worker") -> FaultRule:
    worker = WorkerId(NodeName(node), 0)
    return FaultRule(worker=worker, point=point, step=step, action=action)  # type: ignore[arg-type]


def test_a_writer_killed_in_mid_save_leaves_no_checkpoint_and_the_next_one_works(warm, tmp_path):
    with Director(warm, job(tmp_path), [fault("c", "before:LayerFile", 3)]) as cluster:
        cluster.start("a", "b", "c")
        cluster.assign(THREE)
        cluster.wait(lambda: cluster.workers[WorkerId(NodeName("c"), 0)].gone, "the scripted kill")
        after = make_plan(2, [[("a", 2), ("b", 3)]], [4])
        cluster.assign(after)
        cluster.wait_finished(after)
        cluster.stop()
    check(cluster, 1, STEPS)
    (committed,) = {
        m.committed_step
        for m in all_said(cluster, PhaseReached)
        if m.phase == "joined" and m.generation == after.generation
    }
    steps = sorted(saved.step for saved in all_said(cluster, CheckpointSaved))
    soon = (committed + 1, committed + 2, STEPS)
    assert steps[0] in soon, "taken again as soon as workers train again"
    assert steps[-1] == STEPS, "after the last step; step 6's may be put off by the one before"
    assert saved_steps(tmp_path) == steps[::-1]


def test_a_wish_is_served_by_all_at_one_step(warm, tmp_path):
    with Director(warm, job(tmp_path, steps=100_000, every=10**6)) as cluster:
        cluster.start(*THREE.nodes)
        cluster.assign(THREE)
        cluster.wait(lambda: 2 in cluster.records, "two steps")
        cluster.wish_checkpoint(THREE, 1)
        cluster.wait(lambda: len(all_said(cluster, CheckpointSaved)) == 1, "the checkpoint")
        cluster.wish_checkpoint(THREE, 2)
        cluster.wait(lambda: len(all_said(cluster, CheckpointSaved)) == 2, "another one")
        last = all_said(cluster, CheckpointSaved)[-1].step
        cluster.wait(lambda: last + 5 in cluster.records, "steps after it")
        cluster.stop()
    saved = all_said(cluster, CheckpointSaved)
    assert [m.request for m in saved] == [1, 2]
    assert saved_steps(tmp_path) == [m.step for m in saved][::-1]


def test_all_copies_of_a_layer_lost_and_the_newest_checkpoint_takes_over(warm, tmp_path):
    # The last layers are with b and c alone. d comes in their place.
    after = make_plan(2, [[("a", 3), ("d", 2)]], [4])
    faults = [fault(node, "before:Backward", 6, "hold") for node in ("b", "c")]
    with Director(warm, job(tmp_path, keep=1, resume="never"), faults) as cluster:
        cluster.start("a", "b", "c")
        cluster.assign(THREE)
        cluster.wait(lambda: all(map(cluster.has_faulted, ("b/0", "c/0"))), "step 6")
        cluster.wait(lambda: bool(all_said(cluster, CheckpointSaved)), "the checkpoint of step 3")
        for node in "bc":
            cluster.kill(node)
        cluster.faults = ()
        cluster.start("d")
        cluster.assign(after, restore=True)
        cluster.wait_finished(after)
        cluster.stop()
    (restored,) = {m.step for m in all_said(cluster, Restored)}
    assert restored == 3
    saved = [m.step for m in all_said(cluster, CheckpointSaved)]
    assert 4 in saved, "as soon as there is but one copy of each layer"
    expected = reference().steps
    assert sorted(cluster.records) == list(range(1, STEPS + 1))
    for step, records in cluster.records.items():
        assert {r.generation for r in records} == ({1} if step < 4 else {1, 2} if step < 6 else {2})
        assert {r.samples_digest for r in records} == {expected[step - 1].samples_digest}
        for record in records:
            assert record.loss == pytest.approx(expected[step - 1].loss, rel=1e-12, abs=0)


def test_a_state_that_is_lost_without_a_checkpoint_begins_anew_where_the_job_wants_that(
    warm, tmp_path
):
    after = make_plan(2, [[("a", 3), ("d", 2)]], [4])
    faults = [fault(node, "before:Backward", 3, "hold") for node in ("b", "c")]
    spec = replace(job(tmp_path), checkpoint=None, on_state_lost="restart")
    with Director(warm, spec, faults) as cluster:
        cluster.start("a", "b", "c")
        cluster.assign(THREE)
        cluster.wait(lambda: all(map(cluster.has_faulted, ("b/0", "c/0"))), "step 3")
        for node in "bc":
            cluster.kill(node)
        cluster.faults = ()
        cluster.start("d")
        cluster.assign(after, restore=True, anew=True)
        cluster.wait_finished(after)
        cluster.stop()
    assert {(m.step, m.path) for m in all_said(cluster, Restored)} == {(0, "")}
    expected = reference().steps
    assert sorted(cluster.records) == list(range(1, STEPS + 1))
    for step, records in cluster.records.items():
        assert {r.generation for r in records} == ({1, 2} if step < 3 else {2})
        assert {r.samples_digest for r in records} == {expected[step - 1].samples_digest}
        for record in records:
            assert record.loss == pytest.approx(expected[step - 1].loss, rel=1e-12, abs=0)


def test_where_one_was_saved_and_none_is_seen_no_job_begins_anew(warm, tmp_path):
    spec = replace(job(tmp_path), on_state_lost="restart")
    lacks = "checkpoint.path: no checkpoint .* none belongs to this training; check that"
    with pytest.raises(AssertionError, match=lacks):
        train(warm, spec, TWO, restore=True)
    begun = train(warm, spec, TWO, restore=True, anew=True)
    assert {(m.step, m.path) for m in all_said(begun, Restored)} == {(0, "")}


def test_checkpoints_that_cannot_be_read_for_a_moment_are_waited_for(warm, tmp_path):
    path, there = tmp_path / "checkpoints", tmp_path / "there"
    train(warm, job(there, steps=5), TWO)
    (tmp_path / "file").write_text("no directory")
    path.symlink_to("file")
    (tmp_path / "link").symlink_to("there")
    with Director(warm, job(path)) as cluster:
        cluster.start("a", "b")
        cluster.assign(TWO, restore=True)
        first = cluster.workers[TWO.workers[0]]
        cluster.wait(lambda: "trying again" in first.written(), "the first look")
        (tmp_path / "link").replace(path)
        cluster.wait_finished(TWO)
        cluster.stop()
    check(cluster, 6, STEPS)


def limit_files(cluster: Director, bytes_: int, *nodes: str) -> None:
    """No file of a worker may become larger: what a full disk does to it. `nodes`: of these alone;
    none: of all."""
    for live in cluster.workers.values():
        if nodes and live.worker.node not in nodes:
            continue
        resource.prlimit(live.pid, resource.RLIMIT_FSIZE, (bytes_, resource.RLIM_INFINITY))


def test_a_full_disk_fails_the_save_and_not_the_training(warm, tmp_path):
    spec = job(tmp_path / "saved", steps=50, every=20, at_end=False, output=tmp_path / "weights")
    with Director(warm, spec, [fault("b", "before:Forward", 2, "stop")]) as cluster:
        cluster.start(*THREE.nodes)
        cluster.assign(THREE)
        cluster.wait(lambda: cluster.has_faulted("b/0"), "a step")
        limit_files(cluster, 1024)
        cluster.let_go("b")
        cluster.wait(
            lambda: any(f.what == "checkpoint" for f in all_said(cluster, SaveFailed)),
            "a failed save",
        )
        cluster.wait(
            lambda: any(f.what == "output" for f in all_said(cluster, SaveFailed)),
            "an output that cannot be written",
        )
        assert not all_said(cluster, CheckpointSaved)
        assert not all_said(cluster, Finished)
        limit_files(cluster, resource.RLIM_INFINITY)
        cluster.wait_finished(THREE)
        cluster.stop()
    reason = next(f.reason for f in all_said(cluster, SaveFailed) if f.what == "checkpoint")
    assert reason == f"cannot write to {tmp_path}/saved: File too large"
    assert saved_steps(tmp_path / "saved") == []
    assert list((tmp_path / "saved").iterdir()) == []
    assert sorted(cluster.losses()) == list(range(1, 51))
    assert len(read_output(tmp_path / "weights")) > 0


#: Seconds instead of a minute.
IMPATIENT = (
    "from oobleck.worker.checkpoint import output, saver; "
    "output._RETRY_S, output._LONGEST_S = 0.2, 1.0; saver._RETRY_S, saver._ATTEMPTS = 0.2, 3"
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(place: Path) -> None:
    with (place / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_disk_that_stays_full_at_the_end_ends_the_job_and_says_what_is_not_saved(
    forking, small_disk, tmp_path
):
    full = "No space left on device"
    cases = [
        (
            job(tmp_path / "saved", every=1000, output=small_disk / "weights"),
            rf"output: cannot write to {small_disk}/weights on this machine: {full}; .*; the "
            rf"weights of step {STEPS} are not saved; its checkpoint has them: make room, and .*",
        ),
        (
            job(tmp_path / "none", every=1000, at_end=False, output=small_disk / "weights"),
            rf"output: cannot write to .*: {full}; .*; the weights of step {STEPS} are not saved",
        ),
        (
            job(small_disk / "saved", every=1000),
            rf"checkpoint: cannot write to {small_disk}/saved: {full}; .*: the state of step "
            rf"{STEPS} is not saved, nor is an earlier one",
        ),
    ]
    with WarmWorkers(preloaded=forking, before=IMPATIENT) as warm:
        for spec, told in cases:
            with Director(warm, spec, [fault("b", "before:Forward", 2, "stop")]) as cluster:
                cluster.start(*THREE.nodes)
                cluster.assign(THREE)
                cluster.wait(lambda: cluster.has_faulted("b/0"), "a step")
                fill(small_disk)
                cluster.let_go("b")
                with pytest.raises(AssertionError, match=rf"^[a-c]/0 failed: {told}$"):
                    cluster.wait_finished(THREE)
                (failed,) = all_said(cluster, Failed)
                assert failed.kind == "user"
            (small_disk / "filler").unlink()


def test_one_that_joined_late_knows_what_was_saved_before(forking, tmp_path):
    after = make_plan(2, [[("a", 2), ("d", 3)], [("c", 5)]], [2, 2])
    # One copy of each layer is as many as the job wants: only what is saved last is saved.
    spec = replace(job(tmp_path / "saved", every=1000), fault_tolerance=0)
    with WarmWorkers(preloaded=forking, before=IMPATIENT) as warm:
        train(warm, replace(spec, training=replace(spec.training, steps=3)), THREE)
        with Director(warm, spec, [fault("b", "before:Backward", 5)]) as cluster:
            cluster.start(*THREE.nodes)
            cluster.assign(THREE)
            wait_lost(cluster, THREE, "b")
            cluster.start("d")
            limit_files(cluster, 16 << 10, "d")
            cluster.assign(after)
            told = rf"the state of step {STEPS} is not saved, that of step 3 is"
            with pytest.raises(AssertionError, match=rf"^d/0 failed: checkpoint: .*: {told}$"):
                cluster.wait_finished(after)
    assert saved_steps(tmp_path / "saved") == [3]


def test_the_last_state_is_saved_before_an_output_that_cannot_be_written(warm, tmp_path):
    weights = tmp_path / "weights"
    spec = job(tmp_path / "saved", every=1000, output=weights)
    with Director(warm, spec) as cluster:
        cluster.start(*THREE.nodes)
        weights.rmdir()
        weights.write_text("no directory")
        cluster.assign(THREE)
        cluster.wait(lambda: bool(all_said(cluster, SaveFailed)), "an output that is not written")
        cluster.wait(lambda: bool(all_said(cluster, CheckpointSaved)), "the last state")
        assert [saved.step for saved in all_said(cluster, CheckpointSaved)] == [STEPS]
        weights.unlink()
        cluster.wait_finished(THREE)
        cluster.stop()
    assert len(read_output(weights)) > 0


def refusal(warm: WarmWorkers, spec: JobSpec) -> str:
    with pytest.raises(AssertionError, match="failed: ") as caught:
        train(warm, spec, TWO)
    return str(caught.value)


def test_what_is_of_another_training_is_refused_with_the_key(warm, tmp_path):
    train(warm, job(tmp_path, steps=1), TWO)
    fits = job(tmp_path)
    other = replace(fits, training=replace(fits.training, seed=1))
    text = refusal(warm, other)
    assert "is of another training: training.seed is 0 there and 1 here; name another" in text
    other = replace(fits, model=replace(fits.model, hidden=32))
    assert "model.hidden is 16 there and 32 here" in refusal(warm, other)
    assert not list(tmp_path.glob(".*")), "what is tried out is removed"
    never = replace(fits, checkpoint=replace(fits.checkpoint, resume="never"))
    assert "is never, and" in refusal(warm, never)
    short = replace(fits, training=replace(fits.training, steps=1))
    done = train(warm, short, TWO)
    assert not done.records
    assert not all_said(done, CheckpointSaved), "it is what the job began with"
    empty = replace(fits, checkpoint=replace(fits.checkpoint, path=str(tmp_path / "empty")))
    (tmp_path / "file").write_text("no directory")
    wrong = replace(fits, checkpoint=replace(fits.checkpoint, path=str(tmp_path / "file")))
    said = refusal(warm, wrong)  # by whoever comes to it first
    assert re.search(r"checkpoint\.path: cannot (write to|read) .*: Not a directory;", said), said
    unknown = replace(fits, checkpoint=replace(fits.checkpoint, path="nowhere://bucket"))
    assert "cannot speak nowhere: Protocol not known" in refusal(warm, unknown)
    required = replace(empty, checkpoint=replace(empty.checkpoint, resume="require"))
    assert "there is none" in refusal(warm, required)
    manifest = next(tmp_path.glob("step-*/manifest.json"))
    manifest.write_text(json.dumps({"format": 1}))
    assert "no checkpoint in" in refusal(warm, fits)


def started_apart(cluster: Director, places: dict[str, Path]) -> None:
    """Each node's workers see another folder at the place of checkpoints."""
    spec = cluster.job
    assert spec.checkpoint is not None
    for node, place in places.items():
        cluster.job = replace(spec, checkpoint=replace(spec.checkpoint, path=str(place)))
        cluster.start(node)


def failures(cluster: Director, count: int) -> dict[str, Failed]:
    for _ in range(count):
        with pytest.raises(AssertionError, match="failed: "):
            cluster.wait(lambda: False, "a failure")
    return {
        str(worker.node): message
        for worker, live in cluster.workers.items()
        for message in live.said
        if isinstance(message, Failed)
    }


def go_on(cluster: Director, plan: Plan, **options: object) -> None:
    """On `plan`, whose workers have found out that others cannot."""
    cluster.wait(lambda: all(cluster.said(w, PeerLost) for w in plan.workers), "peers lost")
    cluster.assign(plan, **options)  # type: ignore[arg-type]
    cluster.wait_finished(plan)
    cluster.stop()


def test_a_place_that_nobody_can_be_told_of_is_the_jobs_fault() -> None:
    with pytest.raises(JobError, match=r"^checkpoint.path: has characters .* name another"):
        check_place(CheckpointSpec(path="my\u2028checkpoints"))


def test_nodes_that_alone_cannot_use_the_place_are_done_without_at_the_start(warm, tmp_path):
    (tmp_path / "file").write_text("no directory")
    four = make_plan(1, [[("a", 2), ("b", 3)], [("c", 2), ("d", 3)]], [2, 2])
    seen = tmp_path / "seen"
    with Director(warm, job(seen, steps=2)) as cluster:
        places = {"a": seen, "b": seen, "c": tmp_path / "file", "d": tmp_path / "other"}
        started_apart(cluster, places)
        cluster.assign(four)
        failed = failures(cluster, 2)
        go_on(cluster, replace(TWO, generation=2))
    assert {node: failure.kind for node, failure in failed.items()} == {"c": "node", "d": "node"}
    (words,) = {failure.message for failure in failed.values()}
    assert re.fullmatch(
        r"checkpoint\.path: cannot write to \S+/file: Not a directory \(on c\); "
        r"files of a in \S+/other .* \(on d\); .*: mount the same .*make it writable",
        words,
    )


def test_of_two_nodes_that_do_not_share_the_place_neither_is_at_fault(warm, tmp_path):
    with Director(warm, job(tmp_path)) as cluster:
        started_apart(cluster, {"a": tmp_path / "seen", "b": tmp_path / "other"})
        cluster.assign(TWO)
        failed = failures(cluster, 2)
    assert {failure.kind for failure in failed.values()} == {"user"}
    (words,) = {failure.message for failure in failed.values()}
    assert words.startswith("checkpoint.path: files of a in ")
    assert words.endswith("(on b); name a place that all nodes share and can write to")


def test_a_node_that_alone_sees_no_checkpoint_is_done_without(warm, tmp_path):
    seen = tmp_path / "seen"
    train(warm, job(seen, steps=2), TWO)
    after = make_plan(2, [[("b", 2), ("c", 3)]], [4])
    with Director(warm, job(seen, steps=3)) as cluster:
        started_apart(cluster, {"a": tmp_path / "other", "b": seen, "c": seen})
        cluster.assign(THREE, restore=True)
        (failed,) = failures(cluster, 1).values()
        go_on(cluster, after, restore=True)
    assert failed.kind == "node"
    lacks = "can be read: step 2: it does not appear here (on a) | "
    assert f"no checkpoint in {tmp_path}/other {lacks}" in failed.message
    check(cluster, 3, 3)
