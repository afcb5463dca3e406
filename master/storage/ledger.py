"""Ledger: the state, the journal that it follows from, and the files of jobs.

All changes of the state pass through the ledger: `journal` journals an event and applies it,
`observe` only applies it. A new ledger replays the journal. Must not know who learns of a change,
when a decision is due, gRPC, agents' sessions or time-outs.

Each journaled event is one line of the master's log, with its most important fields: a failure is a
warning or an error. Measurements that later jobs may use are in `<state-dir>/profiles/<key>.json`.
"""

import logging
import os
import re
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from oobleck.core.profile import Profile, format_profile, parse_profile
from oobleck.host.metrics import Durations
from oobleck.host.system.environment import Environment
from oobleck.host.system.files import read_regular
from oobleck.master.config import MasterConfig, Unusable
from oobleck.master.events.jobs import (
    JobFailed,
    JobForgotten,
    JobRestored,
    JobWaiting,
    MeasuringStarted,
    PlanMade,
    ProfileChosen,
    RecordsDiffer,
    RecordsLost,
    SaveProblem,
)
from oobleck.master.events.nodes import (
    NodeHeld,
    NodeLeftOut,
    NodeLost,
    NodeQuarantined,
    NodeRegistered,
    NodeReset,
    WorkerLost,
)
from oobleck.master.events.trust import TokenCreated
from oobleck.master.events.unions import (
    EvaluationReceived,
    Event,
    JournalCut,
    Journaled,
    MasterStarted,
    Observed,
    ProfilesFound,
    RecordsReceived,
    TermBegan,
)
from oobleck.master.state.cluster import ID_BYTES, ClusterState, History
from oobleck.master.state.reducer.apply import apply
from oobleck.master.state.validate import InvariantViolation, validate, violations
from oobleck.master.storage.archive import Archive
from oobleck.master.storage.cluster_log import ClusterLog
from oobleck.master.storage.disk import StorageFailed, storing
from oobleck.master.storage.event_lines import cluster_line, lines_of
from oobleck.master.storage.journal import THAT_RELEASE, Journal, Snapshot
from oobleck.master.storage.snapshot import restore, take

log = logging.getLogger(__name__)


#: Fields of events that are logged, and their names in the log.
_FIELDS = {
    "job_id": "job",
    "node": "node",
    "worker": "worker",
    "cause": "cause",
    "rule": "rule",
    "source": "source",
    "role": "role",
    "name": "holder",
    "fingerprint": "token",
    "reason": "reason",
    "force": "force",
    "bytes": "bytes",
    "kept_as": "kept_as",
    "records": "records",
}
#: Level and message of events that report a failure; the message of others is their class name as
#: words.
_FAILURES: Mapping[type[Journaled], tuple[int, str]] = {
    NodeLost: (logging.WARNING, "a node is lost"),
    WorkerLost: (logging.WARNING, "a worker is lost"),
    NodeReset: (logging.WARNING, "the workers of a node are ended, and start anew"),
    NodeLeftOut: (logging.WARNING, "a node cannot take part in the job"),
    NodeQuarantined: (logging.WARNING, "a node keeps failing, and is put aside"),
    NodeHeld: (logging.WARNING, "a node trains a job that is not this master's"),
    JobWaiting: (logging.WARNING, "the job waits for nodes"),
    JobRestored: (logging.WARNING, "the job goes on from a checkpoint"),
    RecordsDiffer: (logging.WARNING, "two nodes report one step differently"),
    RecordsLost: (logging.WARNING, "the records of some steps are lost"),
    JournalCut: (logging.WARNING, "the end of the journal was not whole and is cut off"),
    JobFailed: (logging.ERROR, "the job failed"),
}
_WORDS = re.compile(r"(?<!^)(?=[A-Z])")
#: Most bytes of a profile; that of the largest model has a megabyte.
MOST_BYTES = 16 << 20
#: Number of last events reported with a broken invariant, and characters of each.
_LAST_EVENTS = 20
_EVENT_WIDTH = 200


def log_event(event: Journaled) -> None:
    named = ((shown, getattr(event, name, None)) for name, shown in _FIELDS.items())
    fields = {shown: value for shown, value in named if value not in (None, "")}
    match event:
        case NodeRegistered(facts=facts):
            fields |= {"node": facts.node, "pid": facts.pid}
        case PlanMade(plan=plan):
            fields["generation"] = plan.generation
        case MeasuringStarted(wish=wish, passed_over=passed_over):
            fields["attempt"] = wish.attempt
            if passed_over:
                log.warning("stored profile passed over", extra={**fields, "reason": passed_over})
        case TokenCreated(maker=maker):
            fields["by"] = "/".join(maker or ())
        case SaveProblem(failed=failed):
            fields |= {"step": failed.step, "reason": failed.reason}
        case JobWaiting(causes=causes):
            fields["reason"] = "; ".join(causes)
        case JobRestored(restored=restored, lost_steps=lost):
            fields |= {"step": restored.step, "lost_steps": lost}
        case _:
            pass  # `_FIELDS` has all
    level, words = _FAILURES.get(type(event), (logging.INFO, _name(event)))
    match event:
        case NodeLost(cause="left"):
            level, words = logging.INFO, "a node has left"
        case JobRestored(resumed=True):
            level = logging.INFO
        case SaveProblem(failed=failed):
            level, words = logging.WARNING, f"the {failed.what} could not be written"
        case _:
            pass
    log.log(level, words, extra=fields)


