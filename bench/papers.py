"""Published figures of other systems and of the paper's Oobleck, held against the replay.

    python -m bench.papers [--json]

- **Oobleck** (SOSP 2023), a loss every 6 h to 10 min, 30 nodes down to 16: samples/s by the replay
  of `oobleck simulate`, over what the paper's artifact simulates. In place of plans the replay has
  a *step table*: the samples/s that the artifact has measured with each number of nodes. A loss
  costs the whole broken step, and `RESTART_S`.
- **Varuna**, as that artifact models it: each loss is a return to the checkpoint of at most ten
  steps before, at the artifact's seconds of a restart and of a checkpoint. The artifact also saves
  right behind the first step after a restart, which the replay does not: where losses are frequent,
  it gives less.
- **Malleus** (SIGMOD 2025): the step around slow workers by the best candidate of
  `oobleck.planner.recovery.uneven`, over that of all work shared by the workers' rates.

`papers.json` has the figures. Left out, since constants are not published: Bamboo (its costs of a
fall-back; its figures are shown), and the spot traces (when the artifact takes nodes in).
"""

import argparse
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.uneven import CASES, pipelines, profile, relative
from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import NodeName
from oobleck.planner.recovery.course import PlanWanted
from oobleck.planner.recovery.outlook import Outlook
from oobleck.planner.recovery.terms import Terms
from oobleck.planner.simulate.costs import Costs
from oobleck.planner.simulate.replay import Setting, replay
from oobleck.planner.simulate.shapes import Outcome, Racks, Rates, Shape, Shapes
from oobleck.planner.simulate.trace import Row, Trace, trace_of

#: Seconds between two losses.
INTERVALS_S = {"6h": 21_600.0, "3h": 10_800.0, "1h": 3_600.0, "30m": 1_800.0, "10m": 601.2}
NODES, LEAST = 30, 15
#: Time at which the artifact's nodes are ready; its mean begins then.
READY_S = 45.0
#: Seconds of the paper's Oobleck from a loss to the next step.
RESTART_S = 2.0
#: Steps between Varuna's checkpoints.
SAVED_STEPS = 10


class StepTable(Shapes):
    """Steps by the number of nodes alone, in place of plans."""

    def __init__(self, samples_per_s: Sequence[float], batch: float, *, copies: bool) -> None:
        """`samples_per_s`: from `NODES` nodes down. `copies`: whether other nodes have the state of
        lost ones; without it each loss is a return to the checkpoint."""
        self.terms = Terms(
            profile=profile(),
            sizes=range(1, 2),
            fault_tolerance=0,
            tied=False,
            schedule=None,
            shadows=False,
        )
        self.microbatches = 1
        self._step_s = {NODES - k: batch / one for k, one in enumerate(samples_per_s) if one}
        self._shapes = {nodes: self._of(nodes, copies) for nodes in self._step_s}

    @staticmethod
    def _of(nodes: int, copies: bool) -> Shape:
        plan, seats = pipelines(), range(nodes)
        return Shape(
            plan=plan,
            base=plan,
            nodes=tuple(NodeName(f"s{seat}") for seat in seats),
            alike=(),
            holders=(frozenset(seats),) if copies else tuple(frozenset({seat}) for seat in seats),
            can_lose=nodes - 1 if copies else 0,
        )

    def first(self, nodes: int, pipelines: int | None = None, racks: Racks = ()) -> Outcome:
        return self._measured(tuple(-1 - seat for seat in range(nodes)))

    def ask(
        self,
        shape: Shape,
        gone: Collection[int],
        fresh: int,
        wanted: PlanWanted,
        rates: Rates = (),
        outlook: Outlook | None = None,
        racks: Racks = (),
        most_more: int = 0,
    ) -> Outcome:
        stay = [seat for seat in range(len(shape.nodes)) if seat not in gone]
        return self._measured((*stay, *(-1 - seat for seat in range(fresh))))

    def _measured(self, seats: tuple[int, ...]) -> Outcome:
        if len(seats) not in self._shapes:
            raise PlanInfeasible(f"nothing is measured for {len(seats)} nodes")
        step_s = self._step_s[len(seats)]
        return Outcome(
            shape=self._shapes[len(seats)],
            seats=seats,
            step_s=step_s,
            policy="templates",
            rule="table",
        )


