"""Models of transformers as jobs in this process, with no cluster: described, held, exported."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.job.code import Json
from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.spec import CheckpointSpec, DataSpec, JobSpec, TrainingSpec
from oobleck.host.storage.checkpoints import StoredCheckpoint, list_checkpoints
from oobleck.host.storage.export import export
from oobleck.host.storage.folder import Folder, LocalFolder
from oobleck.worker.checkpoint.snapshots import Ring, Snapshots
from oobleck.worker.checkpoint.writer import CheckpointWriter, Order
from oobleck.worker.models.checks.describe import describe
from oobleck.worker.models.huggingface.architecture import Architecture
from oobleck.worker.models.registry import check_weights
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.state.model_state import ModelState
from support.jobs import recorded
from support.waiting import until

LENGTH = 16


def job_of(
    config: dict[str, Any] | None = None, description: str | None = None, **model: Any
) -> JobSpec:
    """A described job; `model`: further keys of it. `description`: if it was described before."""
    given = Json(json.dumps(config or {}))
    task = Architecture(model["architecture"], "{}").task
    length = None if task == "image" else LENGTH
    spec = OwnModelSpec(config=given, sequence_length=length, **model)
    training = TrainingSpec(steps=9, global_batch=4, microbatch=2)
    labels = DataSpec(plugin="arrays", arguments=Json('{"path": "/"}'))
    data = labels if spec.labelled else DataSpec(text=("x",))
    job = JobSpec(name="tiny", model=spec, data=data, training=training)
    if description is None:
        ids, label = torch.zeros(LENGTH, dtype=torch.int64), torch.tensor(0)
        inputs = torch.zeros(3, 16, 16) if task == "image" else ids
        sample = (inputs, label if task in ("sequence", "image") else ids)
        description = describe(job, sample)
    return replace(job, model=replace(spec, described=Json(description)))


def held(job: JobSpec) -> ModelState:
    """All layers, with weights that are off their initial values."""
    state = ModelState(job, torch.device("cpu"))
    for layer in range(job.model.layer_count):
        weights = state.initialise(layer).storage[0]
        source = torch.Generator().manual_seed(layer)
        weights.add_(torch.randn(weights.shape, generator=source), alpha=0.1)
    for layer in state.layers:
        shared = job.model.description.shared(layer)  # type: ignore[attr-defined]  # of its kind
        for name, (first, theirs) in shared.items():
            front = state.module(first).get_parameter(f"module.{theirs}").detach()
            state.module(layer).get_parameter(f"module.{name}").data.copy_(front)
    return state


def tokens() -> Tensor:
    return torch.randint(1, 64, (3, LENGTH), generator=torch.Generator().manual_seed(5))


def logits(state: ModelState, ids: Tensor) -> Tensor:
    """What the layers give, as in an evaluation."""
    x: Any = ids
    with torch.no_grad():
        for layer in sorted(state.layers):
            x = state.module(layer)(x, RowKeys(seed=0, step=1, positions=(), training=False))
    return x[0] if isinstance(x, tuple) else x


def snapshots(state: ModelState, layers: Iterable[int]) -> Snapshots:
    """To be made, of layers in host memory."""
    found = Snapshots(Ring(torch.device("cpu")))
    for layer in layers:
        found.add(layer, state.layers[layer].storage)
    return found


def exported(job: JobSpec, state: ModelState, folder: Path) -> list[str]:
    """Writes a checkpoint of it, and an export to folder/model; the files' names."""
    writer = WorkerId(NodeName("a"), 0)
    layers = tuple(range(job.model.layer_count))
    saved = LocalFolder(folder / "saved")
    order = Order(
        job=replace(job, checkpoint=CheckpointSpec(path=saved.url)),
        job_id="tiny-1",
        step=3,
        name="step-000000003-00000000",
        data="",
        base=check_weights(job.model).hex() if job.model.rests_on_files else "",
        wish=0,
        writers=((writer, layers),),
        rank=0,
    )
    saving = CheckpointWriter(
        order,
        saved,
        snapshots(state, layers),
        recorded(3),
        report=lambda _: None,
        reached=lambda: None,
    )
    saving.others_are_done()
    until(lambda: not saving.busy, "the checkpoint")
    return export(*checkpoint(folder), folder / "model", file_bytes=60_000)


def checkpoint(folder: Path) -> tuple[Folder, StoredCheckpoint]:
    """What `exported` saved there."""
    saved = LocalFolder(folder / "saved")
    (found,) = list_checkpoints(saved).checkpoints
    return saved.below(found.name), found
