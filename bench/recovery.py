"""How long training stands still when a node is killed, by phase.

    python -m bench.recovery [--kills 7] [--nodes 5] [--second-loss PHASE]

Kills a whole node (agent and worker, SIGKILL) of a running local cluster again and again, each
time waiting until the node is back in. The clock runs from just before the signal to the commit
of the next step; phases are those of the `reconfigured` record, and `notice` is what lies between
the signal and the master's first evidence. `rest` is what the sum of all misses of the wall time:
the way of the step's record from a worker to the master, and clock noise.

With `--second-loss` a second node kills itself in that phase of the recovery from the first one,
in turns with recoveries from a single loss in the same cluster, and both times are told: from the
first signal to the commit of the next step that all who are left then have done.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from bench.cluster import LocalCluster, Record

PHASES = ("notice", "detect", "plan", "abort", "rendezvous", "transfer", "first_step")
COLUMNS = (*PHASES, "rest", "wall", "step", "beyond")
WARM_UP_STEPS = 10
#: Steps between two disturbances, so that the next one meets a settled cluster.
SETTLE_STEPS = 8
#: By the phase of the recovery in which a second node dies, the point of the drill that does it.
SECOND_LOSS: Mapping[str, str] = {
    "abort": "before:rendezvous",
    "rendezvous": "before:connect",
    "standings": "before:standings",
    "transfer": "before:transfer",
    "first_step": "before:Backward",
    "vote": "reduced",
}


def job(steps: int, fault_tolerance: int = 1) -> dict[str, object]:
    return {
        "name": "recovery",
        "model": {"layers": 6, "hidden": 64, "heads": 4, "sequence_length": 64},
        "data": {"text": [str(Path(__file__).resolve().parents[1] / "LICENSE")]},
        "training": {"steps": steps, "global_batch": 32, "microbatch": 2},
        "fault_tolerance": fault_tolerance,
        "resources": {"min_nodes_per_pipeline": 2},
        "profile": "estimate",
    }


def one_kill(cluster: LocalCluster, job_id: str, victim: str) -> dict[str, float]:
    """Kill `victim`, let it come back; returns the seconds of each phase and the totals."""
    cluster.wait_step(job_id, cluster.last_step(job_id) + SETTLE_STEPS)
    before = len(cluster.events(job_id, "reconfigured"))
    steps = [float(r["step_seconds"]) for r in cluster.metrics(job_id)[-SETTLE_STEPS:]]
    killed_at = time.time()
    cluster.kill_node(victim)

    def records(count: int) -> list[Record]:
        return cluster.events(job_id, "reconfigured")[before : before + count]

    cluster.wait(lambda: len(records(1)) == 1, f"the recovery from the loss of {victim}")
    record = records(1)[0]
    first = next(
        r for r in cluster.metrics(job_id) if int(r["generation"]) >= record["to_generation"]
    )
    wall = float(first["time"]) - killed_at
    declared = cluster.events(job_id, "node_lost")[-1]
    notice = float(declared["time"]) - float(declared["detect_s"]) - killed_at
    phases = {name: float(seconds) for name, seconds in record["phases"].items()}
    cluster.start_node(victim)
    cluster.wait(lambda: len(records(2)) == 2, f"the return of {victim}")
    return {
        "notice": notice,
        **phases,
        "rest": wall - notice - sum(phases.values()),
        "wall": wall,
        "step": statistics.median(steps),
        "beyond": wall - statistics.median(steps),
    }


def first_step_after(cluster: LocalCluster, job_id: str, generation: int) -> float:
    """The time at which the first step of that generation, or of a newer one, was committed."""
    return next(
        float(record["time"])
        for record in cluster.metrics(job_id)
        if int(record["generation"]) >= generation
    )


class TwoLosses:
    """A cluster of which two nodes are lost, the second one in the recovery from the first."""

    def __init__(self, cluster: LocalCluster, job_id: str, point: str, scratch: Path) -> None:
        self._cluster = cluster
        self._job_id = job_id
        self._point = point
        self._faults = scratch

    def _reconfigured(self) -> list[Record]:
        return self._cluster.events(self._job_id, "reconfigured")

    def _after(self, count: int, what: str) -> int:
        """The newest generation, once there are so many records of changes."""
        self._cluster.wait(lambda: len(self._reconfigured()) >= count, what)
        return int(self._reconfigured()[-1]["to_generation"])

    def _settle(self) -> None:
        step = self._cluster.last_step(self._job_id)
        self._cluster.wait_step(self._job_id, step + SETTLE_STEPS)

    def one(self, victim: str) -> float:
        """Seconds from the loss of `victim` to the next step; it comes back after."""
        self._settle()
        before = len(self._reconfigured())
        killed_at = time.time()
        self._cluster.kill_node(victim)
        generation = self._after(before + 1, f"the recovery from the loss of {victim}")
        seconds = first_step_after(self._cluster, self._job_id, generation) - killed_at
        self._cluster.start_node(victim)
        self._after(before + 2, f"the return of {victim}")
        return seconds

    def two(self, victim: str, second: str) -> float:
        """The same of two nodes, of which `second` dies in the recovery from the first loss."""
        before = len(self._reconfigured())
        self._cluster.kill_node(second)
        left = self._after(before + 1, f"a plan without {second}")
        # The next generation has it in again, and the one after that recovers from the loss.
        rule = {
            "worker": {"node": second, "slot": 0},
            "point": self._point,
            "generation": left + 2,
            "action": "kill_node",
        }
        self._faults.write_text(json.dumps([rule]))
        self._cluster.start_node(second, "--fault-plan", str(self._faults))
        self._after(before + 2, f"the return of {second}")
        self._settle()
        killed_at = time.time()
        self._cluster.kill_node(victim)
        self._cluster.wait(
            lambda: any(
                int(r["generation"]) >= left + 3 for r in self._cluster.metrics(self._job_id)
            ),
            f"a step after the loss of {victim} and {second}",
        )
        seconds = first_step_after(self._cluster, self._job_id, left + 3) - killed_at
        self._cluster.agents.pop(second)
        lost = len(self._reconfigured())
        for number, node in enumerate((victim, second), 1):
            self._cluster.start_node(node)
            self._after(lost + number, f"the return of {node}")
        return seconds


def compare(phase: str, nodes: int, kills: int) -> None:
    """Print the times of single and double losses, in turns, and the ratio of their medians."""
    singles, doubles = [], []
    with LocalCluster(nodes) as cluster, tempfile.TemporaryDirectory() as folder:
        job_id = cluster.submit(job(steps=100_000, fault_tolerance=2))
        cluster.wait_step(job_id, WARM_UP_STEPS)
        drill = TwoLosses(cluster, job_id, SECOND_LOSS[phase], Path(folder, "faults.json"))
        print(f"{'':<12}{'one loss':>10}  {'two losses':>10}   (milliseconds)")
        for number in range(kills):
            victim, second = (f"n{(number + i) % nodes + 1}" for i in (0, 1))
            singles.append(drill.one(victim))
            doubles.append(drill.two(victim, second))
            print_two(str(number + 1), singles[-1], doubles[-1])
    one, two = statistics.median(singles), statistics.median(doubles)
    print_two("median", one, two)
    print(f"two losses, the second one in {phase}: {two / one:.2f} times one loss")


def print_two(title: str, one: float, two: float) -> None:
    print(f"{title:<12}{one * 1e3:>10.0f}  {two * 1e3:>10.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=7)
    parser.add_argument("--nodes", type=int, default=5, help="with --second-loss at least 7")
    parser.add_argument(
        "--second-loss", choices=SECOND_LOSS, metavar="PHASE", help=", ".join(SECOND_LOSS)
    )
    arguments = parser.parse_args()
    if arguments.second_loss is not None:
        compare(arguments.second_loss, max(7, arguments.nodes), arguments.kills)
        return
    single_losses(arguments.nodes, arguments.kills)


def single_losses(nodes: int, kills: int) -> None:
    results = []
    with LocalCluster(nodes) as cluster:
        job_id = cluster.submit(job(steps=100_000))
        cluster.wait_step(job_id, WARM_UP_STEPS)
        header = "  ".join(f"{name:>10}" for name in COLUMNS)
        print(f"{'kill':<12}{header}   (milliseconds)")
        for number in range(kills):
            victim = f"n{number % nodes + 1}"
            result = one_kill(cluster, job_id, victim)
            results.append(result)
            print_row(f"{number + 1} {victim}", result)
    print_row("median", {key: statistics.median(r[key] for r in results) for key in COLUMNS})
    print("beyond: wall less one undisturbed step (the one that is done again)")


def print_row(title: str, result: dict[str, float]) -> None:
    print(f"{title:<12}" + "  ".join(f"{result[key] * 1e3:>10.0f}" for key in COLUMNS), flush=True)


if __name__ == "__main__":
    main()
