"""Remaining speed after a worker becomes slow or is lost, on a machine with few cores.

    python -m bench.straggler [--runs 3] [--cores 0.5] [--slow 0.25] [--seconds 30]
    python -m bench.straggler --noise 60

Four nodes train as 2 x 2. Each worker has half a core: by a cgroup quota if the machine allows
that, else by being stopped and continued in turn. In each run one worker is cut to a quarter of a
core and gets its half back; and, in another cluster, a node is lost for good. Twelve layers divide
evenly among four workers, and among three after a loss.

Speeds are samples per second between commits, measured once no plan has been made for a while.
`bound` is the speed that the rates of all workers together would allow. With one of four workers at
half of its rate, it is 3.5 / 4 of the mean of the speeds before and after. If these two differ by
more than a tenth, the machine's speed has changed: the run is void for `bound` and is repeated (at
most --runs more). `answered` and `healed` are the seconds until the first step of the plan in
answer. Medians over the runs are compared with the targets.

With --noise the job trains for so many minutes beside bursts of load on all cores, of a few seconds
each. They slow all workers alike, so none may be called slow (`rate_changed`).
"""

import argparse
import contextlib
import math
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.support.busy import all_cores_busy
from bench.support.cluster import LocalCluster
from bench.support.throttle import Throttle, throttled
from oobleck.core.units import count

_VICTIM = "n2/0"
_SAMPLES = 32
#: Seconds after a worker's pace has changed, within which the job has to have answered.
_ANSWERED_S = 10.0
_HEALED_S = 25.0
#: Largest relative difference of the speeds before and after a run.
_DRIFT = 0.1
#: Time without a new plan after which a job has settled.
_SETTLED_S = 20.0
#: Mean durations of a burst of load, and of the pause after it.
_BURST_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Target:
    words: str
    wanted: float
    at_least: bool

    def verdict(self, found: Sequence[float]) -> str:
        median = statistics.median(found)
        reached = median >= self.wanted if self.at_least else median <= self.wanted
        return (
            f"{self.words:<30} {median:6.2f} by the median of {count(len(found), 'run')} "
            f"({min(found):.2f} to {max(found):.2f}), wanted "
            f"{'>=' if self.at_least else '<='} {self.wanted:g}: "
            f"{'reached' if reached else 'missed'}"
        )


TARGETS = {
    "of_bound": Target(words="of the bound while one is slow", wanted=0.9, at_least=True),
    "answered": Target(words="answered, seconds", wanted=_ANSWERED_S, at_least=False),
    "healed": Target(words="healed, seconds", wanted=_HEALED_S, at_least=False),
    "kept": Target(words="kept by a loss of one of four", wanted=0.72, at_least=True),
}


class Watched:
    """Job whose workers are throttled, watched by the times of its commits and events."""

    def __init__(
        self, cluster: LocalCluster, job_id: str, throttles: Mapping[str, Throttle]
    ) -> None:
        self.cluster, self.job_id, self.throttles = cluster, job_id, throttles

    def settle(self) -> None:
        began = time.time()

        def quiet() -> bool:
            plans = [float(e["time"]) for e in self.cluster.events(self.job_id, "reconfigured")]
            return time.time() > max([began, *plans]) + _SETTLED_S

        self.cluster.wait(quiet, "some time without another plan", poll_s=0.5)

    def usual_speed(self, seconds: float) -> float:
        """Return the undisturbed `speed`. End the program if it is too low."""
        if not (found := self.speed(seconds)):
            raise SystemExit(f"no two steps in {seconds:g} s: give more --seconds")
        return found

    def speed(self, seconds: float) -> float:
        """Return the samples per second from the first to the last step committed in the next
        `seconds`; 0: fewer than two."""
        since = time.time()
        time.sleep(seconds)
        times = [
            float(line["time"])
            for line in self.cluster.metrics(self.job_id)
            if since <= float(line["time"])
        ]
        if len(times) < 2:
            return 0.0
        return _SAMPLES * (len(times) - 1) / (times[-1] - times[0])

    def answers(self, cause: str, since: float) -> list[float]:
        """Return the seconds until the first step of each plan made for `cause`."""
        events = self.cluster.events(self.job_id, "reconfigured")
        times = [float(event["time"]) for event in events if event["cause"] == cause]
        return [time - since for time in times if time >= since]


@contextlib.contextmanager
def watched(options: argparse.Namespace) -> Iterator[Watched]:
    """Yield a job on a new cluster, settled under the quota. Print its changes of plan at the
    end."""
    with LocalCluster(4) as cluster:
        job_id = cluster.submit(job(options.policy))
        cluster.wait_step(job_id, 5)
        with throttled(cluster.worker_pids(), options.cores) as throttles:
            how = ", ".join(sorted({throttle.how for throttle in throttles.values()}))
            print(
                f"{len(throttles)} workers with {options.cores:g} of a core each, by {how}, on "
                f"{len(os.sched_getaffinity(0))} cores",
                flush=True,
            )
            watch = Watched(cluster, job_id, throttles)
            watch.settle()
            yield watch
        for record in cluster.events(job_id, "reconfigured"):
            print(" ", {k: record[k] for k in ("to_generation", "cause", "rule", "reason")})


