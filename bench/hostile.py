"""Worst effects that holders of credentials can have on a master and a job.

    python -m bench.hostile [--seconds 60] [--who viewer,agent] [--kinds large,streams] [--nodes 4]

A real cluster with an authority trains a job. Attackers follow one another: holders of a revoked
certificate, of an unused join token, of a viewer's certificate, and of the certificate of an agent
whose node has no workers. Each makes all kinds of attacks of `bench.support.attacks` in turn.
Before and meanwhile workers are killed with SIGKILL. Measured are

- loop: the delay of the master's event loop, by the time of a refusal at its page of metrics, which
  takes three turns of the loop and no other work; "late" is the share of more than 50 ms;
- call: the time of an honest operator's call on a connection of its own;
- memory: growth of the master's memory since the attack began (PSS without file-backed pages, whose
  share depends on other processes);
- recovery: from the signal to the commit of the next step in a new generation.

The attackers' processes take processor time from the job, which they would not on hosts of their
own. So each first attacks another master, where nothing trains ("elsewhere"), and the ratio that
counts is to that part.
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import psutil

from bench.master_scale import Master
from bench.recovery import job
from bench.support.attacks import COMMON, OF_AGENTS, Attacking
from bench.support.client import Client, ClusterError, last_line
from bench.support.cluster import LocalCluster
from bench.support.daemons import hurry
from oobleck.cli.client import MasterClient
from oobleck.cli.cluster.authority import issue
from oobleck.host.command import CommandFailed
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.host.security.credentials import Role

WHO = ("revoked", "token", "viewer", "agent")
_SAMPLE_S = 0.02
_MEMORY_S = 0.25
#: Longest wait for one answer, for one recovery, and for the first step.
_ANSWER_S, _RECOVERY_S, _START_S = 20.0, 30.0, 120.0
#: Time to the page's refusal from which the loop counts as late.
_LATE_S = 0.05
#: Between a recovery and the next kill: so that each has its state in two places again.
_SETTLE_STEPS = 8


@dataclass
class Part:
    """Figures measured during one attack, or without any."""

    what: str
    loop_s: list[float] = field(default_factory=list)
    call_s: list[float] = field(default_factory=list)
    grown_bytes: list[float] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)


def pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("the kernel does not tell the memory")


def first(page: tuple[str, int]) -> float:
    """Return the seconds until the page of metrics refuses a request."""
    begun = time.monotonic()
    with socket.create_connection(page, timeout=_ANSWER_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while connection.recv(4096):
            pass
    return time.monotonic() - begun


def call(client: MasterClient) -> float:
    begun = time.monotonic()
    client.jobs(timeout_s=_ANSWER_S)
    return time.monotonic() - begun


def probe(page: tuple[str, int], endpoint: Endpoint, pid: int, samples: Connection) -> None:
    """Send (kind, time, figure) until this process is ended. This process and the master get
    priority where possible, as on machines of their own, so that delays are the master's own."""
    hurry([psutil.Process(), psutil.Process(pid)])
    lock = threading.Lock()

    def keep(kind: str, every_s: float, look: Callable[[], float]) -> None:
        while True:
            at = time.time()
            try:
                figure = look()
            except (OSError, CommandFailed, grpc.RpcError):
                figure = _ANSWER_S
            with lock:
                samples.send((kind, at, figure))
            time.sleep(every_s)

    client = MasterClient(endpoint)
    looks: list[tuple[str, float, Callable[[], float]]] = [
        ("loop_s", _SAMPLE_S, lambda: first(page)),
        ("call_s", _SAMPLE_S, lambda: call(client)),
        ("grown_bytes", _MEMORY_S, lambda: float(pss(pid))),
    ]
    threads = [threading.Thread(target=keep, args=one, daemon=True) for one in looks]
    for thread in threads:
        thread.start()
    threads[0].join()


class Kills:
    """Repeated kills of a job's workers, and the times until it continues."""

    def __init__(self, cluster: LocalCluster, job_id: str) -> None:
        self._cluster, self._job_id = cluster, job_id
        self._victims = sorted(cluster.agents)

    def _is_whole(self) -> bool:
        # Read the job's file: an attacker may block new connections from this address.
        plans = [one for one in self._cluster.events(self._job_id) if "nodes_joined" in one]
        return not plans or plans[-1]["can_lose"] > 0

    def one(self) -> float:
        """Return the seconds from the signal to the next step in a new generation. Nobody is killed
        before the job can do without a node again."""
        self._cluster.wait(self._is_whole, "a plan that can lose a node")
        victim = self._victims.pop(0)
        self._victims.append(victim)
        before = int(self._last("generation"))
        killed_at = time.time()
        deadline = time.monotonic() + _RECOVERY_S
        for pid in self._cluster.worker_pids_of(victim):
            os.kill(pid, signal.SIGKILL)
        while self._last("generation") <= before:
            if time.monotonic() > deadline:
                last = "\n".join(map(str, self._cluster.events(self._job_id)[-4:]))
                raise ClusterError(f"no step after {victim} was killed: {last}")
            time.sleep(0.01)
        lines = self._cluster.metrics(self._job_id)
        new = next(line for line in lines if line["generation"] > before)
        self._cluster.wait_step(self._job_id, int(new["step"]) + _SETTLE_STEPS, _RECOVERY_S)
        return float(new["time"]) - killed_at

    def _last(self, name: str) -> float:
        line = last_line(self._cluster.state_dir / "jobs" / self._job_id / "metrics.jsonl")
        return float(line[name]) if line else 0.0


