"""Checks that run jobs on a small cluster of this host, with its own master and agents, as an
operator would: one whose workers are killed, whose losses must be those of a CPU, and one for what
it takes in time and memory."""

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from oobleck.core.codec import encode
from oobleck.core.finding import Finding
from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.messages import FaultRule
from oobleck.core.units import format_bytes
from oobleck.host.system.process import python, with_parent
from oobleck.worker.doctor.pair import pair
from oobleck.worker.doctor.replicas import job_of

_START_S = 30.0
_END_S = 5.0
_POLL_S = 0.1
#: All jobs of a cluster.
JOBS_S = 80.0
#: Where a worker is killed, each in a job of its own that begins with all workers.
KILLS = ("before:Forward", "before:Backward", "before:SyncGradient", "voting", "reduced")
_STEPS, _KILLED_AT = 6, 3
#: Of a loss on one device beside that on another one, in float64.
_SAME = 1e-9
_STALL_S = 20.0
#: Of torch's speed; and of the memory that was planned.
_SLOW, _OVER = 0.8, 1.1


class _Failed(Exception):
    """A job did not end well, and why."""


class _Cluster:
    """A master and its agents, each with some of the devices; a context manager."""

    def __init__(self, nodes: Sequence[Sequence[str]], faults: Sequence[FaultRule] = ()) -> None:
        """`nodes`: the devices of each."""
        self._nodes = nodes
        self._faults = faults
        self._stack = ExitStack()

    def __enter__(self) -> "_Cluster":
        with ExitStack() as stack:
            self._stack = stack
            self._deadline = time.monotonic() + JOBS_S
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="oobleck-doctor-"))
            self._folder = Path(folder)
            (self._folder / "text").write_bytes(bytes(n * n % 251 for n in range(60_000)))
            (self._folder / "faults").write_bytes(encode(tuple(self._faults)))
            self._started: list[subprocess.Popen[bytes]] = []
            self._address = ""
            stack.callback(self._end)
            self._address = self._start_master()
            for number, devices in enumerate(self._nodes, 1):
                self._start_agent(f"n{number}", devices)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, module: str, *arguments: str, **more: Any) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context((self._folder / f"log-{len(self._started)}").open("wb"))
        process = subprocess.Popen(
            [*with_parent(module), *arguments], stderr=log, **{"stdout": log, **more}
        )
        self._started.append(process)
        return process

    def _start_master(self) -> str:
        state = str(self._folder / "state")
        # By it the master is this user's alone; what else this user starts finds it by itself.
        self._command("pki", "init", "--dir", f"{state}/pki")
        arguments = ("--listen", "127.0.0.1:0", "--state-dir", state)
        master = self._start("oobleck.master", *arguments, stdout=subprocess.PIPE)
        assert master.stdout is not None
        line = master.stdout.readline().decode().strip()
        master.stdout.close()
        if not line.startswith("listening on "):
            raise _Failed(f"the master does not start: {self._last_words()}")
        return line.removeprefix("listening on ")

    def _start_agent(self, name: str, devices: Sequence[str]) -> None:
        arguments = ["--master", self._address, "--name", name]
        arguments += ["--workers", str(len(devices)), "--fault-plan", str(self._folder / "faults")]
        environment = dict(os.environ)
        if devices[0] == "cpu":
            arguments += ["--memory-per-worker", "1GiB"]
        else:
            arguments += ["--device", "cuda", "--share-gpus"]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(_visible, devices))
        self._start("oobleck.agent", *arguments, env=environment)

    def _end(self) -> None:
        for process in reversed(self._started):  # agents first: they end their workers
            process.terminate()
        for process in reversed(self._started):
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # a driver may hold it
                process.wait(_END_S)

    def _last_words(self) -> str:
        for number in reversed(range(len(self._started))):
            lines = (self._folder / f"log-{number}").read_text(errors="replace").strip()
            if lines:
                return lines.splitlines()[-1]
        return "it says nothing"

    def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The job's status when it has ended, with its steps and reconfigurations. Raises
        _Failed."""
        begun = time.monotonic()
        while sum(each["state"] == "live" for each in self._ask("nodes")) < len(self._nodes):
            if time.monotonic() > begun + _START_S:
                raise _Failed(f"agents do not come: {self._last_words()}")
            time.sleep(_POLL_S)
        path = self._folder / "job.yaml"
        path.write_text(json.dumps({**job, "data": {"text": [str(self._folder / "text")]}}))
        job_id = self._command("submit", str(path)).strip()
        memory: list[dict[str, Any]] = []
        while True:
            status = self._ask("status", job_id)
            memory = status["memory"] or memory  # which a job that has ended has no more
            if status["state"] in ("succeeded", "failed", "cancelled"):
                break
            if time.monotonic() > self._deadline:
                raise _Failed(f"the job is {status['state']} still: {status['reason']}")
            time.sleep(_POLL_S)
        if status["state"] != "succeeded":
            raise _Failed(f"the job has {status['state']}: {status['reason']}")
        files = self._folder / "state" / "jobs" / job_id
        events = _lines(files / "events.jsonl")
        return {
            "memory": memory,
            "records": _lines(files / "metrics.jsonl"),
            "reconfigured": [one for one in events if one["event"] == "reconfigured"],
        }

    def _ask(self, *words: str) -> Any:
        return json.loads(self._command(*words, "--json"))

    def _command(self, *words: str) -> str:
        environment = {**os.environ, "OOBLECK_MASTER": self._address}
        environment.pop("OOBLECK_CREDENTIALS", None)
        command = python("oobleck.cli.main", *words)
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_START_S, check=False
        )
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise _Failed(said[-1] if said else f"'oobleck {words[0]}' fails")
        return done.stdout


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _visible(device: str) -> str:
    """Return the name that CUDA_VISIBLE_DEVICES has for `device`."""
    number = int(device.removeprefix("cuda:"))
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return shown.split(",")[number] if shown else str(number)


def _halves(devices: Sequence[str]) -> list[Sequence[str]]:
    """Two nodes; one device they share."""
    half = max(1, len(devices) // 2)
    return [devices[:half], devices[half : 2 * half] or devices[:1]]


def kills(devices: Sequence[str]) -> Iterator[Finding]:
    """Check that a float64 job has the losses of a CPU though its workers are killed as they go."""
    job = {
        "name": "unharmed",
        "model": {"layers": 4, "hidden": 64, "heads": 4, "sequence_length": 64, "dropout": 0.1},
        "training": {"steps": _STEPS, "global_batch": 8, "microbatch": 1, "precision": "fp64"},
        "fault_tolerance": 0,
        "profile": "estimate",
    }
    victim = WorkerId(NodeName("n2"), 0)
    names = {f"killed-{number}": point for number, point in enumerate(KILLS)}
    rules = [
        FaultRule(worker=victim, job=name, point=point, step=_KILLED_AT, action="kill_worker")
        for name, point in names.items()
    ]
    losses, changes = [], []
    try:
        with _Cluster([["cpu"]]) as cluster:
            expected = _losses(cluster.run(job))
        with _Cluster(_halves(devices), rules) as cluster:
            for name in names:
                found = cluster.run({**job, "name": name, "fault_tolerance": 1})
                losses.append(_losses(found))
                changes.append(found["reconfigured"])
    except _Failed as error:
        what = f"a job in fp64 of which a worker is killed does not end: {error}"
        fix = "see what the checks sums, aborts and killed say"
        yield Finding(check="kills", level="fail", what=what, fix=fix)
        return
    yield of_kills(expected, losses, changes)


def _losses(job: Mapping[str, Any]) -> list[float]:
    return [float(each["loss"]) for each in job["records"]]


def of_kills(
    expected: Sequence[float],
    losses: Sequence[Sequence[float]],
    changes: Sequence[Sequence[Mapping[str, Any]]],
) -> Finding:
    """`losses`: of each job; `changes`: the changes of its plan."""
    apart = max(abs(a - b) / abs(a) for job in losses for a, b in zip(expected, job, strict=False))
    if any(len(job) != len(expected) for job in losses) or apart > _SAME:
        what = f"losses of a job in fp64 differ from a CPU's by up to {apart:.1e}"
        fix = "do not train on it: look at what the checks sums and replicas say"
        return Finding(check="kills", level="fail", what=what, fix=fix)
    first = [job[0] for job in changes if job]
    stalls = [float(each["stall_s"] or 0) for each in first]
    phases = {
        f"{name}_s": max(float(each["phases"].get(name) or 0) for each in first)
        for name in sorted({name for each in first for name in each["phases"]})
    }
    slowest = max(phases, key=lambda name: phases[name], default="")
    what = (
        f"{len(stalls)} of {len(changes)} jobs recovered from kills, in "
        f"{max(stalls, default=0):.1f} s at most; losses are a CPU's up to {apart:.0e}"
    )
    if slowest:
        what += f"; the longest phase is {slowest.removesuffix('_s')}, {phases[slowest]:.2f} s"
    if len(stalls) < len(changes):
        fix = "see 'oobleck events' of a job in which a worker is killed (oobleck chaos)"
        return Finding(check="kills", level="warn", what=what, fix=fix, figures=phases)
    if max(stalls) > _STALL_S:
        fix = "see what the checks forks, killed and groups take"
        return Finding(check="kills", level="slow", what=what, fix=fix, figures=phases)
    return Finding(check="kills", level="pass", what=what, figures=phases)


def speed(devices: Sequence[str]) -> Iterator[Finding]:
    """Tokens per second of two nodes beside torch's own data parallelism, and the memory that a
    worker takes beside what was planned."""
    words, codes = pair("ddp", devices)
    if codes != [0, 0]:
        what = f"torch's own data parallelism fails: {words or 'it hangs'}"
        fix = "see NCCL_DEBUG=INFO, and what the check sums says"
        yield Finding(check="speed", level="fail", what=what, fix=fix)
        return
    import torch

    spec = job_of(torch.device(devices[0]))
    job = {
        "name": "doctor",
        "model": {
            name: getattr(spec.model, name)
            for name in ("layers", "hidden", "heads", "sequence_length", "tied")
        },
        "training": {
            "steps": 2 * spec.training.steps,
            "global_batch": spec.training.global_batch,
            "microbatch": spec.training.microbatch,
        },
        "fault_tolerance": 1,
        "profile": "estimate",
    }
    try:
        with _Cluster([devices[:1], devices[1:2]]) as cluster:
            found = cluster.run(job)
    except _Failed as error:
        what, fix = f"a job of two replicas fails: {error}", "see what the other checks say"
        yield Finding(check="speed", level="fail", what=what, fix=fix)
        return
    later = found["records"][spec.training.steps :]
    own = later[0]["tokens"] / statistics.median(one["step_seconds"] for one in later)
    yield of_speed(own, float(words))
    for one in found["memory"]:
        worker = WorkerId(NodeName(one["worker"]["node"]), one["worker"]["slot"])
        yield of_use(str(worker), one["predicted_bytes"], one["peak_bytes"])


def of_speed(own: float, torchs: float) -> Finding:
    """Tokens per second."""
    share = own / torchs
    what = f"two replicas train {own:,.0f} tokens/s, {share:.2f} of torch's {torchs:,.0f}"
    if share < _SLOW:
        fix = "record a step (oobleck timeline) and see what it waits for"
        return Finding(check="speed", level="slow", what=what, fix=fix)
    return Finding(check="speed", level="pass", what=what)


def of_use(worker: str, planned: int, taken: int) -> Finding:
    """`taken`: bytes that a worker had at most."""
    what = f"{worker} took {format_bytes(taken)} where {format_bytes(planned)} were planned"
    if taken > _OVER * planned:
        fix = "have the job measured (profile: measure), or give --memory-per-worker"
        return Finding(check="planned memory", level="warn", what=what, fix=fix)
    return Finding(check="planned memory", level="pass", what=what)