def job(policy: str) -> dict[str, object]:
    return {
        "name": "straggler",
        "model": {"layers": 12, "hidden": 128, "heads": 4, "sequence_length": 64},
        "data": {"text": [str(Path(__file__).resolve().parents[1] / "LICENSE")]},
        "training": {"steps": 1_000_000, "global_batch": _SAMPLES, "microbatch": 1},
        "fault_tolerance": 1,
        "resources": {"min_nodes_per_pipeline": 2},
        "recovery": {"policy": policy},
    }


# ---- what is measured


def slowed_down(options: argparse.Namespace) -> dict[str, float]:
    """Measure once; return the figures by the names of targets."""
    with watched(options) as watch:
        throttles = watch.throttles
        before = watch.usual_speed(options.seconds)
        cut = time.time()
        throttles[_VICTIM].set(options.slow)
        first = watch.speed(_ANSWERED_S)
        during = watch.speed(options.seconds)
        healed = time.time()
        throttles[_VICTIM].set(options.cores)
        time.sleep(_HEALED_S)
        after = watch.speed(options.seconds)
        usual = (before + after) / 2
        bound = usual * (len(throttles) - 1 + options.slow / options.cores) / len(throttles)
        steady = abs(after - before) <= _DRIFT * usual
        found = {
            "of_bound": during / bound,
            "answered": min(watch.answers("worker slow", cut), default=math.inf),
            # There may be several plans; the last one completes the return.
            "healed": max(watch.answers("worker well", healed), default=math.inf),
        }
        print(
            f"slow     before {before:6.2f}  first {_ANSWERED_S:.0f} s {first:6.2f}  "
            f"during {during:6.2f}  bound {bound:6.2f}  of it {during / bound:5.2f}  "
            f"after {after:6.2f} ({after / before:4.2f} of before"
            f"{'' if steady else ': void, the machine was not steady'})  "
            f"answered {found['answered']:.1f} s  healed {found['healed']:.1f} s",
            flush=True,
        )
    if not steady:
        del found["of_bound"]
    return found


def lost(options: argparse.Namespace) -> dict[str, float]:
    """Measure once; return the figures by the names of targets."""
    with watched(options) as watch:
        cluster, node = watch.cluster, _VICTIM.partition("/")[0]
        before = watch.usual_speed(options.seconds)
        cluster.kill_node(node)
        cluster.wait(lambda: node not in cluster.planned(watch.job_id), "a plan of three")
        watch.settle()
        after = watch.speed(options.seconds)
        print(f"loss     before {before:6.2f}  after {after:6.2f}  kept {after / before:5.3f}")
    return {"kept": after / before}


def noise(options: argparse.Namespace) -> None:
    """Train beside bursts of load, drawn the same in every run."""
    draws = random.Random(0)
    with watched(options) as watch:
        cluster, job_id = watch.cluster, watch.job_id
        steps = cluster.last_step(job_id)
        known = len(cluster.events(job_id, "rate_changed"))
        began, bursts, called = time.monotonic(), 0, 0
        while time.monotonic() < began + 60 * options.noise:
            with all_cores_busy():
                time.sleep(draws.expovariate(1 / _BURST_S))
            time.sleep(draws.expovariate(1 / _BURST_S))
            bursts += 1
            for event in cluster.events(job_id, "rate_changed")[known + called :]:
                called += 1
                told = {key: event[key] for key in ("node", "slot", "rate", "steps", "seconds")}
                print(f"after {time.monotonic() - began:.0f} s: rate_changed {told}", flush=True)
        print(
            f"{bursts} bursts in {(time.monotonic() - began) / 60:.1f} minutes, "
            f"{cluster.last_step(job_id) - steps} steps: {called} rate_changed, wanted 0: "
            f"{'missed' if called else 'reached'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--cores", type=float, default=0.5, help="of each worker")
    parser.add_argument("--slow", type=float, default=0.25, help="of the slow one")
    parser.add_argument("--seconds", type=float, default=30.0, help="that a speed is measured")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--noise", type=float, metavar="MINUTES", help="nothing but this")
    options = parser.parse_args()
    if options.runs < 1 or (options.noise is not None and options.noise <= 0):
        parser.error("--runs must be 1 or more, and --noise more than 0 minutes")
    if options.noise is not None:
        noise(options)
        return
    found = defaultdict[str, list[float]](list)

    def run(measure: Callable[[argparse.Namespace], dict[str, float]]) -> None:
        for name, value in measure(options).items():
            found[name].append(value)

    for _ in range(options.runs):
        run(slowed_down)
        run(lost)
    for _ in range(options.runs):
        if len(found["of_bound"]) < options.runs:
            run(slowed_down)
    if not found["of_bound"]:
        raise SystemExit("no run in which the machine kept its own speed: run it on an idle one")
    print("\n".join(target.verdict(found[name]) for name, target in TARGETS.items()))


if __name__ == "__main__":
    main()
