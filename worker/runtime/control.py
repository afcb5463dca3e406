"""Wishes of the agent to this worker, kept up to date by a thread of its own.

Owns the reading of the agent's channel, and which of several assignments counts. The main thread
asks. The reading thread itself does what must not wait for the main thread: it releases a blocked
transport and ends the process."""

import contextlib
import faulthandler
import logging
import threading
import time
from collections.abc import Callable

from oobleck.core.ids import Generation
from oobleck.core.messages import (
    Acknowledged,
    Ask,
    Assign,
    FromWorker,
    Launch,
    Measure,
    PeerLost,
    Record,
    Recorded,
    Save,
    Stop,
    ToWorker,
)
from oobleck.host.ipc.channel import Channel
from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.code import end_process
from oobleck.worker.runtime.errors import Superseded
from oobleck.worker.runtime.records import RecordLog

log = logging.getLogger(__name__)

#: From the push of a new generation until a worker has left the old one, where nothing hangs. Then
#: a thread of the interpreter's own writes the stacks of all threads to the log: neither a lock nor
#: a native call that never returns prevents it.
ANSWER_S = 5.0


class Control:
    """Newest wishes of the agent.

    An abrupt assignment overrules everything older. A boundary assignment is entered by running
    workers through the vote of a step (`boundary`), and at once by one that runs no steps: not
    yet, not any more, or not until it meets others again.
    """

    def __init__(self, channel: Channel[ToWorker]) -> None:
        self._channel = channel
        self._changed = threading.Condition()
        self._abrupt: Assign | None = None
        self._boundaries: dict[Generation, Assign] = {}
        self._measure: Measure | None = None
        self._on_abrupt: Callable[[], None] | None = None
        #: What is to be recorded of the steps; None: nothing.
        self.record: Record | None = None
        #: Number of the newest wish for a checkpoint; 0: none.
        self.save_wish = 0
        #: What this worker has recorded, and which of it the master has.
        self.records = RecordLog()
        #: The newest loss that the agent was told of.
        self._lost: PeerLost | None = None

    def start(self) -> None:
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def report(self, message: FromWorker) -> None:
        """Tell the agent; when the agent is gone, the listening thread ends the process anyway."""
        with contextlib.suppress(OSError):
            self._channel.send(message)

    def report_lost(self, lost: PeerLost) -> bool:
        """Tell the agent of a loss, unless the last thing that it was told of losses is the same;
        whether it was told. From any thread."""
        with self._changed:
            if lost == self._lost:
                return False
            self._lost = lost
        self.report(lost)
        return True

    def answered(self) -> None:
        """Call off the dump of tracebacks: the worker has left its old generation."""
        faulthandler.cancel_dump_traceback_later()

    def report_recorded(self, recorded: Recorded) -> None:
        """Tell the agent what was asked for, once."""
        with self._changed:
            if self.record is not None and self.record.number == recorded.recording.number:
                self.record = None
        self.report(recorded)

    def on_abrupt(self, callback: Callable[[], None] | None) -> None:
        """Have `callback` called (in the listening thread) whenever an abrupt change arrives, or
        a newer wish to measure."""
        with self._changed:
            self._on_abrupt = callback

    def is_overruled(self, generation: Generation) -> bool:
        """Return whether an abrupt generation newer than `generation` has been pushed."""
        abrupt = self._abrupt
        return abrupt is not None and abrupt.plan.generation > generation

    def check_wanted(self, generation: Generation) -> None:
        """Raise Superseded when an abrupt generation newer than `generation` has been pushed."""
        abrupt = self._abrupt
        if abrupt is not None and abrupt.plan.generation > generation:
            raise Superseded(abrupt.plan.generation)

    def check_newest(self, generation: Generation) -> None:
        """Raise Superseded when any generation newer than `generation` has been pushed.

        For a worker that waits for the others of `generation`: a boundary change is pushed only
        where steps are committed, so where it is newer, nobody else comes.
        """
        with self._changed:
            newest = self._newest()
        if newest is not None and newest.plan.generation > generation:
            raise Superseded(newest.plan.generation)

    def check_measuring(self, generation: Generation) -> None:
        """Raise Superseded when the measurement under way is to give way to a newer attempt or to
        a generation newer than `generation`."""
        self.check_newest(generation)
        if self._measure is not None:
            raise Superseded(generation)

    def announced(self, generation: Generation) -> Assign | None:
        """Return the newest boundary change after `generation`, if any."""
        with self._changed:
            newest = max(self._boundaries, default=generation)
            return self._boundaries[newest] if newest > generation else None

    def boundary(self, generation: Generation) -> Assign:
        """Return the boundary change that a vote chose; this worker has voted for it, so it has it.
        Raises Superseded where an abrupt one has come since."""
        with self._changed:
            chosen = self._boundaries.get(generation)
            if chosen is None:
                raise Superseded(generation)
            self._boundaries = {g: a for g, a in self._boundaries.items() if g > generation}
        return chosen

    def wait_next(self, generation: Generation) -> Assign | Measure:
        """Wait for an assignment newer than `generation`, in which no more steps are run, or else
        for what to measure; each wish to measure is returned once."""
        with self._changed:
            while True:
                newest = self._newest()
                if newest is not None and newest.plan.generation > generation:
                    return newest
                if self._measure is not None:
                    wish, self._measure = self._measure, None
                    return wish
                with pulse.PAUSED:
                    self._changed.wait()

    def _newest(self) -> Assign | None:
        pushed = [*self._boundaries.values(), *([self._abrupt] if self._abrupt else [])]
        return max(pushed, key=lambda assign: assign.plan.generation, default=None)

    def pause(self, generation: Generation, seconds: float) -> None:
        """Let time pass; raises Superseded as soon as a newer abrupt generation is wanted."""
        until = time.monotonic() + seconds
        with self._changed:
            while (left := until - time.monotonic()) > 0:
                self.check_wanted(generation)
                with pulse.PAUSED:
                    self._changed.wait(left)

    def _listen(self) -> None:
        try:
            self._follow()
        except Exception:
            # The boundary of this thread: a worker that no longer hears its agent must not go on.
            log.exception("the agent's channel broke")
            end_process(1)
        # Without its agent a worker is nobody's; whatever the main thread is in, end here.
        end_process(0)

    def _follow(self) -> None:
        while (message := self._channel.receive()) is not None:
            match message:
                case Assign():
                    self._accept(message)
                case Measure():
                    self._wish(message)
                case Record():
                    with self._changed:
                        self.record = message
                case Save(number=number):
                    self.save_wish = max(self.save_wish, number)
                case Acknowledged(step=step, evaluation=evaluation):
                    self.records.acknowledge(step, evaluation)
                case Ask():
                    self.report(pulse.read())
                case Stop(reason=reason):
                    log.info("stopping", extra={"reason": reason})
                    end_process(0)
                case Launch():
                    log.error("a second launch message was ignored")

    def _wish(self, measure: Measure) -> None:
        with self._changed:
            self._measure = measure
            callback = self._on_abrupt
            self._changed.notify_all()
        if callback is not None:
            callback()

    def _accept(self, assign: Assign) -> None:
        generation = assign.plan.generation
        callback = None
        with self._changed:
            self._measure = None
            if assign.boundary:
                self._boundaries[generation] = assign
            elif self._abrupt is None or generation > self._abrupt.plan.generation:
                self._abrupt = assign
                self._boundaries = {g: a for g, a in self._boundaries.items() if g > generation}
                callback = self._on_abrupt
                faulthandler.dump_traceback_later(ANSWER_S)
            self._changed.notify_all()
        if callback is not None:
            callback()
