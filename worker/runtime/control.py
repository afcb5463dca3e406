"""Wishes of the agent to this worker, kept up to date by a thread of its own.

Owns the reading of the agent's channel, and the choice among several assignments. The main thread
queries it. The reading thread itself does the urgent work: it releases a blocked transport and ends
the process. Also owns the scripted faults of a drill.
"""

import contextlib
import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Callable

import torch

from oobleck.core.ids import Generation
from oobleck.core.messages import (
    Acknowledged,
    Ask,
    Assign,
    FaultRule,
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

#: Time in which a worker leaves its generation after the push of a new one, unless something hangs.
#: After it a native thread writes the stacks of all threads to the log, even if a lock or a native
#: call never returns.
ANSWER_S = 5.0


class Control:
    """Newest wishes of the agent.

    An abrupt assignment overrules everything older. Running workers enter a boundary assignment
    through the vote of a step (`boundary`). A worker that runs no steps, because it has not begun,
    has ended, or must meet others again, enters it at once.
    """

    def __init__(self, channel: Channel[ToWorker]) -> None:
        self._channel = channel
        self._changed = threading.Condition()
        self._abrupt: Assign | None = None
        self._boundaries: dict[Generation, Assign] = {}
        self._measure: Measure | None = None
        self._on_abrupt: Callable[[], None] | None = None
        #: Recording of steps that is wanted; None: none.
        self.record: Record | None = None
        #: Number of the newest wish for a checkpoint; 0: none.
        self.save_wish = 0
        #: Records of this worker, with the master's acknowledgements.
        self.records = RecordLog()
        #: Newest loss that was reported to the agent.
        self._lost: PeerLost | None = None

    def start(self) -> None:
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def report(self, message: FromWorker) -> None:
        """Send a report to the agent; if the agent is gone, the listening thread ends the process
        anyway.
        """
        with contextlib.suppress(OSError):
            self._channel.send(message)

    def report_lost(self, lost: PeerLost) -> bool:
        """Report a loss to the agent, unless it is the same as the last reported one; return
        whether it was sent. Callable from any thread."""
        with self._changed:
            if lost == self._lost:
                return False
            self._lost = lost
        self.report(lost)
        return True

    def answered(self) -> None:
        """Cancel the dump of tracebacks: the worker has left its old generation."""
        faulthandler.cancel_dump_traceback_later()

    def report_recorded(self, recorded: Recorded) -> None:
        """Send the requested recording to the agent, once."""
        with self._changed:
            if self.record is not None and self.record.number == recorded.recording.number:
                self.record = None
        self.report(recorded)

    def on_abrupt(self, callback: Callable[[], None] | None) -> None:
        """Set the `callback` for an abrupt change or a newer wish to measure; the listening thread
        calls it."""
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
        while steps are committed. If it is newer, no other worker will enter `generation`.
        """
        with self._changed:
            newest = self._newest()
        if newest is not None and newest.plan.generation > generation:
            raise Superseded(newest.plan.generation)

    def check_measuring(self, generation: Generation) -> None:
        """Raise Superseded when the current measurement must yield to a newer attempt or to a
        generation newer than `generation`."""
        self.check_newest(generation)
        if self._measure is not None:
            raise Superseded(generation)

    def announced(self, generation: Generation) -> Assign | None:
        """Return the newest boundary change after `generation`, if any."""
        with self._changed:
            newest = max(self._boundaries, default=generation)
            return self._boundaries[newest] if newest > generation else None

    def boundary(self, generation: Generation) -> Assign:
        """Return the boundary change that a vote chose, which this worker has voted for. Raises
        Superseded if an abrupt one has arrived since."""
        with self._changed:
            chosen = self._boundaries.get(generation)
            if chosen is None:
                raise Superseded(generation)
            self._boundaries = {g: a for g, a in self._boundaries.items() if g > generation}
        return chosen

    def wait_next(self, generation: Generation) -> Assign | Measure:
        """Wait for an assignment newer than `generation`, when no more steps run, or else for a
        wish to measure. Each wish to measure is returned once."""
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
        """Wait for `seconds`; raises Superseded as soon as a newer abrupt generation is wanted."""
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
            # Last resort of this thread: a worker that no longer hears its agent must not continue.
            log.exception("the agent's channel broke")
            end_process(1)
        # A worker without its agent must end, whatever the main thread is doing.
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


# ---- Scripted faults of a drill: real signals to real processes at exact points of a step.
#
# The executor and the recovery report the points they reach; a matching rule acts, once.


#: Longer than any drill.
_NEVER_S = 3600


class FaultInjector:
    """Rules that concern one worker in one job."""

    def __init__(self, launch: Launch, control: Control) -> None:
        self._rules = [
            rule
            for rule in launch.faults
            if rule.worker == launch.worker and rule.job in (None, launch.job.name)
        ]
        self._agent_pid = launch.agent_pid
        self._control = control

    def reached(
        self, point: str, *, generation: Generation, step: int, microbatch: int | None = None
    ) -> None:
        """Act if a rule names this point. It may not return; a hold raises Superseded at its end,
        and a failing device raises its own error."""
        if not self._rules:
            return
        for rule in self._rules:
            if (
                rule.point == point
                and rule.generation in (None, generation)
                and rule.step in (None, step)
                and rule.microbatch in (None, microbatch)
            ):
                self._rules.remove(rule)
                self._act(rule, generation)
                return

    def _act(self, rule: FaultRule, generation: Generation) -> None:
        log.warning("scripted fault", extra={"action": rule.action, "point": rule.point})
        match rule.action:
            case "kill_worker":
                os.kill(os.getpid(), signal.SIGKILL)
            case "kill_node":
                # The agent's warm process and all workers die with it.
                os.kill(self._agent_pid, signal.SIGKILL)
                time.sleep(_NEVER_S)
            case "hold":
                self._control.pause(generation, _NEVER_S)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                threading.Event().wait()
            case "no_memory":
                raise torch.OutOfMemoryError("scripted: out of memory")
            case "device_fails":
                raise torch.AcceleratorError("scripted: an illegal memory access")
