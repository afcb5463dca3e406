"""Checkpoints as data: manifest, names, the writer of each layer, and the check against a job.

A checkpoint is a folder `step-SSSSSSSSS-XXXXXXXX` with one file per layer and a manifest, which is
written last: a folder without a manifest is no checkpoint. The second part of the name
distinguishes attempts at the same step, so a late writer of an earlier attempt cannot touch the
files of a later one.

Pure: no files. `oobleck.host.storage.checkpoints` reads and removes checkpoints, workers write
them.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from oobleck.core.codec import decode, encode
from oobleck.core.ids import check_name
from oobleck.core.job.model import AnyModel, OwnModelSpec
from oobleck.core.job.spec import CheckpointSpec, JobSpec, Precision, TrainingSpec
from oobleck.core.redact import redact

MANIFEST = "manifest.json"
RECORDS = "records.jsonl"
FORMAT = 1

_NAME = re.compile(r"step-([0-9]{9,10})-[0-9a-f]{8}")
#: Most bytes of a manifest; that of the deepest model with the longest config has a tenth of it.
MOST_MANIFEST_BYTES = 4 << 20
#: Most bytes of a file of records, and most lines: as many as agents keep. A line has some 300
#: bytes.
MOST_RECORDS_BYTES = 32 << 20
MOST_RECORDS = 65_536
#: Most bytes of the header of a layer's file, which names a few dozen tensors.
MOST_LAYER_HEADER_BYTES = 1 << 20
#: Names of files: no path, nothing hidden, no character that a file system refuses or a terminal
#: interprets.
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DATA = re.compile(r"[0-9a-f]{0,128}")
_MOST_STEP = 10**9
_MOST_BYTES = 1 << 62
#: End of the year 9999.
_LATEST = 253_402_300_799.0
#: Keys of the job that may change from one run to the next: they are not part of the state.
_FREE_MODEL_KEYS = frozenset({"weights", "plugin", "python", "path", "arguments", "described"})


class InvalidCheckpoint(ValueError):
    """Error of a checkpoint that is torn, damaged or of another job; the text names it and the
    fault.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFile:
    """File of one layer's state on disk."""

    name: str
    layer: int
    bytes: int
    #: Hash of the whole file, hexadecimal.
    sha256: str

    def __post_init__(self) -> None:
        if _FILE.fullmatch(self.name) is None:
            raise ValueError(f"{self.name[:80]!r} is no name of a layer's file")
        if not 0 < self.bytes <= _MOST_BYTES:
            raise ValueError(f"bytes of {self.name}: {self.bytes} is not in 1 to {_MOST_BYTES}")
        if _SHA256.fullmatch(self.sha256) is None:
            raise ValueError(f"sha256 of {self.name}: is not 64 lower-case hex digits")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsFile:
    """File of records of steps and evaluations: those that the master may lack."""

    name: str = RECORDS
    bytes: int
    #: Hash of the whole file, hexadecimal.
    sha256: str

    def __post_init__(self) -> None:
        if self.name != RECORDS:
            raise ValueError(f"{self.name[:80]!r} is no name of a file of records")
        if not 0 <= self.bytes <= MOST_RECORDS_BYTES:
            raise ValueError(f"bytes of {RECORDS}: is not in 0 to {MOST_RECORDS_BYTES}")
        if _SHA256.fullmatch(self.sha256) is None:
            raise ValueError(f"sha256 of {RECORDS}: is not 64 lower-case hex digits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Manifest of a checkpoint: all inputs of resuming besides the layers."""

    format: int = FORMAT
    job: str
    #: Count of applied steps.
    step: int
    #: Unix time.
    created: float
    model: AnyModel
    training: TrainingSpec
    #: Fingerprint of the data, hexadecimal.
    data: str
    #: Fingerprint of the initial weights, where checkpoints lack a part of the model (frozen
    #: weights); else empty.
    base: str = ""
    #: Count of steps that skipped a parameter for lack of a gradient, by `LAYER.NAME`, without
    #: zeros.
    missed: Mapping[str, int] = field(default_factory=dict)
    #: Ordered by layer.
    files: tuple[LayerFile, ...]
    #: None: it has none.
    records: RecordsFile | None = None

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format {self.format} is not known; this version reads {FORMAT}")
        layers = [file.layer for file in self.files]
        if layers != list(range(self.model.layer_count)):
            raise ValueError(
                f"names {len(layers)} layers, not each of {self.model.layer_count} once, in order"
            )
        check_name(self.job, "job")
        if not 0 <= self.step <= _MOST_STEP:
            raise ValueError(f"step: {self.step} is not in 0 to {_MOST_STEP}")
        if not 0.0 <= self.created <= _LATEST:
            raise ValueError(f"created: {self.created} is no Unix time up to the year 9999")
        if any(not 0 < count <= self.step for count in self.missed.values()):
            raise ValueError(f"missed: has numbers of steps that are not in 1 to {self.step}")
        for name, digits in (("data", self.data), ("base", self.base)):
            if _DATA.fullmatch(digits) is None:
                raise ValueError(f"{name}: is no fingerprint in lower-case hex digits")

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def folder_name(step: int, meeting: str) -> str:
    """Return the folder's name of the checkpoint of `step` that the members of `meeting` write.
    `meeting` is the prefix of their rendezvous, which is unique."""
    return f"step-{step:09}-{hashlib.sha256(meeting.encode()).hexdigest()[:8]}"


def step_of(name: str) -> int | None:
    """Return the step in a folder's name; None: it is not a checkpoint's."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def layer_file(layer: int) -> str:
    return f"layer-{layer:05}.safetensors"


def part_file(rank: int) -> str:
    """Return the name of the file in which the writer of that rank lists its layer files; rank 0
    makes the manifest from these lists."""
    return f"part-{rank:05}.json"


def read_manifest(text: bytes, name: str) -> Manifest:
    """Parse a manifest; raises InvalidCheckpoint."""
    try:
        return decode(Manifest, text)
    except ValueError as error:
        raise InvalidCheckpoint(f"{name}: {MANIFEST}: {error}") from error


def format_manifest(manifest: Manifest) -> bytes:
    return msgspec.json.format(encode(manifest), indent=2) + b"\n"


def why_not_begin(
    job: JobSpec,
    spec: CheckpointSpec,
    newest: tuple[str, Manifest] | None,
    *,
    damaged: Sequence[str],
    data: str | None,
    base: str = "",
) -> str:
    """Return why `job` must not start with the contents of its checkpoints' path; empty: it may.

    `newest`: name and manifest of the newest checkpoint there. `damaged`: unreadable ones, with
    reasons. `data`, `base`: see `misfit`; None and empty if unknown.
    """
    path = redact(spec.path).rstrip("/")
    if newest is None:
        if not damaged and spec.resume != "require":
            return ""
        what = "; ".join(damaged) or "there is none"
        return (
            f"checkpoint.path: no checkpoint in {path} can be used: {what}; name the path that "
            "holds them, or set checkpoint.resume to auto in an empty one to begin anew"
        )
    name, manifest = newest
    if spec.resume == "never":
        return (
            f"checkpoint.resume: is never, and {path} holds checkpoints up to step "
            f"{manifest.step}; name another path, remove them, or set it to auto to go on from "
            "there"
        )
    if manifest.step > job.training.steps:
        return (
            f"checkpoint.path: {path}/{name} is of a later step than the job's last one "
            f"({job.training.steps}); raise training.steps, or name another path"
        )
    if other := misfit(manifest, job, manifest.data if data is None else data, base):
        return (
            f"checkpoint.path: {path}/{name} is of another training: {other}; name another path, "
            "or make the job what it was"
        )
    return ""


def misfit(manifest: Manifest, job: JobSpec, data: str, base: str = "") -> str:
    """Return the first difference that keeps `job` from resuming the checkpoint; empty: it can.

    Learning rate, schedule and the number of steps may change between two runs. The contents of the
    state may not, nor the settings that decide which samples were used (seed, global batch, data).
    `data`, `base`: fingerprints of the job's data and initial weights, as in `Manifest`.
    """
    for key, saved, wanted in _compared(manifest, job):
        if saved != wanted:
            return f"{key} is {_shown(saved)} there and {_shown(wanted)} here"
    if manifest.data != data:
        return (
            "its data are other ones (files, tokenizer, separator, or evaluation.fraction, which "
            f"decides what is trained on): fingerprint {manifest.data[:12]} there and "
            f"{data[:12]} here"
        )
    if "" not in (manifest.base, base) and manifest.base != base:
        return (
            "model.weights, which it needs, are other ones by now: fingerprint "
            f"{manifest.base[:12]} there and {base[:12]} here"
        )
    return ""


def _compared(manifest: Manifest, job: JobSpec) -> list[tuple[str, object, object]]:
    saved, wanted = (msgspec.to_builtins(model) for model in (manifest.model, job.model))
    pairs: list[tuple[str, object, object]] = [("model", manifest.model.family, job.model.family)]
    pairs += [
        (f"model.{key}", saved.get(key), wanted.get(key))
        for key in wanted
        if key not in _FREE_MODEL_KEYS
    ]
    pairs.append(("the number of layers", manifest.model.layer_count, job.model.layer_count))
    pairs += [
        (f"model.layers[{number}]", before, now)
        for number, (before, now) in enumerate(
            zip(_sizes(manifest.model), _sizes(job.model), strict=False)
        )
    ]
    old, new = manifest.training, job.training
    pairs += [
        ("training.seed", old.seed, new.seed),
        ("training.global_batch", old.global_batch, new.global_batch),
        ("training.precision", _state_precision(old.precision), _state_precision(new.precision)),
        (f"training.optimizer.{_key_of(old)}", old.optimizer.label, new.optimizer.label),
        ("the optimizer's state", old.optimizer.state, new.optimizer.state),
    ]
    return pairs


def _key_of(training: TrainingSpec) -> str:
    """Return the key of the job file that names the optimizer."""
    optimizer = training.optimizer
    return "name" if optimizer.name else "plugin" if optimizer.plugin else "python"


def _sizes(model: AnyModel) -> list[str]:
    """Return the names and sizes of the layers of a user's model, whose code may have been renamed;
    empty for a built-in model."""
    if not isinstance(model, OwnModelSpec):
        return []
    return [f"{layer.name} of {layer.parameters}" for layer in model.description.layers]


def _state_precision(precision: Precision) -> str:
    """Return the precision of the state: fp32 in jobs that only compute in bf16 or fp8."""
    return "fp32" if precision in ("bf16", "fp8") else precision


def _shown(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 40 else text[:36] + '..."'
