"""What is left of the speed when a worker becomes slow, or is lost, where cores are short.

    python -m bench.straggler [--cores 0.5] [--slow 0.25] [--seconds 30]

Four nodes train as 2 x 2; each worker has half a core by a cgroup quota. One is cut to a quarter
of a core and gets its half back; later one is killed and comes back. Speeds are samples a second
between commits, beside what the rates of all workers together would allow (`bound`): with four
workers of which one has half of its rate, 3.5 / 4 of the speed before. `answered` and `healed` say
after how many seconds the first step of the plan for it was committed. Twelve layers can be shared
by four workers and by the three that a loss leaves.
"""

import argparse
import time
from pathlib import Path

from bench.support.cluster import LocalCluster
from bench.support.throttle import throttled

_VICTIM = "n2/0"
#: Seconds after a worker's pace has changed, within which the job has to have answered.
_ANSWERED_S = 10.0
_HEALED_S = 25.0


def job(policy: str) -> dict[str, object]:
    return {
        "name": "straggler",
        "model": {"layers": 12, "hidden": 128, "heads": 4, "sequence_length": 64},
        "data": {"text": [str(Path(__file__).resolve().parents[1] / "LICENSE")]},
        "training": {"steps": 1_000_000, "global_batch": 32, "microbatch": 1},
        "fault_tolerance": 1,
        "resources": {"min_nodes_per_pipeline": 2},
        "recovery": {"policy": policy},
    }


class Watch:
    """What one job did, by the times of its commits and events."""

    def __init__(self, cluster: LocalCluster, job_id: str) -> None:
        self._cluster, self._job_id = cluster, job_id

    def over(self, since: float, until: float) -> float:
        """Samples a second of the steps committed between two moments."""
        times = [
            float(line["time"])
            for line in self._cluster.metrics(self._job_id)
            if since <= float(line["time"]) <= until
        ]
        if len(times) < 2:
            return 0.0
        return 32 * (len(times) - 1) / (times[-1] - times[0])

    def answers(self, cause: str, since: float) -> list[float]:
        """After how many seconds plans made for this had their first step."""
        events = self._cluster.events(self._job_id, "reconfigured")
        times = [float(event["time"]) for event in events if event["cause"] == cause]
        return [time - since for time in times if time >= since]


def _seconds(found: list[float]) -> str:
    return f"{found[0]:.1f} s" if found else "never"


def one_round(cluster: LocalCluster, job_id: str, options: argparse.Namespace) -> None:
    watch, seconds = Watch(cluster, job_id), options.seconds
    pids = cluster.worker_pids()
    with throttled(pids, options.cores) as shares:
        time.sleep(10)
        begin = time.time()
        time.sleep(seconds)
        before = watch.over(begin, time.time())
        shares[_VICTIM].set(options.slow)
        cut = time.time()
        time.sleep(_ANSWERED_S + seconds)
        first = watch.over(cut, cut + _ANSWERED_S)
        during = watch.over(cut + _ANSWERED_S, time.time())
        shares[_VICTIM].set(options.cores)
        healed = time.time()
        time.sleep(_HEALED_S + seconds)
        after = watch.over(healed + _HEALED_S, time.time())
        answered = watch.answers("worker slow", cut)[:1]
        # In parts, perhaps: the last one heals.
        back = watch.answers("worker well", healed)[-1:]
        bound = before * (len(pids) - 1 + options.slow / options.cores) / len(pids)
        print(
            f"slow     before {before:6.2f}  first {_ANSWERED_S:.0f} s {first:6.2f}  "
            f"during {during:6.2f}  bound {bound:6.2f}  of it {during / bound:5.2f}  "
            f"after {after:6.2f} ({after / before:4.2f} of before)  "
            f"answered {_seconds(answered)}  healed {_seconds(back)}",
            flush=True,
        )
        cluster.kill_node(_VICTIM.partition("/")[0])
        cluster.wait(lambda: cluster.planned(job_id) == {"n1", "n3", "n4"}, "a plan of three")
        time.sleep(_ANSWERED_S)
        begin = time.time()
        time.sleep(seconds)
        lost = watch.over(begin, time.time())
        print(f"loss     before {after:6.2f}  after {lost:6.2f}  kept {lost / after:5.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cores", type=float, default=0.5, help="of each worker")
    parser.add_argument("--slow", type=float, default=0.25, help="of the slow one")
    parser.add_argument("--seconds", type=float, default=30.0, help="that a speed is measured")
    parser.add_argument("--policy", default="auto")
    options = parser.parse_args()
    with LocalCluster(4) as cluster:
        job_id = cluster.submit(job(options.policy))
        cluster.wait_step(job_id, 5)
        one_round(cluster, job_id, options)
        for record in cluster.events(job_id, "reconfigured"):
            print({k: record[k] for k in ("to_generation", "cause", "rule", "policy", "reason")})


if __name__ == "__main__":
    main()
