"""Scripted faults of a drill: real signals to real processes at exact points of a step.

The executor and the recovery report the points they reach; a matching rule acts, once.
"""

import logging
import os
import signal
import threading
import time

import torch

from oobleck.core.ids import Generation
from oobleck.core.messages import FaultRule, Launch
from oobleck.worker.runtime.control import Control

log = logging.getLogger(__name__)

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
