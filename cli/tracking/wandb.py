"""Copy of a job for Weights & Biases: one run in its offline format, for `wandb sync` afterwards.

An offline run cannot be continued, so each start writes it from the beginning and replaces an
earlier one: the master has all records. Needs the package wandb.
"""

import shutil
from pathlib import Path

import wandb

from oobleck.cli.tracking.track import (
    Item,
    Written,
    evaluation_numbers,
    event_text,
    open_locked,
    step_numbers,
)
from oobleck.host.command import FAILED, CommandFailed


class WandB:
    def __init__(self, folder: Path, job_id: str) -> None:
        """Begin the run. Raise CommandFailed or OSError."""
        folder = folder / job_id
        self._lock = open_locked(folder / "wandb.lock")
        shutil.rmtree(folder / "wandb", ignore_errors=True)
        self.written = Written()
        # Without statistics of this process, which is not the job's.
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
        )
        try:
            self._run = wandb.init(
                mode="offline", dir=folder, id=job_id, name=job_id, settings=settings
            )
        except wandb.Error as error:
            raise CommandFailed(f"wandb: {error}", FAILED) from error
        self._run.define_metric("evaluation/*", step_metric="evaluation/step")
        #: The row that is still open, and the events in it.
        self._step = 0
        self._events: list[str] = []

    def write(self, item: Item) -> None:
        """Add an item; rows need rising steps, so items between steps go to the last one."""
        record = item.record
        match item.kind:
            case "step":
                self._step, self._events = record["step"], []
                values = {**step_numbers(record), "_timestamp": record["time"]}
                self._run.log(values, step=self._step)
            case "evaluation":
                values = {**evaluation_numbers(record), "evaluation/step": record["step"]}
                self._run.log(values, step=self._step)
            case "event":
                self._events.append(event_text(record))
                self._run.log({"events": "\n".join(self._events)}, step=self._step)

    def flush(self) -> None:
        """Do nothing: wandb's own process decides when to write. The next start writes the run
        again."""

    def close(self) -> None:
        self._run.finish()
        self._lock.close()
