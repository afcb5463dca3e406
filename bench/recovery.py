"""How long training stands still when a node is killed, by phase.

    python -m bench.recovery [--kills 7] [--nodes 5 | 4,8,12] [--json FILE] [--second-loss PHASE]

Kills a whole node (agent and worker, SIGKILL) of a running local cluster repeatedly, each time
after the last one is back in the plan. Several numbers of nodes: a cluster of each. The wall time
is from just before the signal to the commit of the next step. Its parts are the phases of the
`reconfigured` record and

- `notice`: from the signal to the master's first evidence
- `rest`: the difference between the wall time and the sum: the record's way from a worker to the
  master, and clock noise
- `gone`: from the signal until the kernel has removed all processes of the node; peers do not see
  closed connections before. On a machine of its own that takes milliseconds under any load, so here
  victims get priority (as root)

With `--second-loss` a second node kills itself in that phase of the recovery from the first one,
or, with `all`, in each phase in turn. Each double loss follows a single one in the same cluster.
Both times are printed: from the first signal to the first step that all remaining nodes commit.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench.support.client import ClusterError, Record
from bench.support.cluster import LocalCluster
from bench.support.daemons import alive, await_ends, descendants, hurry
from oobleck.cli.chaos.injector import kill

PHASES = (
    "notice", "detect", "plan", "waiting", "abort", "rendezvous", "transfer", "first_step",
)  # fmt: skip
COLUMNS = (*PHASES, "rest", "wall", "step", "beyond", "gone")
WARM_UP_STEPS = 10
#: Steps between two disturbances, so that the next one meets a settled cluster.
SETTLE_STEPS = 8
#: Time-out for nodes to come back, on a busy machine.
_RETURN_S = 180.0
#: Attempts to have a node die in the intended generation: others may come between.
_ATTEMPTS = 3
#: By the phase of the recovery in which a second node dies, the point of the drill that does it.
SECOND_LOSS: Mapping[str, str] = {
    "abort": "before:rendezvous",
    "rendezvous": "before:connect",
    "agree": "before:agree",
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
        "recovery": {"shadows": "none"},  # one plan for each loss
        "profile": "estimate",
    }


def one_kill(cluster: LocalCluster, job_id: str, victim: str) -> dict[str, float]:
    """Kill `victim`, and let it come back; return the seconds of each phase and the totals."""
    cluster.wait_step(job_id, cluster.last_step(job_id) + SETTLE_STEPS)
    before = len(cluster.events(job_id, "reconfigured"))
    steps = [float(r["step_seconds"]) for r in cluster.metrics(job_id)[-SETTLE_STEPS:]]
    victims = list(descendants(cluster.agents.pop(victim)))
    hurry(victims)
    killed_at = time.time()
    kill([victim.pid for victim in reversed(victims)])
    await_ends(victims)
    gone_at = time.time()

    def records(count: int) -> list[Record]:
        return cluster.events(job_id, "reconfigured")[before : before + count]

    cluster.wait(lambda: len(records(1)) == 1, f"the recovery from the loss of {victim}")
    record = records(1)[0]

    def steps_since() -> list[float]:
        lines = cluster.metrics(job_id)
        return [float(r["time"]) for r in lines if int(r["generation"]) >= record["to_generation"]]

    cluster.wait(lambda: bool(steps_since()), f"a step after the loss of {victim}")
    wall = steps_since()[0] - killed_at
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
        "gone": gone_at - killed_at,
    }


class TwoLosses:
    """Cluster in which two nodes are lost, the second one during the recovery from the first
    loss."""

    def __init__(self, cluster: LocalCluster, job_id: str, scratch: Path) -> None:
        self._cluster = cluster
        self._job_id = job_id
        self._faults = scratch / "faults.json"

    def _planned(self, nodes: Iterable[str]) -> int:
        """Wait until the job trains on exactly these nodes; return its generation."""
        wanted = set(nodes)
        self._cluster.wait(
            lambda: self._cluster.planned(self._job_id) == wanted,
            f"a plan with {', '.join(sorted(wanted))}",
            timeout_s=_RETURN_S,
            poll_s=0.1,
        )
        return int(self._cluster.status(self._job_id)["generation"])

    def _settle(self) -> None:
        step = self._cluster.last_step(self._job_id)
        self._cluster.wait_step(self._job_id, step + SETTLE_STEPS)

    def _stood_still(self, since: float, generation: int) -> float:
        """Return the seconds from `since` to the first step of that generation, or of a newer
        one."""

        def steps() -> list[float]:
            lines = self._cluster.metrics(self._job_id)
            return [float(r["time"]) for r in lines if int(r["generation"]) >= generation]

        self._cluster.wait(lambda: bool(steps()), f"a step of generation {generation}")
        return steps()[0] - since

    def one_and_two(self, victim: str, second: str, point: str) -> tuple[float, float]:
        """Return the seconds from the loss of `second` alone to the next step, and from the loss of
        `victim` followed by that of `second` at `point` of the recovery. Afterwards all come
        back."""
        for _ in range(_ATTEMPTS):
            one, generation = self._one(second, dies_at=point)
            if self._planned(self._cluster.agents) != generation - 1:
                continue  # it came back in another generation than the next
            self._settle()
            killed_at = time.time()
            self._cluster.kill_node(victim)
            two = self._stood_still(killed_at, generation + 1)
            died = not alive(self._cluster.agents[second])
            if died:
                del self._cluster.agents[second]
                self._cluster.start_node(second)
            self._cluster.start_node(victim)
            if died:
                return one, two
        raise ClusterError(f"{second} never came to {point} in the generation after a loss")

    def _one(self, node: str, dies_at: str) -> tuple[float, int]:
        """Lose the node, and bring it back with orders to kill itself at `dies_at` of the
        generation after that in which it returns. Return the seconds from the loss to the next
        step, and the number of that later generation."""
        before = self._planned(self._cluster.agents)
        self._settle()
        killed_at = time.time()
        self._cluster.kill_node(node)
        seconds = self._stood_still(killed_at, before + 1)
        generation = self._planned(self._cluster.agents) + 2
        rule = {
            "worker": {"node": node, "slot": 0},
            "point": dies_at,
            "generation": generation,
            "action": "kill_node",
        }
        self._faults.write_text(json.dumps([rule]))
        self._cluster.start_node(node, "--fault-plan", str(self._faults))
        return seconds, generation


def compare(phases: Sequence[str], nodes: int, kills: int) -> None:
    """Print the times of single and double losses, one of each in turns, and the ratio of their
    medians, for each phase of the second loss."""
    with LocalCluster(nodes) as cluster, tempfile.TemporaryDirectory() as folder:
        job_id = cluster.submit(job(steps=1_000_000, fault_tolerance=2))
        cluster.wait_step(job_id, WARM_UP_STEPS)
        drill = TwoLosses(cluster, job_id, Path(folder))
        found: dict[str, list[tuple[float, float]]] = {phase: [] for phase in phases}
        print(f"{'second loss':<14}{'one loss':>10}  {'two losses':>10}  {'times':>6}   (ms)")
        for number in range(kills):
            for phase in phases:
                victim, second = (f"n{(number + i) % nodes + 1}" for i in (0, 1))
                found[phase].append(drill.one_and_two(victim, second, SECOND_LOSS[phase]))
                print_two(phase, *found[phase][-1])
    singles = statistics.median(one for pairs in found.values() for one, _ in pairs)
    print(f"medians of {kills}; one loss: of all {kills * len(phases)}")
    for phase, pairs in found.items():
        print_two(phase, singles, statistics.median(two for _, two in pairs))


def print_two(title: str, one: float, two: float) -> None:
    row = f"{title:<14}{one * 1e3:>10.0f}  {two * 1e3:>10.0f}  {two / one:>6.2f}"
    print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=7)
    parser.add_argument("--nodes", default="5", help="with --second-loss one number, at least 7")
    parser.add_argument("--json", type=Path, help="write all figures, in seconds, to this file")
    parser.add_argument(
        "--second-loss",
        choices=["all", *SECOND_LOSS],
        metavar="PHASE",
        help=", ".join(["all", *SECOND_LOSS]),
    )
    arguments = parser.parse_args()
    if arguments.second_loss is not None:
        phase = arguments.second_loss
        phases = list(SECOND_LOSS) if phase == "all" else [phase]
        compare(phases, max(7, int(arguments.nodes)), arguments.kills)
        return
    found = {
        nodes: single_losses(nodes, arguments.kills)
        for nodes in map(int, arguments.nodes.split(","))
    }
    print_header(f"of {arguments.kills}")
    for nodes, results in found.items():
        medians = {key: statistics.median(r[key] for r in results) for key in COLUMNS}
        print_row(f"{nodes} nodes", medians)
    print("beyond: wall less one undisturbed step (the one that is done again)")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found))


def single_losses(nodes: int, kills: int) -> list[dict[str, float]]:
    """Kill nodes one after the other; return the phases of each recovery."""
    results = []
    with LocalCluster(nodes) as cluster:
        job_id = cluster.submit(job(steps=100_000))
        cluster.wait_step(job_id, WARM_UP_STEPS)
        print_header("kill")
        for number in range(kills):
            victim = f"n{number % nodes + 1}"
            result = one_kill(cluster, job_id, victim)
            results.append(result)
            print_row(f"{number + 1} {victim}", result)
    return results


def print_header(title: str) -> None:
    header = "  ".join(f"{name:>10}" for name in COLUMNS)
    print(f"{title:<12}{header}   (milliseconds)", flush=True)


def print_row(title: str, result: Mapping[str, float]) -> None:
    row = "  ".join(f"{result[key] * 1e3:>10.0f}" for key in COLUMNS)
    print(f"{title:<12}{row}", flush=True)


if __name__ == "__main__":
    main()