def _name(event: Journaled) -> str:
    """Return the name of the event's class as words: `plan made`."""
    return _WORDS.sub(" ", type(event).__name__).lower()


def read_profiles(folder: Path) -> ProfilesFound:
    """Read all stored profiles. Unreadable ones are logged and returned."""
    profiles: dict[str, Profile] = {}
    unusable: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            profiles[path.stem] = parse_profile(read_regular(path, MOST_BYTES))
        except OSError as error:
            unusable[path.stem] = error.strerror or str(error)
        except ValueError as error:
            unusable[path.stem] = str(error)
        if path.stem in unusable:
            why = {"path": path, "reason": unusable[path.stem]}
            log.warning("stored profile passed over", extra=why)
    return ProfilesFound(profiles=profiles, unusable=unusable)


def write_profile(folder: Path, key: str, profile: Profile, notes: Mapping[str, object]) -> None:
    """Write the profile atomically. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(format_profile(profile, {**notes, "key": key}))
    os.replace(partial, path)


class Ledger:
    def __init__(self, config: MasterConfig, journal: Journal, environment: Environment) -> None:
        """Replay the journal. Raises JournalUnusable, Unusable, StorageFailed, InvariantViolation.
        All methods that apply an event raise the last one too."""
        self._environment = environment
        self.now = environment.now
        self.unix = environment.unix
        self.state = ClusterState()
        self.archive = Archive(config)
        self.commits = Durations()
        #: Called with each event before it changes the state, except in the replay.
        self.watch: Callable[[ClusterState, Event], None] = lambda state, event: None
        #: The state has changed since the last decision.
        self.dirty = True
        #: Not even the journal can be written.
        self.stuck = False
        self._profiles = config.profiles
        #: Invariants that the replayed journal breaks already: these do not end this master. None:
        #: the state is not validated, or its observed part is not rebuilt yet.
        self._broken_before: frozenset[str] | None = None
        #: Last events applied.
        self._last = deque[tuple[float, Event]](maxlen=_LAST_EVENTS)
        self._journal = journal
        self._replay(config)

    @property
    def problem(self) -> str:
        """Storage problem, as text for operators; empty: none."""
        return self.archive.storage.problem

    @property
    def committed(self) -> int:
        """Sequence number of the last event on disk."""
        return self._journal.committed

    def journal(self, event: Journaled) -> None:
        """Journal the event and apply it. Its effects must not be visible outside before
        `commit`."""
        unix = self.unix()
        self._journal.append(event, unix)
        log_event(event)
        self._apply_event(event, self.now(), unix)
        if isinstance(event, ProfileChosen) and event.source == "measured":
            self._store_profile(event, unix)

    def observe(self, event: Observed, at: float) -> None:
        self._apply(event, at, self.unix())

    def find_profiles(self) -> None:
        """Read the profiles again: operators may add, replace and remove the files."""
        self.observe(read_profiles(self._profiles), self.now())

    def commit(self) -> bool:
        """Commit the journaled events to disk, and return whether that succeeded."""
        waits, began = self._journal.waits, self.now()
        try:
            self._journal.commit()
        except StorageFailed as failed:
            self.archive.storage.failed(failed)
            return False
        if waits:
            self.commits.add(self.now() - began)
        return True

    def compact(self) -> None:
        """Replace the journal by a snapshot, if that is much shorter."""
        if not self._journal.wants_compaction or self.problem:
            return
        self.archive.write()
        if self.problem:  # lines that are in no file yet can only be made from these events
            return
        try:
            self.archive.events.sync()  # lines of compacted events are not made again
            self._journal.compact(self._snapshot(), self.unix())
        except StorageFailed as failed:
            self.archive.storage.failed(failed)

    def _replay(self, config: MasterConfig) -> None:
        validates = config.validate
        now, archive = self.now(), self.archive
        for unix, entry in self._journal.replay():
            if isinstance(entry, Snapshot):
                self._restore(entry, now)
            else:
                self._apply_event(entry, now, unix)
        _check_cluster(self.state.history, config)
        self.journal(MasterStarted(start=self._environment.token(ID_BYTES)))
        if self._journal.cut is not None or archive.events.ahead():
            self.journal(self._cut())
        self._begin_term(config)
        if validates:
            self._broken_before = frozenset(map(str, violations(self.state)))
            for broken in sorted(self._broken_before):
                log.warning("the journal has a state that is not sound", extra={"reason": broken})
        for job in self.state.jobs.values():
            archive.metrics(job.id).start_after(job.rollback.resumed_step)
            for lost in job.lost.last:
                archive.lose(job.id, lost.steps)
            if job.state == "succeeded" and not job.profile_only:
                # An ended job may still lack its last lines.
                archive.expect(job.id, job.spec.training.steps)
            records = archive.metrics(job.id).recent
            self.observe(RecordsReceived(job_id=job.id, records=records), now)
            if (last := archive.evaluations(job.id).last) is not None:
                self.observe(EvaluationReceived(job_id=job.id, record=last), now)
        self.find_profiles()
        while not self.commit():
            if not archive.storage.give_way():
                raise StorageFailed(archive.storage.problem)
        archive.write()
        self.compact()

    def _begin_term(self, config: MasterConfig) -> None:
        """Begin the first term of a new journal, or a new term of a journal from elsewhere, since
        another master may continue from the same journal."""
        history, token = self.state.history, self._environment.token
        term, cluster = history.term, config.cluster or history.cluster
        if term is None:
            reason = "the journal is new" if self.state.sequence == 1 else "it had no name so far"
        elif (backup := config.restored) is not None:
            reason = f"it goes on from a backup, {self.unix() - backup.time:.0f} s old"
        elif term.place != config.place:
            reason = "the state directory was copied or moved"
        elif cluster != history.cluster:
            reason = "the cluster has an authority from here on"
        else:
            return
        named_anew = term is not None and term.place == config.place and config.restored is None
        self.journal(
            TermBegan(
                cluster=cluster or token(ID_BYTES),
                history=history.id or token(ID_BYTES),
                number=term.number if term is not None and named_anew else history.next_number(),
                begun_by=term.begun_by if term is not None and named_anew else token(ID_BYTES),
                place=config.place,
                reason=reason,
            )
        )

    def _snapshot(self) -> str:
        return take(self.state, self.archive.events.given, self.archive.cluster.lines)

    def _restore(self, snapshot: Snapshot, now: float) -> None:
        try:
            self.state, given, events = restore(snapshot.content, now)
        except ValueError as error:
            raise self._journal.unusable(f"has {error}: {THAT_RELEASE}") from error
        self.archive.events.resume(given)
        self.archive.cluster = ClusterLog(events)

    def _cut(self) -> JournalCut:
        cut = self._journal.cut
        return JournalCut(
            bytes=cut.bytes if cut is not None else 0,
            kept_as=cut.kept_as if cut is not None else "",
            records=self.archive.events.ahead(),
        )

    def _apply_event(self, event: Journaled, now: float, unix: float) -> None:
        if isinstance(event, JournalCut):
            self.archive.events.resume(event.records)
        for job_id, line in lines_of(self.state, event, unix):
            self.archive.events.add(job_id, line, unix)
        if (cluster_event := cluster_line(self.state, event)) is not None:
            self.archive.cluster.add(self.state.sequence + 1, cluster_event, unix)
        self._apply(event, now, unix)
        if isinstance(event, JobForgotten):
            self.archive.forget(event.job_id)
        if isinstance(event, JobRestored) and event.resumed:
            self.archive.metrics(event.job_id).start_after(event.restored.step)
        if isinstance(event, RecordsLost):
            self.archive.lose(event.job_id, event.steps)

    def _apply(self, event: Event, now: float, unix: float) -> None:
        self.watch(self.state, event)
        self.dirty |= apply(self.state, event, now=now, unix=unix)
        self._last.append((unix, event))
        if self._broken_before is None:
            return
        try:
            validate(self.state, self._broken_before)
        except InvariantViolation as violation:
            texts = (f"{at:.3f} {event!r}"[:_EVENT_WIDTH] for at, event in self._last)
            violation.last_events = tuple(texts)
            raise

    def _store_profile(self, event: ProfileChosen, unix: float) -> None:
        if event.profile is None or not event.key:
            return
        notes = {**event.notes, "date": datetime.fromtimestamp(unix, UTC).isoformat("T", "seconds")}
        try:
            with storing(self._profiles):
                write_profile(self._profiles, event.key, event.profile, notes)
        except StorageFailed as failed:
            log.warning("the profile is not stored", extra={"reason": str(failed)})
        self.find_profiles()


def _check_cluster(history: History, config: MasterConfig) -> None:
    """Check that the journal was not written under another authority. Raises Unusable."""
    # A longer id is an authority's: a cluster without one may get its first authority later.
    had_authority = len(history.cluster) > 2 * ID_BYTES
    if had_authority and config.cluster not in ("", history.cluster):
        raise Unusable(
            f"--state-dir {config.state_dir}: is of another cluster than the authority in "
            f"{config.pki}; name the directory and the authority (--pki) that belong together, or "
            "an empty directory for a new cluster"
        )
