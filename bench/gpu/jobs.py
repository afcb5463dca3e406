"""Checks that run jobs on a small cluster of this host, as an operator would: losses of jobs whose
workers are killed, and the engine's speed and memory beside torch alone.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from bench.support.client import ClusterError, Record
from bench.support.cluster import LocalCluster
from bench.support.daemons import CHECKOUT
from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.messages import FaultRule
from oobleck.core.orders import Finding
from oobleck.core.units import format_bytes
from oobleck.worker.doctor import Plain, job_of, plain_step, tokens_per_s

#: The longest that a job may take; two workers of one GPU start one after the other.
_JOB_S = 50.0
_START_S = 60.0
#: Points at which a worker is killed, each in a job of its own that begins with all workers.
KILLS = ("before:Forward", "before:Backward", "before:SyncGradient", "voting", "reduced")
_STEPS, _KILLED_AT = 6, 3
#: Difference of losses on two kinds of devices, in float64.
_SAME = 1e-9
_STALL_S = 20.0
#: Share of torch's speed; and of the memory that was planned.
_SLOW, _OVER = 0.8, 1.1
_WARM_UP, _TIMED = 5, 15


class _Cluster:
    """A cluster of this host: n1 on a CPU, then nodes g1 and on with the devices."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    def start(self, nodes: Sequence[Sequence[str]]) -> None:
        """Have nodes with these devices take the place of n1."""
        self._cluster.kill_node("n1")
        names = []
        for number, devices in enumerate(nodes, 1):
            options = ["--workers", str(len(devices))]
            environment = {}
            if devices[0] == "cpu":
                options += ["--memory-per-worker", "1GiB"]
            else:
                options += ["--device", "cuda", "--share-gpus"]
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(_visible, devices))
            names.append(f"g{number}")
            self._cluster.start_node(names[-1], *options, environment=environment)
        self._cluster.wait(lambda: self._cluster.live() == {*names}, "the nodes", _START_S)

    def run(self, job: Mapping[str, Any]) -> "_Ran":
        """Run a job to its end. Raises ClusterError."""
        cluster = self._cluster
        text = cluster.state_dir / "text"
        if not text.exists():
            text.write_bytes(bytes(n * n % 251 for n in range(60_000)))
        job_id = cluster.submit({**job, "data": {"text": [str(text)]}})
        memory: list[Record] = []

        def ended() -> bool:
            nonlocal memory
            memory = cluster.status(job_id)["memory"] or memory  # a job that has ended has none
            return cluster.end_of(job_id) is not None

        cluster.wait(ended, f"the end of {job_id}", _JOB_S, poll_s=0.1)
        end = cluster.end_of(job_id)
        if end is None or end["event"] != "succeeded":
            raise ClusterError(f"the job has not succeeded: {end}")
        return _Ran(
            memory=memory,
            records=cluster.metrics(job_id),
            changes=cluster.events(job_id, "reconfigured"),
        )


@dataclass(frozen=True)
class _Ran:
    """Results of a job: memory of its workers, records of its steps, changes of its plan."""

    memory: Sequence[Record]
    records: Sequence[Record]
    changes: Sequence[Record]

    @property
    def losses(self) -> list[float]:
        return [float(each["loss"]) for each in self.records]


@contextmanager
def _cluster(faults: Sequence[FaultRule] = ()) -> Iterator[_Cluster]:
    plan = [msgspec.to_builtins(rule) for rule in faults]
    with LocalCluster(1, fault_plan=plan) as cluster:
        yield _Cluster(cluster)


def _visible(device: str) -> str:
    """Return the name that CUDA_VISIBLE_DEVICES has for a device."""
    number = int(device.removeprefix("cuda:"))
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return shown.split(",")[number] if shown else str(number)


