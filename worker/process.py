"""The main thread of a worker process: runs the session, and sorts errors by whose fault they are.

An error is the node's, the user's or our own. Must not know training.
"""

import logging

import torch

from oobleck.core.messages import Failed, Launch
from oobleck.core.redact import redact
from oobleck.host.data.token_file import DataError
from oobleck.worker.runtime.code import described
from oobleck.worker.runtime.control import Control
from oobleck.worker.runtime.device import take_place
from oobleck.worker.runtime.errors import (
    HelperLost,
    InvariantViolation,
    JobError,
    NodeError,
    for_want_of_memory,
    whose_fault,
)
from oobleck.worker.session import Session

log = logging.getLogger(__name__)


def run(launch: Launch, control: Control, pid: int) -> int:
    """The main thread of a worker process; returns its exit status."""
    try:
        take_place(launch)
        Session(launch, control).run(pid)
    except InvariantViolation as error:
        log.exception("invariant violated")
        control.report(Failed(kind="internal", message=redact(f"{type(error).__name__}: {error}")))
    except HelperLost as error:
        control.report(Failed(kind="internal", message=redact(str(error))))
    except (DataError, NodeError, OSError) as error:
        control.report(Failed(kind="node", message=redact(str(error))))
    except JobError as error:
        if error.__cause__ is not None:
            log.exception("the job's code failed")
        control.report(Failed(kind="user", message=redact(str(error))))
    except torch.AcceleratorError as error:
        # Whatever this process asks of its GPU from now on fails as well.
        log.exception("the device failed")
        told = f"{launch.worker}: the GPU has failed: {describe(error)}"
        control.report(Failed(kind=whose_fault(error), message=redact(told)))
    except BaseException as error:
        # The process boundary: whatever the model or the optimizer raised is the job's failure.
        log.exception("training failed")
        control.report(Failed(kind="user", message=redact(f"{launch.worker}: {describe(error)}")))
    return 1


def describe(error: BaseException) -> str:
    """Return one line that describes `error`; if memory is short, one that says what to do."""
    line = str(error).partition("\n")[0]
    if for_want_of_memory(error):
        return (
            f"out of memory ({line or type(error).__name__}); lower training.microbatch, or set "
            "resources.memory_per_worker to what is free so that the plan uses more nodes"
        )
    return described(error)
