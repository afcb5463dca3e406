"""How long training stands still while a node leaves or joins.

    python -m bench.changes [--nodes 4] [--rounds 3] [--hidden 64] [--layers 8] [--mb-per-s 50]

A node of a running cluster is drained and taken back, again and again. With `--mb-per-s` every node
is on a host of its own, in a network where each host sends and receives no more than that.

stall   no step was committed for so long at the switch, less one step of before
over    the same, less the longer of that step and one of after: fewer nodes have longer steps
slower  a step while state is sent ahead, less one of before that
step    before state is sent ahead, and with the new plan
way     from the plan to its first step; then its phases
fed     the state that moved while training went on, of all that moved
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.support.client import Record
from bench.support.cluster import Cluster, LocalCluster
from bench.support.netcluster import NetCluster

_USUAL_STEPS = 10
_LIMIT_S = 600.0
_PHASES = ("abort", "rendezvous", "transfer", "first_step")


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


@dataclass(frozen=True, slots=True)
class Change:
    """Costs of one change. Steps are medians."""

    kind: str
    stall_s: float
    over_s: float
    slower_s: float
    before_s: float
    after_s: float
    way_s: float
    phases: dict[str, float]
    fed_bytes: int
    moved_bytes: int


def change_of(kind: str, event: Record, metrics: Sequence[Record]) -> Change:
    """Return the costs of the change in a `reconfigured` record, from the steps before and after
    it."""
    generation, way_s = int(event["to_generation"]), float(event["total_s"])
    older = [line for line in metrics if line["generation"] < generation]
    newer = [line for line in metrics if line["generation"] == generation]
    planned_at = float(newer[0]["time"]) - way_s
    undisturbed = [line for line in older if float(line["time"]) < planned_at]
    # Leave out the step in which the plan arrived: only a part of it was disturbed.
    feeding = [line for line in older if float(line["time"]) >= planned_at][1:]
    before_s = _usual_s(undisturbed[-_USUAL_STEPS:])
    after_s = _usual_s(newer[1 : 1 + _USUAL_STEPS])
    last_s = _usual_s(older[-_USUAL_STEPS:])
    stood_s = float(newer[0]["time"]) - float(older[-1]["time"])
    return Change(
        kind=kind,
        stall_s=stood_s - last_s,
        over_s=stood_s - max(last_s, after_s),
        slower_s=_usual_s(feeding) - before_s if feeding else 0.0,
        before_s=before_s,
        after_s=after_s,
        way_s=way_s,
        phases={name: float(event["phases"].get(name) or 0.0) for name in _PHASES},
        fed_bytes=int(event.get("fed_bytes", 0)),
        moved_bytes=int(event["received_bytes"]),
    )


def _usual_s(lines: Sequence[Record]) -> float:
    return statistics.median(float(line["step_seconds"]) for line in lines)


class Changes:
    def __init__(self, cluster: Cluster, job_id: str) -> None:
        self._cluster, self._job_id = cluster, job_id

    def settle(self) -> None:
        reached = self._cluster.last_step(self._job_id) + _USUAL_STEPS + 1
        self._cluster.wait_step(self._job_id, reached)

    def one(self, kind: str, *command: str) -> Change:
        """Run the operator's command, and return the change that follows."""
        self.settle()
        known = len(self._events())
        self._cluster.oobleck(*command)
        self._cluster.wait(lambda: len(self._events()) > known, "the change", _LIMIT_S)
        self.settle()
        return change_of(kind, self._events()[known], self._cluster.metrics(self._job_id))

    def _events(self) -> list[Record]:
        return self._cluster.events(self._job_id, "reconfigured")


def _print_row(change: Change) -> None:
    seconds = (change.stall_s, change.over_s, change.slower_s, change.before_s, change.after_s)
    phases = "+".join(f"{1e3 * change.phases[name]:.0f}" for name in _PHASES)
    print(
        f"{change.kind:<8}",
        *(f"{1e3 * value:>8.0f}" for value in seconds),
        f"{1e3 * change.way_s:>8.0f}  {phases:<16}",
        f"{change.fed_bytes / 1e6:>8.1f} of {change.moved_bytes / 1e6:.1f} MB",
        flush=True,
    )


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
    parser.add_argument("--json", type=Path, help="write what each change cost there")
    options = parser.parse_args()
    found: list[Change] = []
    with running(options.nodes, options.mb_per_s) as cluster:
        wanted = job(options.hidden, options.layers, options.batch)
        changes = Changes(cluster, cluster.submit(wanted))
        victim = f"n{options.nodes}"
        print("ms         stall     over   slower   before    after      way  " + "+".join(_PHASES))
        for _ in range(options.rounds):
            for kind, command in (("leaves", "drain"), ("joins", "undrain")):
                found.append(changes.one(kind, "node", command, victim))
                _print_row(found[-1])
    for kind in ("leaves", "joins"):
        stall_s, over_s = (
            statistics.median(getattr(each, name) for each in found if each.kind == kind)
            for name in ("stall_s", "over_s")
        )
        print(f"{kind:<8} {1e3 * stall_s:>8.0f} {1e3 * over_s:>8.0f}  the medians")
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
