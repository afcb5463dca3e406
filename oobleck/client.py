"""Jobs from Python: submit them, follow them, end them.

The calls and checks are those of the command `oobleck`, whose code this uses. Following a job
continues after the master was away for less than a minute, as in a restart.
"""

import json
import logging
import numbers
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from oobleck.cli import client as command
from oobleck.cli import options
from oobleck.cli.jobs import job_file
from oobleck.cli.jobs.checkpoint import take
from oobleck.cli.jobs.follow import Away, follow_events, follow_metrics
from oobleck.cli.jobs.submit import send
from oobleck.core.codec import decode
from oobleck.core.ids import JobId
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import StepRecord
from oobleck.errors import InvalidJob, JobFailed, Refused, from_command
from oobleck.host.ipc.endpoint import DEFAULT_MASTER, Endpoint, choose_endpoint
from oobleck.records import Checkpoint, JobStatus, Node, job_status, node

log = logging.getLogger(__name__)

#: Seconds between two queries of a job that is waited for. A watch would bring a message per step.
_LOOK_S = 0.25


class Client:
    """Operator of one cluster. Use it as a context, or close it. All methods raise Error."""

    def __init__(
        self, master: str | Endpoint | None = None, credentials: str | Path | None = None
    ) -> None:
        """Open a client.

        `master`: HOST:PORT, or several separated by commas, else OOBLECK_MASTER's, else where
        `oobleck local` listens. `credentials`: folder of your certificate, else
        OOBLECK_CREDENTIALS; those of a master that you run on this host are found.
        """
        self._master = command.MasterClient(
            master if isinstance(master, Endpoint) else _endpoint(master, credentials)
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._master.close()

    def submit(
        self, job: str | Path | Mapping[str, Any], *, set: Sequence[str] = (), pack: bool = True
    ) -> JobId:
        """Queue a job. Raises InvalidJob.

        `job`: the path of a job file, or its content; relative paths are relative to its folder, or
        to the working directory. `set`: KEY=VALUE, as `--set` of the command. `pack`: the code in
        that folder goes along, as with the command.
        """
        try:
            with from_command():
                spec = _read(job, set)
                base = Path.cwd() if isinstance(job, Mapping) else job_file.folder_of(Path(job))
                profile = job_file.read_profile(spec)
                reply = send(self._master, spec, profile, base, pack=pack, say=log.info)
        except Refused as refused:
            raise InvalidJob(str(refused)) from refused
        if reply.warning:
            log.warning("%s: %s", reply.job_id, reply.warning)
        return JobId(reply.job_id)

    def status(self, job: str) -> JobStatus:
        with from_command():
            return job_status(self._master.job(job))

    def wait(self, job: str, timeout: float | None = None) -> JobStatus:
        """Wait until the job has succeeded, and return its last status. Raises JobFailed if it
        failed or was cancelled, and TimeoutError after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        master = Away(log.warning)
        while True:
            with from_command():
                try:
                    status = job_status(self._master.job(job))
                    master.answered()
                except command.Unreachable as unreachable:
                    master.wait(unreachable)
                    if until is not None and time.monotonic() >= until:
                        raise TimeoutError(
                            f"the master is away after {timeout:g} s; {job} goes on without it"
                        ) from unreachable
                    continue
            if status.state == "succeeded":
                return status
            if status.ended:
                why = f": {status.reason}" if status.reason else ""
                raise JobFailed(f"{job} {status.state}{why}", status)
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(
                    f"{job} is {status.state} at step {status.step} of {status.steps} after "
                    f"{timeout:g} s; it goes on"
                )
            time.sleep(_LOOK_S)

    def metrics(self, job: str, follow: bool = False, from_step: int = 1) -> Iterator[StepRecord]:
        """Yield the record of each committed step, from `from_step` on, in order and exactly once.
        `follow`: also future steps, until the job ends."""
        with from_command():
            self._master.job(job)
            lines = (
                follow_metrics(self._master, job, from_step=from_step, tell=log.warning)
                if follow
                else self._master.metrics(job, follow=False, from_step=from_step)
            )
            for line in lines:
                yield decode(StepRecord, line)

    def events(self, job: str = "", follow: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the job's events, oldest first, as in its events.jsonl (docs/formats.md). `job`:
        empty for the events of the cluster. `follow`: also future events, until the job ends."""
        with from_command():
            records = (
                follow_events(self._master, job, tell=log.warning)
                if follow
                else self._master.events(job, follow=False)
            )
            for record in records:
                yield json.loads(record.json)

    def cancel(self, job: str) -> JobStatus:
        """End the job; one that has ended stays as it is."""
        with from_command():
            return job_status(self._master.cancel(job))

    def checkpoint(self, job: str) -> Checkpoint:
        """Request a checkpoint at the end of the step, and wait until it is published."""
        with from_command():
            record = take(self._master, job)
        return Checkpoint(step=record["step"], path=record["path"])

    def jobs(self) -> list[JobStatus]:
        """Return all jobs that the master knows, oldest first."""
        with from_command():
            return [job_status(job) for job in self._master.jobs()]

    def nodes(self) -> list[Node]:
        with from_command():
            return [node(found) for found in self._master.nodes()]


def _endpoint(master: str | None, credentials: str | Path | None) -> Endpoint:
    """Return the endpoint that the command would find. Raises Refused."""
    address = master or os.environ.get("OOBLECK_MASTER") or DEFAULT_MASTER
    folder = credentials or os.environ.get("OOBLECK_CREDENTIALS") or None
    try:
        options.check_master(address)
        return choose_endpoint(
            address, None if folder is None else Path(folder).expanduser(), insecure=False
        )
    except ValueError as error:
        raise Refused(str(error)) from error


def _read(job: str | Path | Mapping[str, Any], overrides: Sequence[str]) -> JobSpec:
    if not isinstance(job, Mapping):
        if not isinstance(job, str | os.PathLike):
            what = type(job).__name__
            raise InvalidJob(
                f"the job is {what}; give a job file's path, or its content as a mapping"
            )
        return job_file.read_job(Path(job), overrides)
    try:
        text = json.dumps(_plain(job, ""))  # JSON is YAML
    except RecursionError:
        raise InvalidJob("the job: a part of it contains itself; remove that reference") from None
    return job_file.job_of_text(text, overrides, source="the job", base=Path.cwd())


def _plain(value: Any, key: str) -> Any:
    """Return `value`, at `key` of the job, in the types of a job file. Raises InvalidJob."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise InvalidJob(f"the job: {key} has the key {name!r}; use text as keys")
        return {name: _plain(part, f"{key}.{name}".lstrip(".")) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, f"{key}[{number}]") for number, part in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, numbers.Number) and hasattr(value, "item"):  # a NumPy scalar
        return _plain(value.item(), key)
    raise InvalidJob(f"the job: {_no_value(value, key)}")


def _no_value(value: object, key: str) -> str:
    """Return why no job file can hold `value`, and the fix."""
    name, module = getattr(value, "__qualname__", None), getattr(value, "__module__", None)
    if name is None or not callable(value):
        return (
            f"{key} is a {type(value).__name__}; give numbers, texts, lists and mappings, and name "
            "the function of a model or data: {'python': 'module:function', 'arguments': {...}}"
        )
    if "<" in name:
        fix = "define it at the top of a file, such as my_job.py, and give 'my_job:NAME'"
    elif module == "__main__":
        fix = f"write it to a file, such as my_job.py, and give 'my_job:{name}'"
    else:
        fix = f"give '{module}:{name}'"
    what = "class" if isinstance(value, type) else "function"
    return f"{key} is the {what} {name}, and workers load it by its name; {fix} as python"
