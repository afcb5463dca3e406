"""Thread that writes one checkpoint: this worker's layers and, on one worker, the manifest.

Each writer writes its layers' files, then a list of them with their hashes. The publisher waits for
all lists and writes the manifest, which completes the checkpoint. The folder is the only means of
communication, so a folder that is not shared is detected.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from oobleck.core.checkpoint import (
    MANIFEST,
    MOST_MANIFEST_BYTES,
    RECORDS,
    LayerFile,
    Manifest,
    RecordsFile,
    format_manifest,
    layer_file,
    misfit,
    part_file,
)
from oobleck.core.codec import decode, encode
from oobleck.core.ids import WorkerId
from oobleck.core.job.model import AnyModel, ModelSpec, OwnModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import CheckpointSaved, SaveFailed
from oobleck.core.redact import redact
from oobleck.host.storage.checkpoints import prune, sweep
from oobleck.host.storage.folder import CHUNK_BYTES, Content, Folder
from oobleck.worker.checkpoint.snapshots import Snapshots
from oobleck.worker.runtime.records import RecordLog, describe_file
from oobleck.worker.state.layout import layout, pack
from oobleck.worker.state.progress import Missed

log = logging.getLogger(__name__)

#: Pauses between two looks for the other writers' lists.
_FIRST_POLL_S = 0.01
_LONGEST_POLL_S = 0.5
#: Longest delay until another node sees a new file.
SEEN_AFTER_S = 10.0
#: Longest wait for the record of the checkpoint's own step, which follows the step at once.
_RECORD_WITHIN_S = 10.0
#: Time that a failed checkpoint stays for writers that still work in it.
_LINGER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Order to save; only `rank` differs between the workers of a generation."""

    job: JobSpec
    job_id: str
    step: int
    #: Name of the checkpoint's folder.
    name: str
    #: Fingerprints, in hexadecimal, of the data and of initial weights that the state needs.
    data: str
    base: str
    #: As `Manifest.missed`.
    missed: Missed = field(default_factory=dict)
    #: Request that this answers; 0: none.
    wish: int
    #: Layers that each worker writes, in rank order.
    writers: tuple[tuple[WorkerId, tuple[int, ...]], ...]
    #: Rank of this worker.
    rank: int
    #: Rank of the worker that writes the records.
    recorder: int = 0

    @property
    def publishes(self) -> bool:
        """True if this worker writes the manifest."""
        return self.rank == 0

    @property
    def parts(self) -> Mapping[int, WorkerId]:
        """Workers that write something, by rank."""
        ranks = enumerate(self.writers)
        return {r: worker for r, (worker, layers) in ranks if layers or r == self.recorder}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """List of the files that one writer has written."""

    files: tuple[LayerFile, ...]
    records: RecordsFile | None = None


class _Abandoned(Exception):
    """Abandonment of this checkpoint; its reason was reported already."""