class Samples:
    """Samples of the probe, read by a thread at once, since a full pipe would delay the probe."""

    def __init__(self, probe: Connection) -> None:
        self._probe = probe
        self._found: list[tuple[str, float, float]] = []
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                self._found.append(self._probe.recv())

    def into(self, part: Part, begun: float) -> None:
        found, self._found = self._found, []
        for kind, at, figure in found:
            if at >= begun:
                getattr(part, kind).append(figure)
        base = part.grown_bytes[0] if part.grown_bytes else 0.0
        part.grown_bytes = [one - base for one in part.grown_bytes]


def measure(what: str, kills: Kills, samples: Samples, goes_on: Callable[[], bool]) -> Part:
    part = Part(what)
    begun = time.time()
    while goes_on():
        part.recovery_s.append(kills.one())
    samples.into(part, begun)
    return part


def credentials(kind: str, folder: Path, pki: Path, address: str) -> Path:
    """Make credentials of that kind by the authority in `pki`, whose master is at `address`."""
    operator = Client(folder, folder)
    operator.address, operator.credentials = address, pki / "operator"
    found = folder / f"{kind}-{os.urandom(2).hex()}"
    if kind == "token":
        operator.oobleck("pki", "token", "--ttl", "60m", "--out", str(found))
        return found
    role: Role = "agent" if kind == "agent" else "viewer"
    issue(pki, found, role, found.name)
    if kind == "revoked":
        operator.oobleck("pki", "revoke", found.name, "--role", role)
    return found


def row(part: Part, than: Part | None) -> str:
    def column(figures: Sequence[float], by: float, width: int) -> str:
        if not figures:
            return f"{'-':>{2 * width + 1}}"
        return f"{by * statistics.median(figures):{width}.1f} {by * max(figures):{width}.1f}"

    late = sum(one > _LATE_S for one in part.loop_s) / max(1, len(part.loop_s))
    ratio = "" if than is None else f"{_ratio(part.recovery_s, than.recovery_s):6.2f}"
    return (
        f"{part.what:20} {column(part.loop_s, 1e3, 8)} {late:6.2%}  {column(part.call_s, 1e3, 8)}  "
        f"{max(part.grown_bytes, default=0.0) / 2**20:8.1f}  "
        f"{column(part.recovery_s, 1e3, 8)} {len(part.recovery_s):4} {ratio}"
    )


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(ours or [0.0]) / statistics.median(theirs or [float("nan")])


HEADER = (
    f"{'':20} {'loop, ms':>17} {'late':>6}  {'call, ms':>17}  {'memory':>8}  {'recovery, ms':>17}\n"
    f"{'':20} {'median':>8} {'max':>8} {'':6}  {'median':>8} {'max':>8}  {'MiB':>8}  "
    f"{'median':>8} {'max':>8} {'n':>4}  ratio"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--nodes", type=int, default=4, help="fewer train no such job")
    parser.add_argument("--who", default=",".join(WHO))
    parser.add_argument("--kinds", help="default: all that its holder may try")
    options = parser.parse_args()
    flags = ("--master-flag=--metrics-listen=127.0.0.1:0",)
    with (
        TemporaryDirectory() as name,
        LocalCluster(options.nodes, options=flags) as cluster,
    ):
        folder = Path(name)
        job_id = cluster.submit(job(steps=1_000_000))
        cluster.wait_step(job_id, 10, _START_S)
        log = (cluster.state_dir / "log" / "master.log").read_text()
        page = log.partition("metrics are served address=")[2].split()[0]
        host, _, port = page.rpartition(":")
        (folder / "else").mkdir()
        other = Master(folder / "else")
        context = multiprocessing.get_context("spawn")
        receiving, sending = context.Pipe(duplex=False)
        probing = context.Process(
            target=probe,
            args=((host, int(port)), cluster.endpoint, cluster.master_pid, sending),
            daemon=True,
        )
        probing.start()
        samples = Samples(receiving)
        kills = Kills(cluster, job_id)
        places = {
            "elsewhere": (other.address, other.keys),
            "here": (cluster.address, cluster.state_dir / "pki"),
        }
        try:
            print(HEADER, flush=True)
            until = time.monotonic() + options.seconds
            calm = measure("calm", kills, samples, lambda: time.monotonic() < until)
            print(row(calm, None), flush=True)
            for who in options.who.split(","):
                kinds = OF_AGENTS if who == "agent" else COMMON
                if options.kinds:
                    kinds = tuple(options.kinds.split(","))
                than = None
                for place, (address, pki) in places.items():
                    shown = credentials(who, folder, pki, address)
                    attack = Attacking(address, shown, job_id, kinds, options.seconds)
                    part = measure(f"{who}, {place}", kills, samples, attack.goes_on)
                    print(row(part, than), flush=True)
                    than = part
        finally:
            probing.kill()
            probing.join()
            other.kill()


if __name__ == "__main__":
    main()