def losses(interval_s: float) -> Trace:
    """Return a trace of nodes that go one by one."""
    rows = [Row(0.0, "add", f"n{number}") for number in range(NODES)]
    rows += [
        Row(number * interval_s - READY_S, "remove", f"n{number}")
        for number in range(1, NODES - LEAST + 1)
    ]
    return trace_of(rows)


def samples_per_s(
    measured: Sequence[float], batch: float, costs: Costs, interval_s: float, *, copies: bool
) -> float:
    table, trace = StepTable(measured, batch, copies=copies), losses(interval_s)
    setting = Setting(
        trace=trace,
        shapes=table,
        costs=costs,
        until_s=trace.end_s,
        full_step_s=batch / measured[0],
        batch=1,
        nodes=NODES,
    )
    return batch * replay(setting, "templates").samples_per_s


def paused(pause_s: float, **more: float) -> Costs:
    """Return costs of a loss that is one pause, and all of the broken step."""
    none = dict.fromkeys(("detect_s", "plan_s", "abort_s", "meeting_s", "switch_s"), 0.0)
    given = {**none, "salvage": 0.0, "checkpoint_every_s": 0.0, "meeting_s": pause_s, **more}
    return Costs(**given)


def oobleck(one: Mapping[str, Any], interval_s: float) -> float:
    measured = one["measured"]["oobleck"]
    return samples_per_s(measured, one["batch"], paused(RESTART_S), interval_s, copies=True)


def varuna(one: Mapping[str, Any], interval_s: float) -> float:
    measured, own = one["measured"]["varuna"], one["varuna"]
    mean_step_s = one["batch"] * sum(1 / each for each in measured[:-1]) / len(measured[:-1])
    # The artifact's restart includes a checkpoint at its end.
    costs = paused(
        0.0,
        load_s=own["restart_s"] - own["save_s"],
        save_s=own["save_s"],
        checkpoint_every_s=SAVED_STEPS * mean_step_s + own["save_s"],
    )
    return samples_per_s(measured, one["batch"], costs, interval_s, copies=False)


def figures() -> Iterator[dict[str, Any]]:
    """Yield the figures of each model and interval."""
    for one in json.loads(Path(__file__).with_suffix(".json").read_text()):
        for name, interval_s in INTERVALS_S.items():
            row: dict[str, Any] = {"model": one["model"], "losses_every": name}
            for system, replayed in (("oobleck", oobleck), ("varuna", varuna)):
                own, published = replayed(one, interval_s), one["published"][system][name]
                row[system] = {"replayed": own, "published": published, "ratio": own / published}
            if "bamboo" in one["published"]:
                row["bamboo"] = {"published": one["published"]["bamboo"][name]}
            yield row


def malleus() -> Iterator[dict[str, Any]]:
    """Yield the best candidate's step over the bound, for each case of slow workers."""
    for name, slow in CASES:
        steps, bound = relative(slow)
        yield {"slow": name, "step": min(steps.values()), "of_bound": min(steps.values()) / bound}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    chosen = parser.parse_args(arguments)
    rows, slow = list(figures()), list(malleus())
    if chosen.json:
        print(json.dumps({"losses": rows, "slow_workers": slow}, indent=2))
        return
    heads = (
        "model",
        "a loss every",
        "Oobleck",
        "published",
        "ratio",
        "Varuna",
        "published",
        "ratio",
    )
    print("".join(f"{head:>14}" for head in (*heads, "Bamboo")))
    for row in rows:
        cells = [row["model"], row["losses_every"]]
        for system in ("oobleck", "varuna"):
            own = row[system]
            cells += [f"{own['replayed']:.4g}", f"{own['published']:.4g}", f"{own['ratio']:.3f}"]
        cells.append(f"{row['bamboo']['published']:.4g}" if "bamboo" in row else "-")
        print("".join(f"{cell:>14}" for cell in cells))
    print(f"\n{'slow workers':>14}{'step':>14}{'of the bound':>14}")
    for each in slow:
        print(f"{each['slow']:>14}{each['step']:>14.3f}{each['of_bound']:>14.3f}")


if __name__ == "__main__":
    main()