def _halves(devices: Sequence[str]) -> list[Sequence[str]]:
    """Return the devices of two nodes, which share a single one."""
    half = max(1, len(devices) // 2)
    return [devices[:half], devices[half : 2 * half] or devices[:1]]


def kills(devices: Sequence[str]) -> Iterator[Finding]:
    """Check that float64 jobs have the losses of a CPU though their workers are killed."""
    job = {
        "name": "unharmed",
        "model": {"layers": 4, "hidden": 64, "heads": 4, "sequence_length": 64, "dropout": 0.1},
        "training": {"steps": _STEPS, "global_batch": 8, "microbatch": 1, "precision": "fp64"},
        "fault_tolerance": 0,
        "profile": "estimate",
    }
    victim = WorkerId(NodeName("g2"), 0)
    names = {f"killed-{number}": point for number, point in enumerate(KILLS)}
    rules = [
        FaultRule(worker=victim, job=name, point=point, step=_KILLED_AT, action="kill_worker")
        for name, point in names.items()
    ]
    try:
        with _cluster(rules) as cluster:
            expected = cluster.run(job).losses
            cluster.start(_halves(devices))
            struck = {**job, "fault_tolerance": 1}
            ran = [cluster.run({**struck, "name": name}) for name in names]
    except ClusterError as error:
        what = f"a job in fp64 of which a worker is killed does not end: {error}"
        fix = "see the checks forks, killed and ends"
        yield Finding(check="kills", level="fail", what=what, fix=fix)
        return
    yield judge_kills(expected, [one.losses for one in ran], [one.changes for one in ran])


def judge_kills(
    expected: Sequence[float],
    losses: Sequence[Sequence[float]],
    changes: Sequence[Sequence[Mapping[str, Any]]],
) -> Finding:
    """Judge the losses of each job, and the changes of its plan."""
    pairs = [pair for job in losses for pair in zip(expected, job, strict=False)]
    # NaN must be the maximum, although comparisons with it are False.
    apart = max((abs(a - b) / abs(a) for a, b in pairs), key=lambda far: (far != far, far))
    if any(len(job) != len(expected) for job in losses) or not apart <= _SAME:
        what = f"losses of a job in fp64 differ from a CPU's by up to {apart:.1e}"
        fix = "do not train on it: see the checks backwards and replicas"
        return Finding(check="kills", level="fail", what=what, fix=fix)
    first = [job[0] for job in changes if job]
    stalls = [float(each["stall_s"] or 0) for each in first]
    phases = {
        f"{name}_s": max(float(each["phases"].get(name) or 0) for each in first)
        for name in sorted({name for each in first for name in each["phases"]})
    }
    what = (
        f"{len(stalls)} of {len(changes)} jobs recovered from kills, in "
        f"{max(stalls, default=0):.1f} s at most; losses are a CPU's up to {apart:.0e}"
    )
    if slowest := max(phases, key=lambda name: phases[name], default=""):
        what += f"; the longest phase is {slowest.removesuffix('_s')}, {phases[slowest]:.2f} s"
    if len(stalls) < len(changes):
        fix = "see 'oobleck events' of a job in which a worker is killed (oobleck chaos)"
        return Finding(check="kills", level="warn", what=what, fix=fix, figures=phases)
    if max(stalls) > _STALL_S:
        fix = "see the checks forks, killed and groups"
        return Finding(check="kills", level="slow", what=what, fix=fix, figures=phases)
    return Finding(check="kills", level="pass", what=what, figures=phases)


def speed(devices: Sequence[str]) -> Iterator[Finding]:
    """Measure a job with a worker per device beside a plain loop of torch, as it is and compiled,
    on one of them; and its workers' memory beside the planned one."""
    spec = job_of(torch.device(devices[0]))
    model, count = spec.model, len(devices)
    batch = spec.training.global_batch
    job = {
        "name": "speed",
        "model": {
            name: getattr(model, name)
            for name in ("layers", "hidden", "heads", "sequence_length", "tied")
        },
        "training": {
            "steps": _WARM_UP + _TIMED,
            "global_batch": count * batch,
            "microbatch": spec.training.microbatch,
            "precision": "bf16",
        },
        "fault_tolerance": count - 1,
        "profile": "estimate",
    }
    try:
        with _cluster() as cluster:
            cluster.start([[device] for device in devices])
            ran = cluster.run(job)
    except ClusterError as error:
        what, fix = f"a job of {count} replicas fails: {error}", "see the other checks"
        yield Finding(check="speed", level="fail", what=what, fix=fix)
        return
    later = ran.records[_WARM_UP:]
    own = later[0]["tokens"] / statistics.median(one["step_seconds"] for one in later) / count
    plain, compiled = (_torch_alone(devices[0], compiled=compiled) for compiled in (False, True))
    yield judge_speed(own, plain, compiled)
    for one in ran.memory:
        worker = WorkerId(NodeName(one["worker"]["node"]), one["worker"]["slot"])
        yield judge_use(str(worker), one["predicted_bytes"], one["peak_bytes"])


def _torch_alone(device: str, *, compiled: bool) -> float:
    """Return the tokens per second of a plain loop of torch."""
    place = torch.device(device)
    job = job_of(place)
    module = Plain(job).to(place)
    if compiled:
        for layer in module.layers:
            layer.compile()
    return tokens_per_s(job, plain_step(job, module, place), place)


def judge_speed(own: float, plain: float, compiled: float) -> Finding:
    """Judge tokens per second and device."""
    what = (
        f"a job trains {own:,.0f} tokens/s per device, {own / plain:.2f} of torch's {plain:,.0f} "
        f"and {own / compiled:.2f} of its {compiled:,.0f} compiled"
    )
    figures = {"own": own, "plain": plain, "compiled": compiled}
    if own < _SLOW * plain:
        fix = "record a step (oobleck timeline) and see what it waits for"
        return Finding(check="speed", level="slow", what=what, fix=fix, figures=figures)
    return Finding(check="speed", level="pass", what=what, figures=figures)


def judge_use(worker: str, planned: int, taken: int) -> Finding:
    """Judge a worker's memory in bytes, the planned one and the most that it took."""
    what = f"{worker} took {format_bytes(taken)} where {format_bytes(planned)} were planned"
    if taken > _OVER * planned:
        fix = "have the job measured (profile: measure), or give --memory-per-worker"
        return Finding(check="planned memory", level="warn", what=what, fix=fix)
    return Finding(check="planned memory", level="pass", what=what)


def units(devices: Sequence[str]) -> Iterator[Finding]:
    """Run tests of a worker's state and step, in one process on one device."""
    yield _tested("units", f"tests of state and step on {devices[0]}", unit_tests(devices[0]))


def drill(devices: Sequence[str]) -> Iterator[Finding]:
    """Run tests of recovery and shared stages with real worker processes and real NCCL, all on one
    GPU."""
    what = f"tests of recovery and shared stages over NCCL, all workers on {devices[0]}"
    yield _tested("drill", what, drill_tests(devices[0]))


def unit_tests(device: str) -> list[str]:
    """Return pytest's arguments for the check `units`."""
    tests = ("state/test_model_state.py", "step/test_stage.py", "step/test_split_backward.py")
    return ["--device", device, *(f"tests/worker/{name}" for name in tests)]


#: Tests of the check `drill`. Some cases of the latter ones choose another transport.
_DRILL = (
    "two_losses_at_once",
    "join_at_a_step_boundary",
    "(killed_within_a_step and nccl)",
    "(equals_one_process and rows)",
)


def drill_tests(device: str) -> list[str]:
    """Return pytest's arguments for the check `drill`."""
    nccl = ["-p", "bench.gpu.real_nccl", "--device", device, "--transport", "nccl"]
    tests = ("recovery/test_recovery.py", "step/test_shared_stages.py")
    return [*nccl, *(f"tests/worker/{name}" for name in tests), "-k", " or ".join(_DRILL)]


def _tested(check: str, what: str, arguments: Sequence[str]) -> Finding:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-o", "filterwarnings=ignore", "--timeout", "120", *arguments]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    lines = (done.stdout or done.stderr).strip().splitlines() or ["no output"]
    what = f"{what}: {lines[-1].strip('= ')}"
    if done.returncode:
        fix = f"run '{' '.join(command[1:])}'"
        return Finding(check=check, level="fail", what=what, fix=fix)
    return Finding(check=check, level="pass", what=what)
