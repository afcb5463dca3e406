"""How long training stands still while a node leaves or joins.

    python -m bench.changes [--nodes 4] [--rounds 3] [--hidden 64] [--layers 8] [--mb-per-s 50]

A node of a running cluster is drained and taken back, again and again. `stall` is how long no step
was committed at the switch, less one step of before (the median of the last ten); `way` is from
the plan to its first step; `fed` is the state that moved while training went on, of all that
moved. With `--mb-per-s` every node is on a host of its own, in a network where each host sends and
receives no more than that.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.support.client import Record
from bench.support.cluster import Cluster, LocalCluster
from bench.support.netcluster import NetCluster

_USUAL_STEPS = 10
_LIMIT_S = 600.0


def job(hidden: int, layers: int, batch: int) -> dict[str, object]:
    return {
        "name": "changes",
        "model": {"layers": layers, "hidden": hidden, "heads": 4, "sequence_length": 32},
        "data": {"text": [str(Path(__file__).resolve().parents[1] / "LICENSE")]},
        "training": {"steps": 1_000_000, "global_batch": batch, "microbatch": 1},
        "fault_tolerance": 1,
        "resources": {"min_nodes_per_pipeline": 2},
        "profile": "estimate",
    }


def stall_s(metrics: list[Record], generation: int) -> float:
    """Between the last commit before `generation` and its first, less one step of before."""
    before = [line for line in metrics if line["generation"] < generation][-_USUAL_STEPS:]
    first = next(line for line in metrics if line["generation"] >= generation)
    usual_s = statistics.median(float(line["step_seconds"]) for line in before)
    return float(first["time"]) - float(before[-1]["time"]) - usual_s


class Changes:
    def __init__(self, cluster: Cluster, job_id: str) -> None:
        self._cluster, self._job_id = cluster, job_id

    def settle(self) -> None:
        reached = self._cluster.last_step(self._job_id) + _USUAL_STEPS
        self._cluster.wait_step(self._job_id, reached)

    def one(self, *command: str) -> Record:
        """The `reconfigured` line of what the operator's command leads to."""
        known = len(self._events())
        self._cluster.oobleck(*command)
        self._cluster.wait(lambda: len(self._events()) > known, "the change", _LIMIT_S)
        return self._events()[known]

    def _events(self) -> list[Record]:
        return self._cluster.events(self._job_id, "reconfigured")

    def print_row(self, title: str, event: Record) -> float:
        metrics = self._cluster.metrics(self._job_id)
        generation = int(event["to_generation"])
        stood_s = stall_s(metrics, generation)
        usual_s = statistics.median(float(line["step_seconds"]) for line in metrics[-30:])
        fed, moved = int(event.get("fed_bytes", 0)), int(event["received_bytes"])
        print(
            f"{title:<10}{1e3 * stood_s:>10.0f} ms{1e3 * usual_s:>10.0f} ms"
            f"{float(event['total_s']):>10.2f} s{fed / 1e6:>10.1f} MB{moved / 1e6:>10.1f} MB"
        )
        return stood_s


@contextmanager
def running(nodes: int, mb_per_s: float | None) -> Iterator[Cluster]:
    if mb_per_s is None:
        with (
            tempfile.TemporaryDirectory() as folder,
            LocalCluster(nodes, state_dir=Path(folder) / "state") as local,
        ):
            yield local
    else:
        with NetCluster(nodes, bytes_per_s=int(mb_per_s * 1e6)) as far:
            yield far


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--mb-per-s", type=float)
    options = parser.parse_args()
    with running(options.nodes, options.mb_per_s) as cluster:
        wanted = job(options.hidden, options.layers, options.batch)
        job_id = cluster.submit(wanted)
        changes = Changes(cluster, job_id)
        victim = f"n{options.nodes}"
        print(f"{'':<10}{'stall':>13}{'step':>13}{'way':>12}{'fed':>13}{'moved':>13}")
        stalls: dict[str, list[float]] = {"leaves": [], "joins": []}
        for _ in range(options.rounds):
            for title, command in (("leaves", "drain"), ("joins", "undrain")):
                changes.settle()
                event = changes.one("node", command, victim)
                changes.settle()
                stalls[title].append(changes.print_row(title, event))
        for title, found in stalls.items():
            print(f"{title:<10}{1e3 * statistics.median(found):>10.0f} ms, the median")


if __name__ == "__main__":
    main()