class CheckpointWriter:
    """Writer of one checkpoint: a thread, and what other threads report to it."""

    def __init__(
        self,
        order: Order,
        folder: Folder,
        snapshots: Snapshots,
        records: RecordLog,
        *,
        report: Callable[[CheckpointSaved | SaveFailed], None],
        reached: Callable[[], None],
        seen_after_s: float = SEEN_AFTER_S,
    ) -> None:
        """Start the thread.

        `folder`: folder of all checkpoints. `snapshots`: layers that this worker writes; they are
        made here and freed once written. `records`: records of this worker. `reached`: called
        before each layer is written.
        """
        self.order = order
        #: Whether the write failed or was abandoned; and the reason, if the disk or service refused
        #: it.
        self.failed = False
        self.problem = ""
        self._folder = folder
        self._snapshots = snapshots
        self._records = records
        self._report = report
        self._reached = reached
        self._seen_after_s = seen_after_s
        self._begun_at = time.monotonic()
        self._changed = threading.Event()
        self._abandoned = False
        self._disturbed = False
        self._others_done_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """True while the thread is running."""
        return self._thread.is_alive()

    def others_are_done(self) -> None:
        """Note that all other workers have written their part or have given up."""
        if self._others_done_at is None:
            self._others_done_at = time.monotonic()
            self._changed.set()

    def abandon(self, *, disturbed: bool) -> None:
        """Stop before the next file. If there is none, the checkpoint may still be completed.

        `disturbed`: workers are lost; otherwise, one could not write.
        """
        self._abandoned = True
        self._disturbed = self._disturbed or disturbed
        self._changed.set()

    # ---- in the thread

    def _run(self) -> None:
        manifest: Manifest | None = None
        try:
            self._snapshots.make()
            self._write()
            if self.order.publishes:
                manifest = self._publish()
        except _Abandoned:
            self.failed = True
        except Exception as error:
            # Thread boundary: training goes on whatever the disk or service does.
            log.exception("checkpoint failed")
            self._fail(_describe(error))
        finally:
            self._snapshots.clear()
        if manifest is not None:
            self._tell_saved(manifest)
            self._tidy()
        elif self.order.publishes:
            self._give_up()

    def _fail(self, reason: str) -> None:
        order = self.order
        self.problem = redact(f"cannot write to {self._folder.url}: {reason}")
        self.failed = True
        self._report(
            SaveFailed(
                what="checkpoint",
                step=order.step,
                reason=self.problem,
                request=order.wish,
            )
        )

    def _write(self) -> None:
        order = self.order
        if order.publishes:
            other = sweep(self._folder, under_way=order.name, is_own=self._is_own)
            if other:
                log.warning(
                    "another training saves to this checkpoint.path; each resumes from its own, "
                    "and a new job with this path is refused: give every job its own",
                    extra={"path": self._folder.url, "checkpoint": other},
                )
        if order.rank not in order.parts:
            return
        files = []
        for layer in order.writers[order.rank][1]:
            if self._abandoned:
                raise _Abandoned
            self._reached()
            files.append(self._write_layer(layer, self._snapshots.take(layer)))
        records = self._write_records() if order.rank == order.recorder else None
        part = _Part(files=tuple(files), records=records)
        self._folder.write(f"{order.name}/{part_file(order.rank)}", [encode(part)])

    def _write_records(self) -> RecordsFile:
        lines = self._records.lines(self.order.step, _RECORD_WITHIN_S)
        self._folder.write(f"{self.order.name}/{RECORDS}", lines)
        return describe_file(lines)

    def _write_layer(self, layer: int, snapshot: torch.Tensor) -> LayerFile:
        job, name = self.order.job, layer_file(layer)
        content = pack(
            snapshot,
            layout(job.model, layer, job.training.optimizer.no_decay),
            job.training.optimizer.state,
            {"layer": str(layer), "step": str(self.order.step)},
        )
        digest = hashlib.sha256()
        self._folder.write(f"{self.order.name}/{name}", _hashed(content, digest))
        size = sum(memoryview(part).nbytes for part in content)
        return LayerFile(name=name, layer=layer, bytes=size, sha256=digest.hexdigest())

    def _publish(self) -> Manifest:
        manifest = self._manifest(*self._all_parts())
        self._folder.write(f"{self.order.name}/{MANIFEST}", [format_manifest(manifest)])
        return manifest

    def _tell_saved(self, manifest: Manifest) -> None:
        order = self.order
        saved = CheckpointSaved(
            step=order.step,
            path=f"{self._folder.url.rstrip('/')}/{order.name}",
            bytes=manifest.bytes,
            seconds=time.monotonic() - self._begun_at,
            request=order.wish,
        )
        log.info("checkpoint saved", extra={"step": saved.step, "path": saved.path})
        self._report(saved)

    def _manifest(self, files: list[LayerFile], records: RecordsFile | None) -> Manifest:
        job = self.order.job
        return Manifest(
            job=self.order.job_id,
            step=self.order.step,
            created=time.time(),
            model=_without_secrets(job.model),
            training=job.training,
            data=self.order.data,
            base=self.order.base,
            missed=self.order.missed,
            files=tuple(sorted(files, key=lambda file: file.layer)),
            records=records,
        )

    def _all_parts(self) -> tuple[list[LayerFile], RecordsFile | None]:
        """Wait for all writers' lists; return their files and the records."""
        wanted = {part_file(rank): worker for rank, worker in self.order.parts.items()}
        here = self._folder.below(self.order.name)
        files: list[LayerFile] = []
        records: RecordsFile | None = None
        poll_s = _FIRST_POLL_S
        while True:
            last_look = self._abandoned or self._is_late()
            for name in sorted(wanted.keys() & set(here.names())):
                part = decode(_Part, here.read(name, most_bytes=MOST_MANIFEST_BYTES))
                files += part.files
                records = part.records or records
                del wanted[name]
            if not wanted:
                self._check_there(files, here.names())
                return files, records
            if last_look:
                if not self._abandoned:
                    self._report_unseen(", ".join(map(str, wanted.values())))
                raise _Abandoned
            self._changed.wait(poll_s)
            self._changed.clear()
            poll_s = min(_LONGEST_POLL_S, 2 * poll_s)

    def _check_there(self, files: list[LayerFile], names: list[str]) -> None:
        """Fail if files are missing: another job may have removed them."""
        lacking = sorted({file.name for file in files} - set(names))
        if lacking:
            self._fail(
                f"{', '.join(lacking)} disappeared meanwhile; another job may save there too: "
                "give every job that trains at the same time its own path"
            )
            raise _Abandoned

    def _is_late(self) -> bool:
        """Return whether all files should have become visible here by now."""
        done_at = self._others_done_at
        return done_at is not None and time.monotonic() > done_at + self._seen_after_s

    def _report_unseen(self, missing: str) -> None:
        here = self.order.writers[self.order.rank][0].node
        self._fail(
            f"files of {missing} do not appear on {here}; checkpoint.path must be the "
            "same place on all nodes"
        )

    def _give_up(self) -> None:
        """Remove the folder once nobody writes to it any more.

        After a loss that time is unknown; then the next save removes the folder.
        """
        until = time.monotonic() + _LINGER_S
        while self._others_done_at is None and time.monotonic() < until and not self._disturbed:
            self._changed.wait(_LONGEST_POLL_S)
            self._changed.clear()
        if self._disturbed:
            return
        try:
            self._folder.remove(self.order.name)
        except OSError:
            log.exception("an incomplete checkpoint could not be removed")

    def _is_own(self, manifest: Manifest) -> bool:
        return not misfit(manifest, self.order.job, self.order.data, self.order.base)

    def _tidy(self) -> None:
        spec = self.order.job.checkpoint
        assert spec is not None, "only jobs with checkpoints save any"
        here = self._folder.below(self.order.name)
        try:
            for rank in self.order.parts:
                here.remove(part_file(rank))
            prune(
                self._folder,
                keep=spec.keep,
                newest=self.order.name,
                is_own=self._is_own,
                now=time.time(),
            )
        except OSError:
            log.exception("old checkpoints could not be removed")


def _hashed(content: list[Content], digest: "hashlib._Hash") -> Iterator[Content]:
    for part in content:
        view = memoryview(part)
        for start in range(0, view.nbytes, CHUNK_BYTES):
            piece = view[start : start + CHUNK_BYTES]
            digest.update(piece)
            yield piece


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"


def _without_secrets(model: AnyModel) -> AnyModel:
    """Return `model` as a manifest may state it: without secrets in the address of its weights."""
    if isinstance(model, ModelSpec | OwnModelSpec) and model.weights is not None:
        return replace(model, weights=redact(model.weights))
    return model
