"""Snapshots are of the step that they were taken after, though training goes on meanwhile."""

import threading
from dataclasses import replace

import pytest
import torch

from oobleck.core.checkpoint import folder_name
from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.job.spec import CheckpointSpec
from oobleck.host.storage.checkpoints import list_checkpoints, read_layer
from oobleck.host.storage.folder import LocalFolder
from oobleck.worker.checkpoint.snapshots import SLOT_BYTES, Ring, Snapshots
from oobleck.worker.checkpoint.writer import CheckpointWriter, Order
from oobleck.worker.state.layout import layout, unpack
from oobleck.worker.state.model_state import ModelState
from support.jobs import recorded
from support.waiting import until

CPU = torch.device("cpu")


class GatedRing(Ring):
    """Copies nothing before it is told to."""

    def __init__(self) -> None:
        super().__init__(CPU, everything=True, slots=2, slot_bytes=256)
        self.opened = threading.Event()

    def copy(self, source, into, after=None) -> None:
        assert self.opened.wait(30)
        super().copy(source, into, after)


def test_the_step_after_a_save_computes_meanwhile_and_does_not_change_what_is_written(
    make_job, tmp_path
):
    job = replace(make_job(), checkpoint=CheckpointSpec(path=str(tmp_path)))
    state = ModelState(job, CPU)
    layers = range(job.model.layer_count)
    for layer in layers:
        state.initialise(layer)
    state.apply(1, scale=1.0)
    expected = {layer: state.snapshot(layer) for layer in layers}
    ring = GatedRing()
    snapshots = Snapshots(ring)
    for layer in layers:
        snapshots.add(layer, state.layers[layer].storage)
    order = Order(
        job=job,
        job_id="small-1",
        step=1,
        name=folder_name(1, "m"),
        data="",
        base="",
        wish=0,
        writers=((WorkerId(NodeName("a"), 0), tuple(layers)),),
        rank=0,
    )
    folder = LocalFolder(tmp_path)
    saving = CheckpointWriter(
        order, folder, snapshots, recorded(1), report=lambda _: None, reached=lambda: None
    )

    def asked_to_wait() -> None:
        # Gradients of step 2 are there, and nothing has been copied yet.
        for layer in layers:
            assert torch.equal(state.layers[layer].storage, expected[layer])
        ring.opened.set()
        snapshots.wait()

    state.read_until(asked_to_wait)
    for held in state.layers.values():
        held.gradient.fill_(1.0)
    state.apply(2, scale=1.0)
    assert ring.opened.is_set()
    assert not any(torch.equal(state.layers[n].storage, expected[n]) for n in layers)
    saving.others_are_done()
    until(lambda: not saving.busy, "the checkpoint")
    (found,) = list_checkpoints(folder).checkpoints
    moments = job.training.optimizer.state
    for file in found.manifest.files:
        content = read_layer(folder.below(found.name), file)
        flat = layout(job.model, file.layer)
        read = unpack(content, flat, moments, torch.float64)
        for span in flat.parameters:
            there = slice(span.offset, span.end)
            assert torch.equal(read[:, there], expected[file.layer][:, there])
    # Nobody waits for it any more.
    state.apply(3, scale=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numbers", [0, 1, 63, 64, 65, 1000])
def test_everything_passes_through_a_ring_of_a_fixed_size(numbers, dtype, monkeypatch):
    ring = Ring(CPU, everything=True, slots=3, slot_bytes=256)
    source = torch.randn(3, numbers, dtype=dtype)
    into = torch.zeros_like(source)
    made = []
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: made.append(size))
    ring.copy(source, into)
    ring.copy(source[:, 1:], into[:, 1:])
    assert torch.equal(source, into)
    assert ring.slots == 3
    assert not made, "no other memory is taken"


def test_a_ring_takes_memory_of_its_own_where_there_is_a_device_alone():
    assert Ring(CPU).slots == 0
    assert Ring(CPU, everything=True, slot_bytes=SLOT_BYTES >> 10).slots == 4


def test_a_snapshot_that_fails_holds_nobody_up(make_job):
    class Broken(Ring):
        def copy(self, source, into, after=None) -> None:
            raise MemoryError("no room")

    snapshots = Snapshots(Broken(CPU))
    snapshots.add(0, torch.zeros(3, 4))
    with pytest.raises(MemoryError):
        snapshots.make()
    snapshots.wait()
